"""Which rank never entered which collective: planted desyncs of real gloo processes, and dumps that are altered."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import distributed

from conftest import in_process
from timeline import make_hang
from unsilent.basics.errors import UsageError
from unsilent.cli.main import run
from unsilent.timeline.dump import write_dump
from unsilent.timeline.flight_recorder import read_dumps
from unsilent.timeline.hang import find_hang

DATA = Path(__file__).parent / "data" / "hang"
"""Dumps of jobs that ``make_hang.py`` ran; a folder for each case, JSON and pickle."""
FORMS = ("json", "pickle")


def found(name, form):
    """What is said of a stored case: (rank, number, operation) of those missing, (number, ways) of those that differ."""
    result = find_hang([DATA / name / form])
    missing = [(one.ranks, one.group.name, one.number, one.collective.operation) for one in result.missing]
    different = [
        (one.number, [(call.operation, call.sent, ranks) for call, ranks in one.ways]) for one in result.different
    ]
    return missing, different, result.exit_code


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "missing", "different"),
    [
        ("healthy", [], []),
        ("stop", [((1,), "0", 3, "all_reduce")], []),
        ("skip", [], [(2, [("all_reduce", ((4, 3),), (0,)), ("broadcast", ((8,),), (1,))])]),
        ("operation", [], [(2, [("all_reduce", ((4, 3),), (0,)), ("all_gather", ((4, 3),), (1,))])]),
        ("size", [], [(2, [("all_reduce", ((4, 3),), (0,)), ("all_reduce", ((5, 3),), (1,))])]),
        ("subgroup", [((1,), "2", 1, "all_reduce")], []),
        ("message", [((1,), "0", 2, "all_reduce")], []),
    ],
)
def test_a_planted_desync_is_named_with_rank_and_collective(name, form, missing, different):
    assert found(name, form) == (missing, different, int(bool(missing or different)))


@pytest.mark.parametrize(
    ("dumps", "verdict"),
    [("healthy", "none"), ("stop", "missing"), ("skip", "different"), ("stop/json/flight-rank0.json", "waiting")],
)
def test_the_json_object_has_a_verdict(dumps, verdict):
    path = DATA / dumps
    result = find_hang([path if path.is_file() else path / "json"])
    assert result.report().further_json["results"]["verdict"] == verdict


def test_a_pickled_dump_says_where_in_the_code():
    (missing,) = find_hang([DATA / "stop" / "pickle"]).missing
    assert (missing.collective.file, missing.waiting) == ("train.py", (0,))
    assert missing.collective.line > 0


def test_a_skipped_collective_that_equals_the_next_one_shows_in_lines_of_code():
    result = find_hang([DATA / "skip_equal" / "pickle"])
    (missing,), (lines,) = result.missing, result.other_lines
    assert (missing.ranks, missing.number) == ((1,), 3)
    assert lines.number == 2
    assert [ranks for _, ranks in lines.ways] == [(0,), (1,)]
    assert "a rank may have skipped one there" in repr(result.report().findings)


def test_the_command_names_what_was_not_looked_at(tmp_path):
    for rank, name in ((0, "dump_0"), (2, "dump_2")):
        shutil.copy(DATA / "stop" / "json" / f"flight-rank{min(rank, 1)}.json", tmp_path / f"{name}.json")
    done = in_process("timeline", "hang", tmp_path, "--plain")
    assert (done.returncode, done.stderr) == (1, "")
    assert "Rank 2 had not entered collective 3" in done.stdout
    assert "there is no dump of rank 1: what was entered there is not known" in done.stdout
    assert "a rank above 2 would not be noticed" in done.stdout


def test_a_missing_rank_may_wait_in_a_message_that_dumps_do_not_hold():
    """Rank 1 of ``message`` was stopped, not waiting; a rank that waits in a recv leaves the same dump over gloo."""
    missing, healthy = (find_hang([DATA / name / "json"]).report() for name in ("message", "healthy"))
    assert any("may be waiting for one, and dumps of gloo do not hold them" in note for note in missing.notes)
    assert not any("gloo" in note for note in healthy.notes)


def test_one_dump_alone_says_what_it_cannot_know():
    done = in_process("timeline", "hang", DATA / "stop" / "json" / "flight-rank0.json", "--json")
    assert (done.returncode, json.loads(done.stdout)["results"]["stuck"][0]["waiting"]) == (0, [0])
    done = in_process("timeline", "hang", DATA / "stop" / "json" / "flight-rank0.json", "--plain")
    assert "This is the dump of rank 0 alone, which cannot say what other ranks entered" in done.stdout


# -- dumps that are altered ----------------------------------------------------------------------------------------------


def write(folder, *dumps):
    for rank, dump in enumerate(dumps):
        (folder / f"dump_{rank}.json").write_text(json.dumps(dump))
    return folder


def stored(name):
    return [json.loads((DATA / name / "json" / f"flight-rank{rank}.json").read_text()) for rank in range(2)]


def test_entries_that_a_full_recorder_dropped_are_said_and_leave_its_rank_unaccused(tmp_path):
    waiting, other = stored("stop")
    other["entries"] = [{**other["entries"][0], "record_id": 5000, "pg_id": 7, "process_group": ["7", "x"]}]
    result = find_hang([write(tmp_path, waiting, other)])
    assert (result.missing, result.dropped, result.not_compared) == ((), {1: 5000}, (1,))


def test_members_that_a_dump_names_are_believed(tmp_path):
    dumps = stored("subgroup")
    for dump in dumps:
        dump["pg_config"] = {"2": {"name": "2", "desc": "x", "ranks": "[0]"}}
    assert find_hang([write(tmp_path, *dumps)]).missing == ()


def test_a_rank_that_entered_nothing_at_all_is_named(tmp_path):
    """Torch leaves the entries out of the JSON form then, and gives gloo's group without a name the rank as its only member."""
    empty = {"comm_lib_version": "", "pg_config": {"": {"desc": "", "name": "", "ranks": "[7]"}}, "pg_status": {}}
    result = find_hang([write(tmp_path, stored("stop")[0], empty)])
    assert [(one.ranks, one.number) for one in result.missing] == [((1,), 1)]
    assert result.without_dump == ()


