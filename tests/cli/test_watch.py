"""``unsilent watch``: the state of a job once, as lines, as JSON, and live in a real terminal while files grow."""

from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import command, in_process
from events import made_events as made
from unsilent.cli import watch
from unsilent.cli.watch import BARS, NOT_FINITE, sparkline
from unsilent.events import event_files
from unsilent.events.host import host_name, pid_namespace
from unsilent.events.sinks.json_lines import JsonLinesSink


def written(folder, job):
    for rank, events in job.items():
        sink = JsonLinesSink(folder / "e.jsonl", rank, len(job))
        for event in events:
            sink(event)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return written(tmp_path, made.job(600, alarms=((200, 1), (201, 1))))


# -- curves --------------------------------------------------------------------------------------------------------------


def test_curves_rise_and_fall():
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == BARS[0]
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BARS
    assert sparkline([3, 1], 8) == BARS[-1] + BARS[0]
    assert sparkline(list(range(80)), 8) == BARS
    assert sparkline([1, math.nan, 2, math.inf], 8) == BARS[0] + NOT_FINITE + BARS[-1] + NOT_FINITE
    assert sparkline([1, 10, 100, 1000], 4)[1:3] == BARS[2] + BARS[5]  # logarithmic where numbers differ much


@given(values=st.lists(st.floats(), max_size=50), width=st.integers(1, 20))
def test_any_numbers_make_a_curve(values, width):
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= {*BARS, NOT_FINITE}


