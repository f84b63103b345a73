"""``--on-alarm-exec``: a command gets the first verdict once, and whatever it does the job goes on."""

from __future__ import annotations

import json
import logging
import time

import pytest

from unsilent.events.event_kinds import AlarmExplained, Verdict
from unsilent.events.host import FIRST_STEP
from unsilent.launch import alarm_command
from unsilent.launch.alarm_command import AlarmCommand

WHO = {"time": 1.0, "step": 7, "suspect": 2, "host": "node-7", "device": "cuda:1"}
EXPLAINED = AlarmExplained(
    **WHO,
    rank=0,
    fault="device",
    code="UNSILENT-D01",
    level="major",
    action="replace it",
    reason="came again",
    exit_code=17,
)


def agreed(action="log", rank=0):
    return Verdict(**WHO, rank=rank, reason="vote", action=action, outcome="", tensor="weight", ranks=(2,))


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """``ran(*events, command=…)``: the verdicts that a command got."""
    monkeypatch.chdir(tmp_path)

    def run(*events, command="cat >> got; echo >> got", is_explained=True):
        sink = AlarmCommand(command, is_explained)
        for event in events:
            sink(event)
        sink.wait()
        path = tmp_path / "got"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return run


def test_it_gets_the_fields_of_the_verdict_once(ran):
    (got,) = ran(agreed(), EXPLAINED, EXPLAINED)
    assert got == {
        "kind": "device", "step": 7, "training_step": 7, "rank": 2,
        "host": "node-7", "device": "cuda:1", "code": "UNSILENT-D01", "level": "major",
        "action": "replace it", "reason": "came again", "exit_code": 17,
    }  # fmt: skip


@pytest.mark.parametrize("is_explained", [True, False])
def test_it_gets_the_step_of_the_training_that_a_run_continued(ran, monkeypatch, is_explained):
    monkeypatch.setenv(FIRST_STEP, "40")
    (got,) = ran(agreed(), EXPLAINED, is_explained=is_explained)
    assert (got["step"], got["training_step"]) == (7, 47)


@pytest.mark.parametrize(("action", "code"), [("log", 0), ("stop", 16)])
def test_without_replay_the_verdict_that_names_the_rank_is_taken(ran, action, code):
    (got,) = ran(agreed(action), agreed(), is_explained=False)
    assert (got["kind"], got["rank"], got["host"], got["exit_code"]) == ("undetermined", 2, "node-7", code)


def test_further_ranks_run_nothing(ran):
    assert ran(agreed(rank=1), is_explained=False) == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no such node >&2; exit 3", "--on-alarm-exec: exit code 3: no such node; the job goes on"),
        ("kill -9 $$", "--on-alarm-exec: exit code -9; the job goes on"),
        ("sleep 60 & sleep 60", "--on-alarm-exec: killed after 0.3 seconds; the job goes on"),
        ("exec true", None),
    ],
)
def test_a_failure_is_logged(ran, caplog, monkeypatch, command, said):
    monkeypatch.setattr(alarm_command, "LIMIT_SECONDS", 0.3 if "sleep" in command else 30.0)
    begun = time.monotonic()
    with caplog.at_level(logging.ERROR, "unsilent.monitor"):
        ran(EXPLAINED, command=command)
    assert [one.getMessage() for one in caplog.records] == ([said] if said else [])
    assert time.monotonic() - begun < 20