def test_shapes_may_differ_where_the_elements_are_as_many(tmp_path):
    dumps = stored("stop")
    dumps[1]["entries"][1] |= {"input_sizes": [[12]], "output_sizes": [[12]]}
    assert find_hang([write(tmp_path, *dumps)]).different == ()


def test_names_are_escaped_where_they_are_shown(tmp_path):
    dumps = stored("stop")
    for dump in dumps:
        for entry in dump["entries"]:
            entry["profiling_name"] = "gloo:\x1b[31mred"
    done = in_process("timeline", "hang", write(tmp_path, *dumps), "--plain")
    assert done.returncode == 1
    assert "\x1b" not in done.stdout


class Caller:
    def __reduce__(self):
        return Path.touch, (Path("called"),)


def nested(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"{}", b'{"entries": 3, "pg_status": {}}', b'{"entries": [], "pg_status": []}', nested(100_000),
        b'{"entries": [NaN], "pg_status": {}}', b'{"entries": [], "pg_status": {"0": {"last_enqueued_collective": 1e999}}}',
        b'{"entries": [], "pg_status": {"0": {"last_enqueued_collective": ' + b"9" * 5000 + b"}}}",
        b'{"entries": [], "pg_status": {"0": {"last_enqueued_collective": "' + b"9" * 5000 + b'"}}}',
        b'{"entries": [], "pg_status": {}, "pg_config": {"0": {"name": "0", "ranks": "[[[["}}}',
        pickle.dumps({"entries": Caller(), "pg_status": {}}), pickle.dumps({"entries": [Caller()], "pg_status": {}}),
        pickle.dumps({"entries": [], "pg_status": {}})[:-3], pickle.dumps([1]), b"\x80\x02", b"\xff\xfe\x00",
    ],
    ids=lambda content: repr(content[:40]),
)  # fmt: skip
def test_what_is_no_dump_is_refused_in_one_line(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("dump_0").write_bytes(content)
    done = in_process("timeline", "hang", "dump_0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("unsilent: error: dump_0 is no dump of the flight recorder: ")
    assert not Path("called").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "holds 0 dumps"),
        (("notes.txt", "trace-rank0.json", ".hidden_0"), "holds 0 dumps"),
        (("dump_1", "flight-rank1.json"), "are both of rank 1"),
        (("dump_99999999999999999999",), "is not named after a rank"),
    ],
)
def test_folders_without_one_dump_of_each_rank_are_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=message):
        find_hang([tmp_path])


