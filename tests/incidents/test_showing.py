"""``unsilent incident show``: all of an incident, selected series, other folders, and folders that nobody of ours wrote."""

from __future__ import annotations

import json
import pickle

import pytest

from conftest import in_process
from events import made_incidents as made
from unsilent.basics.errors import UsageError
from unsilent.events.incident_folder import INCIDENT_FILE, add_fault_verdict, find_incident
from unsilent.incidents.showing import COMMAND, step_range
from unsilent.recovery.fault_verdict import FaultVerdict

VERDICT = FaultVerdict(
    kind="device", step=90, rank=1, code="UNSILENT-D01", reason="3 of 5 executions differed", action="replace it"
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    made.folder(tmp_path)
    return tmp_path


def show(*words, fails=False):
    done = in_process("incident", "show", *words)
    assert done.returncode == (2 if fails else 0), done.stderr
    if fails:
        assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr if fails else done.stdout


def test_all_of_it_is_printed(job):
    said = show(job)
    for text in (
        "Step 90, rank 1, gradient fc.weight l2 (node-7, cuda:1, own history); what kind of fault it was is not decided",
        "uuid GPU-1; pci 0000:3B:00.0", "runs/80.pt", "gradient fc.weight l2",
    ):  # fmt: skip
        assert text in said, said


def test_the_fault_verdict_is_shown(job):
    add_fault_verdict(find_incident(job), VERDICT)
    said = show(job, "--plain")
    assert "kind of fault: device (UNSILENT-D01)" in said
    assert "3 of 5 executions differed" in said
    assert "replace it" in said


def test_of_a_run_that_continued_a_training_both_steps_are_shown(job):
    made.change(find_incident(job) / INCIDENT_FILE, first_step=40)
    assert "Step 90, rank 1, gradient fc.weight l2, which is step 130 of the training (node-7" in show(job)
    values = json.loads(show(job, "--json"))
    assert (values["step"], values["first_step"], values["training_step"]) == (90, 40, 130)


def test_series_rank_and_steps_select(job):
    values = json.loads(show(job, "--series", "gradient fc.*", "--rank", "1", "--steps", "89..91", "--json"))
    rows = [(one["series"], one["rank"], one["step"]) for one in values["results"]]
    assert rows == [(f"gradient fc.{name} l2", 1, step) for name in ("weight", "bias") for step in (89, 90, 91)]
    assert values["results"][3]["value"] == 1000 + 3 * 9 + 1
    assert values["results"][1]["value"] is None  # not a number
    assert [one["rank"] for one in values["ranks"]] == [1]


def test_without_options_the_series_of_alarms_and_the_loss_are_shown(job):
    values = json.loads(show(job, "--json"))
    assert {(one["series"], one["rank"]) for one in values["results"]} == {
        ("gradient fc.weight l2", 1), ("loss number", 1), ("loss number", 0),
    }  # fmt: skip
    assert 80 not in {one["step"] for one in values["results"]}  # which was not read
    assert values["since"] == "step 90, rank 1, gradient fc.weight l2"
    assert values["schema"] == "unsilent/incident/1"


def test_the_page_has_figures_and_is_harmless(job, tmp_path):
    folder = find_incident(job)
    made.change(folder / INCIDENT_FILE, host="<script>alert(1)</script>")
    show(folder, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "gradient fc.weight l2" in page
    assert "<script>alert(1)" not in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--series", "nope*"), "no series in "),
        (("--rank", "7"), "has no part of rank 7; it has those of ranks 0"),
        (("--rank", "-1"), "--rank is -1"),
        (("--steps", "9"), "--steps is '9'; expected the first and the last step, such as 80..95"),
        (("--steps", "9..3"), "--steps is '9..3'"),
        (("--steps", "..3"), "--steps is '..3'"),
    ],
)
def test_what_there_is_not_is_one_line(words, said, job):
    assert said in show(job, *words, fails=True)


def test_a_folder_without_an_incident_is_one_line(tmp_path):
    assert "there is no incident in" in show(tmp_path, fails=True)
    assert "cannot read" in show(tmp_path / "nothing", fails=True)


def test_parts_that_are_missing_or_broken_are_named_and_the_rest_is_shown(job):
    folder = find_incident(job)
    (folder / "rank0" / "series.npz").write_bytes(pickle.dumps({"a": 1}))
    (folder / "rank1" / "rank.json").write_bytes(b"{")
    said = " ".join(show(folder).split())
    assert "is not a recording of a monitor" in said
    assert "rank1/rank.json is no record of an incident" in said
    assert "own history" in said


def test_a_record_of_other_steps_is_refused(job):
    folder = find_incident(job)
    made.change(folder / "rank1" / "rank.json", series_steps=[1, 2])
    assert "has 20 steps, and rank.json 2" in show(folder, "--rank", "1", fails=True)


def test_series_names_are_harmless(job):
    folder = find_incident(job)
    recording = made.recording(1)
    series = (recording.series[0]._replace(tensor="fc.weight\x1b[31m"), *recording.series[1:])
    made.Recording(series, recording.values, recording.seen, recording.seconds).save(folder / "rank1" / "series.npz")
    assert "\x1b[31m" not in show(folder, "--series", "*", "--plain")


def test_in_python(job):
    shown = COMMAND.function()(job, rank=1)
    assert shown.incident.step == 90
    with pytest.raises(UsageError, match="steps= is '1'"):
        COMMAND.function()(job, steps="1")
    assert step_range("3..3") == (3, 3)


@pytest.mark.parametrize("time", [1e300, -1e15, 3e11])
def test_a_time_that_no_monitor_writes_is_no_error(time, job):
    path = find_incident(job) / INCIDENT_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": time}))
    assert "Step 90, rank 1" in show(job)