# -- incidents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--once",), ("--once", "--plain"), ("--plain",)])
def test_the_incident_and_the_kind_of_fault_are_shown_once(words, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    job = made.job(300, alarms=((200, 1),))
    for rank, events in job.items():
        events[-1:-1] = [made.incident(201, rank), made.explained(201, rank), made.replicas_alarm(250, rank)]
    said = in_process("watch", written(tmp_path, job), *words).stdout
    for text in (
        "step 201, rank 1, fingerprint of fc.weight: the incident is recorded in runs/incidents/201-0a1b2c3d",
        "step 201: kind of fault: transient (UNSILENT-T01, minor), rank 1 (node-7, cuda:1); 5 clean replays (p < 0.6); go on",
        "parameters differ between ranks 0, 1", "is suspected, model",
    ):  # fmt: skip
        assert said.count(text) == 1, said


# -- once ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("e.jsonl",), (".",), ("e.jsonl", "--curve", "gradient-norm")])
def test_the_state_fits_in_80_columns(words, folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")  # a terminal without colours
    done = in_process("watch", *words, "--once", cwd=folder)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert lines[0] == "2 alarms in 600 steps of 2 ranks; rank 1 is suspected"
    assert max(map(len, lines)) <= 80
    zero, one = (next(line for line in lines if line.strip().startswith(rank)) for rank in "01")
    assert ("ok" in zero, "warning" in one, "ended" in one, "0.43 %" in one) == (True,) * 4
    assert len(set(one) & set(BARS)) > 2
    assert sum(line.startswith("alarm: step 20") for line in lines) == 2
    assert sum(line.startswith("verdict: step 201: rank 1") for line in lines) == 1


def test_a_log_gets_every_line_whole(folder):
    lines = in_process("watch", "e.jsonl", "--once", cwd=folder).stdout.splitlines()
    long = [line for line in lines if line.startswith("alarm: step 200: ")]
    assert long[0].endswith("in rank 1 (node-7, cuda:1)")
    assert not [line for line in lines if "…" in line]


def test_a_job_without_alarms_is_well(tmp_path):
    written(tmp_path, made.job(60, 1, alarms=()))
    done = in_process("watch", "e.jsonl", "--once", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no alarm in 60 steps of 1 rank\n")


def test_an_alarm_of_the_run_that_a_job_continued_is_one(tmp_path):
    job = {
        0: [
            made.started(first_step=0),
            made.alarm(5),
            made.ended(6, alarms=1),
            made.started(first_step=4),
            made.ended(9),
        ]
    }
    written(tmp_path, job)
    for words in ((), ("--plain",), ("--json",)):
        done = in_process("watch", "e.jsonl", "--once", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (1, "")
        assert "1 alarm in an earlier run" in done.stdout
    assert "these files" not in done.stdout


def test_plain_columns(folder):
    done = in_process("watch", "e.jsonl", "--once", "--plain", cwd=folder)
    heads, *rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert done.returncode == 1
    assert [dict(zip(heads, row, strict=True))["health"] for row in rows] == ["ok", "warning"]
    assert [dict(zip(heads, row, strict=True))["step"] for row in rows] == ["599", "599"]


def test_json(folder):
    done = in_process("watch", "e.jsonl", "--json", cwd=folder)
    values = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (done.returncode, done.stderr) == (1, "")
    assert values["events"] == ["e.rank0.jsonl", "e.rank1.jsonl"]
    assert [one["alarms"] for one in values["ranks"]] == [0, 2]
    assert (values["steps"], values["alarms"], values["ended"]) == (600, 2, True)
    assert values["latest_alarms"][0]["kind"] == "alarm"


def test_a_job_that_only_began(tmp_path):
    written(tmp_path, {0: [made.started()]})
    for words in ((), ("--plain",), ("--json",)):
        done = in_process("watch", "e.jsonl", "--once", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no.jsonl",), "there are no events in no.jsonl; a job writes them from its first backward pass on"),
        (("e.jsonl", "--curve", "los"), "unknown curve 'los'; did you mean 'loss'?"),
        (("text.jsonl",), "line 1 of text.jsonl is not an event"),
    ],
)
def test_wrong_words(words, said, folder):
    (folder / "text.jsonl").write_text("hello\n")
    done = in_process("watch", *words, "--once", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_files_that_are_too_large_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(event_files, "MOST_BYTES", 1000)
    for words in (("watch", "e.jsonl"), ("watch", "e.jsonl", "--once"), ("report", "e.jsonl")):
        done = in_process(*words, cwd=folder)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "are read; give the file of one rank" in done.stderr


def test_many_ranks_fit_in_a_terminal(tmp_path):
    from rich.console import Console

    job = watch.JobEvents(written(tmp_path, made.job(20, 40, alarms=((3, 33),))) / "e.jsonl")
    job.read_new()
    console = Console(width=80, height=24, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.capture() as capture:
        console.print(watch.view(job.history, job.lost, 80, 24, "loss"))
    lines = capture.get().splitlines()
    assert len(lines) <= 24
    assert any(line.startswith("  33 ") for line in lines)
    assert any(line.startswith("and ") and line.endswith(" more ranks") for line in lines)
    console.file.close()


def test_what_was_not_judged_has_no_score_and_the_end_says_how(tmp_path):
    written(tmp_path, {0: [made.started(), made.summary(3, score=None), made.ended(4, how="error", unjudged=7)]})
    done = in_process("watch", "e.jsonl", "--once", "--plain", cwd=tmp_path)
    assert done.stdout.startswith("# no alarm in 4 steps of 1 rank; 7 series had too few values to be judged\n")
    assert ("–" in done.stdout, done.stdout.rstrip().endswith("error")) == (True, True)
    (rank,) = json.loads(in_process("watch", "e.jsonl", "--json", cwd=tmp_path).stdout)["ranks"]
    assert (rank["score"], rank["how_ended"], rank["unjudged"]) == (None, "error", 7)


def test_a_verdict_of_one_rank_is_shown_only_if_something_was_done(tmp_path):
    alone = made.verdict(3, suspect=0, reason="one rank", action="log", outcome="the training goes on")
    saved = made.verdict(5, suspect=0, reason="one rank", action="save", outcome="the state was saved to x.pt")
    written(tmp_path, {0: [made.started(), made.alarm(3), alone, saved, made.ended(9, alarms=1)]})
    for words in (("--once",), ("--once", "--plain"), ("--plain",)):
        shown = in_process("watch", "e.jsonl", *words, cwd=tmp_path).stdout
        assert ("goes on" in shown, "is suspected" in shown) == (False, False)
        assert (
            " ".join(shown.split()).count("step 5: model.layers.3.mlp.down_proj.weight; the state was saved to x.pt")
            == 1
        )


# -- following -----------------------------------------------------------------------------------------------------------


def test_lines_are_printed_as_events_come(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "REFRESH_SECONDS", 0.05)
    job = made.job(600, alarms=((200, 1),))
    written(tmp_path, {rank: events[:5] for rank, events in job.items()})

    def go_on():
        time.sleep(0.3)
        written(tmp_path, {rank: events[5:] for rank, events in job.items()})

    writer = threading.Thread(target=go_on)
    writer.start()
    done = in_process("watch", "e.jsonl", "--plain", cwd=tmp_path)
    writer.join()
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].startswith("monitoring rank 0 of 2")
    assert sum(line.startswith("step 200: gradient of model.layers.3") for line in lines) == 1
    assert sum(line.startswith("the monitor of rank") for line in lines) == 2
    assert lines[-1] == "1 alarm in 600 steps of 2 ranks; rank 1 is suspected"


def test_a_job_that_has_not_begun_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "REFRESH_SECONDS", 0.05)
    writer = threading.Timer(0.3, lambda: written(tmp_path, {0: [made.started(), made.ended(3)]}))
    writer.start()
    done = in_process("watch", "e.jsonl", "--plain", cwd=tmp_path)
    writer.join()
    assert done.stdout.startswith("no events yet\n")
    assert done.stdout.endswith("no alarm in 3 steps of 1 rank\n")
    assert in_process("watch", "missing/e.jsonl", "--plain", cwd=tmp_path).returncode == 2


@pytest.mark.slow
def test_a_terminal_shows_a_growing_file_until_the_job_ends(tmp_path):
    job = made.job(600, alarms=((200, 1),))
    written(tmp_path, {rank: events[:5] for rank, events in job.items()})
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        command("watch", "e.jsonl"), cwd=tmp_path, stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while b"no alarm in" not in shown:
            shown += os.read(ours, 65536)
        written(tmp_path, {rank: events[5:] for rank, events in job.items()})
        while process.poll() is None:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "1 alarm in 600 steps of 2 ranks; rank 1 is suspected" in shown.decode()
    assert "Traceback" not in shown.decode()


@pytest.mark.slow
def test_ctrl_c_ends_watching(tmp_path):
    written(tmp_path, {0: [made.started(), made.alarm(1)]})
    process = subprocess.Popen(
        command("watch", "e.jsonl"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().startswith("monitoring rank 0")
        process.send_signal(2)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, "")


# -- jobs that were killed -----------------------------------------------------------------------------------------------


def killed_process():
    """The number of a process that does not exist any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("words", [("--plain",), ("--once",), ("--once", "--plain")])
def test_a_killed_rank_is_named_with_exit_code_1(words, tmp_path):
    start = made.started(host=host_name(), process=killed_process(), pid_namespace=pid_namespace())
    written(tmp_path, {0: [start, made.summary(7)]})
    done = in_process("watch", "e.jsonl", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "rank 0: its process" in done.stdout
    assert " ".join(done.stdout.split()).count("does not exist any more, and wrote no last event") == 1
    (one,) = json.loads(in_process("watch", "e.jsonl", "--json", cwd=tmp_path).stdout)["lost"]
    assert (one["rank"], "does not exist any more" in one["reason"]) == (0, True)


def test_a_silent_rank_and_one_that_never_wrote_are_named(tmp_path):
    written(tmp_path, {0: [made.started(0, 2), made.summary(7)], 1: []})
    (tmp_path / "e.rank1.jsonl").unlink()
    os.utime(tmp_path / "e.rank0.jsonl", (0, 0))
    done = in_process("watch", "e.jsonl", "--plain", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "rank 0 (node-7) has written no event for" in done.stdout
    assert "there are no events of rank 1" in done.stdout


FOR_EVER = """
import time, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
while True:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_watching_a_job_that_is_killed_ends(tmp_path):
    (tmp_path / "train.py").write_text(FOR_EVER)
    job = subprocess.Popen(command("run", "--events", "e.jsonl", "train.py"), cwd=tmp_path, stderr=subprocess.DEVNULL)
    watching = subprocess.Popen(
        command("watch", "e.jsonl", "--plain"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while not watching.stdout.readline().startswith("monitoring rank 0"):
            pass
        job.kill()
        out, errors = watching.communicate(timeout=60)
    finally:
        for process in (job, watching):
            process.kill()
            process.wait()
    assert (watching.returncode, errors) == (1, "")
    assert f"process {job.pid} on {host_name()} does not exist any more" in out