def test_a_dump_that_refers_to_one_list_again_and_again_is_refused_soon(tmp_path):
    entry = {**stored("stop")[0]["entries"][0], "input_sizes": [[1]] * 2000}
    entries = [{**entry, "collective_seq_id": number} for number in range(2000)]
    (tmp_path / "dump_0").write_bytes(pickle.dumps({"entries": entries, "pg_status": {}}))
    with pytest.raises(UsageError, match=r"more than 2,097,152 entries, sizes and frames"):
        find_hang([tmp_path])


def altered(value, rng):
    """A value of JSON with one part replaced by what does not belong there, or left out."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.1:
            del value[key]
        else:
            value[key] = altered(value[key], rng)
        return value
    return rng.choice([None, True, -1, 2**70, 1.5, "", "x\n", "1", [], {}, [[]], float("nan"), {"0": {}}, [-1], "[2]"])


@pytest.mark.parametrize("form", FORMS)
def test_altered_dumps_are_read_or_refused_in_one_line(tmp_path, form, capsys):
    rng, codes = random.Random(form), set()
    for _ in range(150):
        one, two = stored(rng.choice(["stop", "skip", "subgroup", "size"]))
        one = altered(one, rng)
        for rank, dump in enumerate((one, two)):
            content = pickle.dumps(dump, 2) if form == "pickle" else json.dumps(dump).encode()
            if rank == 0 and rng.random() < 0.3:
                at = rng.randrange(len(content))
                content = content[:at] + bytes([rng.randrange(256)]) + content[at + rng.randrange(3) :]
            (tmp_path / f"d{rank}").write_bytes(content)
        code = run(["timeline", "hang", str(tmp_path), "--plain"])
        out, error = capsys.readouterr()
        codes.add(code)
        assert code in (0, 1, 2), error
        assert error.count("\n") == (code == 2)
        assert "Traceback" not in error + out
    assert codes == {0, 1, 2} or codes == {1, 2}


# -- real processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_stops_is_named_by_the_dumps_of_real_processes(tmp_path, form):
    make_hang.run("stop", tmp_path)
    result = find_hang([tmp_path / form])
    assert [(one.ranks, one.number, one.waiting) for one in result.missing] == [((1,), 3, (0,))]


def test_a_written_dump_names_the_members_of_groups(tmp_path):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group = distributed.new_group([0])
        distributed.all_reduce(torch.ones(3), group=group)
        write_dump(tmp_path / "dumps")
        name = group.group_name
    finally:
        distributed.destroy_process_group()
    (dump,) = read_dumps([tmp_path / "dumps"])
    assert dump.members[name] == {0}
    assert len(dump.members) == 2
    entered = next(one for of, one in dump.groups.items() if of.name == name)
    assert entered.collectives[1].operation == "all_reduce"
    assert entered.collectives[1].file.endswith("test_hang.py")


def test_equal_collectives_of_which_one_may_have_been_skipped_are_said(tmp_path):
    """Collective 2 was skipped, and paired with the equal collective 3."""
    (missing,) = find_hang([DATA / "skip_equal" / "json"]).missing
    assert (missing.since, missing.number) == (2, 3)
    said = find_hang([DATA / "skip_equal" / "json"]).report().headline
    assert "or skipped an earlier one: collectives 2 to 3 are equal" in said
    (missing,) = find_hang([DATA / "stop" / "pickle"]).missing  # called in other lines before
    assert (missing.since, missing.number) == (3, 3)

    dumps = stored("skip")
    for dump in dumps:
        dump["entries"][0] |= {key: dumps[0]["entries"][1][key] for key in ("input_sizes", "output_sizes")}
    (different,) = find_hang([write(tmp_path, *dumps)]).different
    assert (different.since, different.number) == (1, 2)
    assert "one of the equal collectives 1 to 2 may have been skipped" in find_hang([tmp_path]).report().headline


def test_ranks_without_a_dump_are_named_where_others_wait_for_nobody_known(tmp_path):
    waiting = DATA / "stop" / "json" / "flight-rank0.json"
    for rank in (1, 2):
        shutil.copy(waiting, tmp_path / f"dump_{rank}.json")
    assert find_hang([tmp_path]).report().headline == (
        "Ranks 1, 2 wait in group 0 (default_pg); no rank with a dump is known to be missing from it, and rank 0 has no dump"
    )
