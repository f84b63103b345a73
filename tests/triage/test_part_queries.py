"""Queries of optional parts: logs, dumps of the flight recorder, seconds of steps, configurations. Quiet, spoiled and hostile."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest

from triage import made_triage as made
from unsilent.checkpoints.formats import hdf5_reader
from unsilent.events.incident_folder import SavedCheckpoint, read_incident, write_record
from unsilent.timeline.stragglers import PARTS
from unsilent.triage import parts
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, FindingKind, Outcome, Query
from unsilent.triage.investigation import investigate
from unsilent.triage.queries.table import TEMPLATES, execute
from unsilent.triage.triage_report import Triage

NEW = ("read-log", "read-flight-record", "find-straggler", "compare-settings")


def ask(path, name, **blanks):
    return execute(Bundle(path), Query(name, Blanks(**blanks)))


def place(found):
    return found.outcome, found.kind, found.ranks, found.step


def logged(tmp_path, *lines_of_ranks):
    path = made.folder(tmp_path, len(lines_of_ranks))
    for rank, lines in enumerate(lines_of_ranks):
        made.log(path, rank, *lines)
    return path


# -- logs ---------------------------------------------------------------------------------------------------------------


def test_logs_without_an_error_have_nothing(tmp_path):
    found = ask(logged(tmp_path, ["saved 80.pt"], ["ready"]), "read-log")
    assert (found.outcome, found.missing) == (Outcome.NOTHING, ())


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered", "OSError: [Errno 28] No space left on device",
        "Segmentation fault (core dumped)", "my.module.Surprise: what?", "[rank1]: ValueError: bad", "ERROR full", "Killed",
    ],
)  # fmt: skip
def test_an_error_that_one_rank_alone_logs_is_placed_with_the_step_before(tmp_path, line):
    lines = [line] if "Surprise" not in line else ["Traceback (most recent call last):", "  raise ValueError(x)", line]
    found = ask(logged(tmp_path, [], lines, []), "read-log")
    assert place(found) == (Outcome.LOCALISED, FindingKind.LOGGED_ERROR, (1,), 90)
    assert line.removeprefix("[rank1]: ") in found.text


@pytest.mark.parametrize(
    "line", [
        "metric MeanAbsoluteError 0.2", "reconstruction Error: 0.031", "0 ERROR lines, 0 CRITICAL", "loss_fn=MeanSquaredError()",
        "no CUDA error since boot", "FATAL: 0 ERROR: 0", "error: none",
    ],
)  # fmt: skip
def test_metrics_and_counts_of_no_errors_are_no_finding(tmp_path, line):
    assert ask(logged(tmp_path, [line], []), "read-log").outcome is Outcome.NOTHING


@pytest.mark.parametrize(
    "line", [
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", "failed (exitcode: -9)", "slurmstepd: 1 oom-kill event(s)",
        "terminate called after throwing an instance of 'c10::Error'", "Input/output error on /data", "Assertion `x` failed.",
        "HARDWARE FAILURE", "worker died unexpectedly",
    ],
)  # fmt: skip
def test_ends_of_a_program_and_of_a_device_are_found(tmp_path, line):
    found = ask(logged(tmp_path, [], [line]), "read-log")
    assert (found.outcome, found.ranks) == (Outcome.LOCALISED, (1,))


def test_an_error_that_was_handled_names_no_rank(tmp_path):
    """Rank 0 often logs alone: that no other rank logs a line says little."""
    path = logged(tmp_path, [], [])
    handled = [f"step {step}: loss 1" for step in range(91, 110)]
    made.log(path, 0, "wandb: ERROR rate limit exceeded", *handled)
    assert ask(path, "read-log").outcome is Outcome.DIFFERS


def test_an_error_that_all_ranks_log_names_none_of_them(tmp_path):
    lines = [f"RuntimeError: 0x7f{rank}a at /data/{rank}/x.bin" for rank in range(3)]
    assert place(ask(logged(tmp_path, *([one] for one in lines)), "read-log")) == (
        Outcome.DIFFERS, FindingKind.LOGGED_ERROR, (), 90,
    )  # fmt: skip


@pytest.mark.parametrize("line", [
    "RuntimeError: Connection closed by peer [127.0.0.1]:3", "Watchdog caught collective operation timeout", "step 90 loss nan",
])  # fmt: skip
def test_an_error_that_tells_of_another_rank_or_that_one_rank_logs_for_all_names_none(tmp_path, line):
    found = ask(logged(tmp_path, [line], []), "read-log")
    assert place(found) == (Outcome.DIFFERS, FindingKind.LOGGED_ERROR, (), 90)
    own = ask(logged(tmp_path / "own", [line], ["RuntimeError: mine"]), "read-log")
    assert (own.outcome, own.ranks) == (Outcome.LOCALISED, (1,))


def test_what_a_rank_logs_again_and_again_before_is_no_finding(tmp_path):
    path = logged(tmp_path, [], [])
    made.log(path, 1, "CacheError: miss 7", steps=range(60, 92))
    with (path / "rank1" / parts.LOG_FILE).open() as file:
        text = file.read()
    for step in (62, 65, 70):
        text = text.replace(f"step {step} ", f"CacheError: miss {step}\nstep {step} ")
    (path / "rank1" / parts.LOG_FILE).write_text(text)
    assert ask(path, "read-log").outcome is Outcome.NOTHING


def test_one_log_has_no_other_to_be_told_from(tmp_path):
    path = made.folder(tmp_path, 2)
    made.log(path, 1, "ValueError: x")
    found = ask(path, "read-log")
    assert (found.outcome, found.ranks) == (Outcome.DIFFERS, (1,))
    assert "no log.txt of 1 of 2 ranks" in found.missing[0]
    assert ask(path, "read-log", rank=0).outcome is Outcome.UNANSWERED
    assert ask(path, "read-log", rank=1).ranks == (1,)


@pytest.mark.parametrize(
    "word", ["skip_nan: true", "Top-1 Error 0.2", "0 errors", "NCCL_TIMEOUT=1800", "--log-level=ERROR"]
)
def test_words_that_are_no_error_are_not_taken_for_one(tmp_path, word):
    assert ask(logged(tmp_path, [word], []), "read-log").outcome is Outcome.NOTHING


# -- the flight recorder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "outcome", "kind", "ranks"),
    [
        ("healthy", Outcome.NOTHING, None, ()),
        ("stop", Outcome.LOCALISED, FindingKind.ABSENT_RANK, (1,)),
        ("size", Outcome.DIFFERS, FindingKind.UNLIKE_COLLECTIVES, (0, 1)),
    ],
)
def test_the_rank_that_is_missing_from_a_collective_is_named(tmp_path, case, outcome, kind, ranks):
    path = made.folder(tmp_path, 2)
    made.flight(path, case)
    found = ask(path, "read-flight-record")
    assert (found.outcome, found.kind, found.ranks) == (outcome, kind, ranks)
    assert found.text


def test_a_rank_without_a_dump_that_others_wait_for_is_no_proof(tmp_path):
    path = made.folder(tmp_path, 2)
    made.flight(path, "stop")
    (path / parts.FLIGHT_FOLDER / "rank1.json").unlink()
    found = ask(path, "read-flight-record")
    assert (found.outcome, found.kind, found.ranks) == (Outcome.DIFFERS, FindingKind.ABSENT_RANK, (1,))
    (path / parts.FLIGHT_FOLDER / "rank1.json").write_text("{")
    assert ask(path, "read-flight-record").ranks == ()  # it has one, which cannot be read


# -- stragglers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("step", [80, 85, 92])
def test_the_late_rank_is_named_with_its_part_and_the_step_from_which_it_is_late(tmp_path, ranks, step):
    path = made.folder(tmp_path, ranks)
    made.timeline(path, **made.times(ranks, [(1, "loader", step, 0.03)]))
    found = ask(path, "find-straggler")
    assert place(found) == (Outcome.LOCALISED, FindingKind.LATE_RANK, (1,), step)
    assert found.tensor == "loader"
    assert ask(path, "find-straggler", rank=1).ranks == (1,)
    assert ask(path, "find-straggler", rank=0).outcome is Outcome.NOTHING
    if step > 80:
        assert ask(path, "find-straggler", steps=(80, step - 1)).outcome in (Outcome.NOTHING, Outcome.UNANSWERED)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_rank_is_late_where_all_are_alike_or_one_is_alone(tmp_path, ranks):
    path = made.folder(tmp_path, ranks)
    made.timeline(path, **made.times(ranks))
    expected = Outcome.NOTHING if ranks > 1 else Outcome.UNANSWERED
    assert ask(path, "find-straggler").outcome is expected


@pytest.mark.parametrize(("share_kept", "most_named"), [(0.0, 1), (0.4, 3)])
def test_noise_names_no_rank_also_where_it_lasts_for_some_steps(tmp_path, share_kept, most_named):
    path = made.folder(tmp_path, 4)
    rng, named = np.random.default_rng(0), 0
    for _ in range(30):
        values = made.times(4, steps=range(60, 100))
        noise = rng.normal(0, 0.08, np.shape(values["seconds"]))
        for step in range(1, 40):
            noise[:, step] += share_kept * noise[:, step - 1]
        made.timeline(path, **{**values, "seconds": (np.array(values["seconds"]) * np.exp(noise)).tolist()})
        named += ask(path, "find-straggler").outcome is not Outcome.NOTHING
    assert named <= most_named


def test_a_rank_that_gains_elsewhere_what_it_loses_holds_nobody_back(tmp_path):
    path = made.folder(tmp_path, 2)
    made.timeline(path, **made.times(2, [(1, "loader", 80, 0.02), (0, "forward", 80, 0.04)]))
    assert ask(path, "find-straggler").ranks == (0,)


def test_parts_that_a_rank_has_not_are_not_compared(tmp_path):
    path = made.folder(tmp_path, 2)
    values = made.times(2, [(1, "loader", 80, 0.03)])
    seconds = np.array(values["seconds"])
    seconds[0, :, PARTS.index("optimizer")] = np.nan
    values["seconds"] = [[[None if np.isnan(x) else x for x in row] for row in rank] for rank in seconds.tolist()]
    made.timeline(path, **values)
    assert ask(path, "find-straggler").ranks == (1,)


# -- settings -----------------------------------------------------------------------------------------------------------

BEFORE = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 1, "run_name": "a", "output_dir": "/a", "date": "1"}


def test_a_setting_that_differs_from_the_earlier_run_is_named_with_both_values(tmp_path):
    path = made.folder(tmp_path, 2)
    made.configurations(path, {**BEFORE, "optimizer": {"lr": 3.0, "betas": [0.9, 0.99]}}, BEFORE)
    found = ask(path, "compare-settings")
    assert (*place(found), found.tensor) == (Outcome.DIFFERS, FindingKind.SETTINGS, (), 0, "optimizer/lr")
    assert "3.0" in found.text
    assert "0.1" in found.text


@pytest.mark.parametrize("change", [
    {"run_name": "b"}, {"output_dir": "/b", "date": "2"}, {"data": {"num_workers": 8}, "hostname": "n"}, {},
])  # fmt: skip
def test_names_folders_dates_hosts_and_workers_do_not_count(tmp_path, change):
    path = made.folder(tmp_path, 2)
    made.configurations(path, BEFORE | change, BEFORE)
    assert ask(path, "compare-settings").outcome is Outcome.NOTHING


@pytest.mark.parametrize(
    ("then", "now", "is_same"),
    [
        ({"rate": "1e-3"}, {"rate": 0.001}, True),
        ({"rate": float("nan")}, {"rate": float("nan")}, True),
        ({"hooks": {}}, {"hooks": None}, True),
        ({"hooks": []}, {}, True),
        ({"wandb_id": "a1", "git_sha": "0f", "log_level": "info"}, {"wandb_id": "b2", "git_sha": "1e"}, True),
        ({"seed": 2**60}, {"seed": 2**60 + 1}, False),
        ({"seed": str(2**60)}, {"seed": str(2**60 + 1)}, False),
        ({"rate": "1e-3"}, {"rate": "1e-2"}, False),
        ({"is_fast": False}, {"is_fast": True}, False),
    ],
)
def test_how_a_setting_is_written_does_not_count(tmp_path, then, now, is_same):
    path = made.folder(tmp_path, 2)
    made.configurations(path, now, then)
    assert (ask(path, "compare-settings").outcome is Outcome.NOTHING) is is_same


def test_settings_that_are_new_or_gone_differ_and_equal_numbers_do_not(tmp_path):
    path = made.folder(tmp_path, 1)
    made.configurations(path, {"a": 1, "c": 2}, {"a": 1.0, "b": 2})
    found = ask(path, "compare-settings")
    assert (found.outcome, found.tensor) == (Outcome.DIFFERS, "c")
    assert "c: no such setting then, 2 now, b: 2 then, no such setting now" in found.text


# -- packages that are not installed --------------------------------------------------------------------------------------


def test_a_query_whose_optional_package_is_missing_says_how_to_install_it(tmp_path, monkeypatch):
    path = made.folder(tmp_path)
    files = [tmp_path / f"{step}.h5" for step in (70, 80)]
    for file in files:
        file.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(512))
    saved = [SavedCheckpoint(path=str(one), step=int(one.stem), time=1.0, manifest="") for one in files]
    write_record(path, replace(read_incident(path), checkpoints=tuple(saved)))
    monkeypatch.setattr(hdf5_reader, "find_spec", lambda _: None)
    found = ask(path, "compare-checkpoints")
    assert found.outcome is Outcome.UNANSWERED
    assert "pip install 'unsilent[hdf5]'" in found.missing[0]


# -- hostile parts ------------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
ESCAPE = "\x1b[2J\u202e"


def whole(path):
    """All optional parts, each with something to find."""
    for rank, lines in enumerate([[], ["ValueError: " + ESCAPE]]):
        made.log(path, rank, *lines)
    made.flight(path, "stop")
    made.timeline(path, **made.times(2, [(1, "loader", 80, 0.03)]))
    made.configurations(path, {"a": ESCAPE}, {"a": 1})
    (path / parts.REPORT_FILE).write_text("it is slow " + ESCAPE)
    return path


PART_FILES = ("rank1/log.txt", "flight/rank1.json", "timeline.json", "configuration.json", "report.txt")


@pytest.mark.parametrize(
    "how", ["missing", "half", "noise", "pickle", "link", "folder", "empty", "deep", "large", "pipe"]
)
@pytest.mark.parametrize("name", PART_FILES)
def test_no_query_raises_on_a_damaged_optional_part(tmp_path, name, how):
    path = whole(made.folder(tmp_path, 2))
    file = path / name
    content = file.read_bytes()
    file.unlink()
    if how == "link":
        (path / "elsewhere").write_bytes(content)
        file.symlink_to(path / "elsewhere")
    elif how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "large":
        with file.open("wb") as large:
            large.truncate(2**31)
    elif how != "missing":
        noise = np.random.default_rng(1).integers(0, 256, 5000, np.uint8).tobytes()
        made_of = {
            "half": content[: len(content) // 2],
            "noise": noise,
            "pickle": pickle.dumps({"a": 1}, 2),
            "empty": b"",
        }
        file.write_bytes(made_of.get(how, DEEP.encode()))
    bundle = Bundle(path)
    said = [text for template in TEMPLATES for text in execute(bundle, Query(template)).missing]
    said += bundle.report()[1]
    if how in ("link", "folder", "large", "pipe") or (how in ("noise", "pickle") and name.endswith(".json")):
        assert any(file.name in text for text in said)
    assert Triage(investigate(path, is_run=True), 5).report().headline


@pytest.mark.parametrize("text", [
    json.dumps({"a" * 500_000: [{} for _ in range(100_000)]}), '{"a":' * 40 + "1" + "}" * 40, '{"a":' + "[" * 40 + "]" * 40 + "}",
    json.dumps({str(number): 0 for number in range(50_000)}), "[1]",
])  # fmt: skip
def test_settings_whose_names_would_take_the_memory_are_refused(tmp_path, text):
    path = made.folder(tmp_path, 1)
    made.configurations(path, {}, {})
    (path / parts.CONFIGURATION_FILE).write_text(text)
    found = ask(path, "compare-settings")
    assert found.outcome is Outcome.UNANSWERED
    assert "configuration.json" in found.missing[0]


def test_steps_that_took_no_time_have_no_late_rank(tmp_path):
    path = made.folder(tmp_path, 2)
    made.timeline(path, **(made.times() | {"seconds": [[[0.0] * 5] * 20] * 2}))
    assert ask(path, "find-straggler").outcome is Outcome.NOTHING


@pytest.mark.parametrize("values", [
    {"schema": 2}, {"parts": []}, {"parts": "loader"}, {"ranks": [0, 0]}, {"ranks": [0, -1]}, {"ranks": [0, 10**30]},
    {"steps": [1]},
    {"steps": [5, 4, *range(6, 24)]}, {"seconds": []}, {"seconds": [[["1"] * 5] * 20] * 2}, {"seconds": [[[1e300] * 5] * 20] * 2},
    {"seconds": [[[-1] * 5] * 20] * 2},
    {"seconds": [[[10**400] * 5] * 20] * 2}, {"seconds": [[[[1]] * 5] * 20] * 2}, {"parts": [{}] * 5}, {"seconds": None},
])  # fmt: skip
def test_times_that_nobody_of_ours_writes_are_refused(tmp_path, values):
    path = made.folder(tmp_path, 2)
    made.timeline(path, **{**made.times(2), **values})
    found = ask(path, "find-straggler")
    assert found.outcome is Outcome.UNANSWERED
    assert "timeline.json" in found.missing[0]


def test_no_text_of_an_optional_part_reaches_the_terminal_unescaped(tmp_path):
    path = whole(made.folder(tmp_path, 2))
    values = made.times(2, [(1, "loader", 80, 0.03)])
    made.timeline(path, **{**values, "parts": [one.replace("loader", "l" + ESCAPE) for one in PARTS]})
    bundle = Bundle(path)
    for name in NEW:
        found = execute(bundle, Query(name))
        assert found.kind is not None, name
        assert ESCAPE[0] not in found.text + found.tensor
        assert ESCAPE[-1] not in found.text + found.tensor


def test_a_folder_without_optional_parts_answers_none_of_their_queries(tmp_path):
    bundle = Bundle(made.folder(tmp_path, 1))
    for name in NEW:
        found = execute(bundle, Query(name))
        assert found.outcome is Outcome.UNANSWERED
        assert len(json.dumps(found.missing)) < 200
