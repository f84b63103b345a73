"""Ranks that write no events any more: what is proof, what is silence, and what is only a long step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from events import made_events as made
from unsilent.events.host import host_name, pid_namespace
from unsilent.events.lost_ranks import LEAST_SILENCE, find_lost, gone_processes
from unsilent.events.run_history import RunHistory

SECOND = [made.summary(step) for step in range(0, 100, 5)]


def here(process, rank=0, world_size=1, **more):
    place = {"host": host_name(), "pid_namespace": pid_namespace()}
    return made.started(rank, world_size, process=process, **{**place, **more})


def lost_after(silence, *events, gone=()):
    history = RunHistory(events)
    return find_lost(history, dict.fromkeys(range(9), 1000.0), set(gone), 1000.0 + silence)


def test_a_silent_rank_of_another_host_is_lost_after_a_time():
    events = made.started(), *SECOND
    assert lost_after(LEAST_SILENCE - 1, *events) == ({}, False)
    reasons, is_over = lost_after(LEAST_SILENCE + 1, *events)
    assert is_over
    assert reasons == {
        0: "rank 0 (node-7) has written no event for 10 min, before one at least every 1 s; the last is of step 95"
    }
    assert lost_after(LEAST_SILENCE + 1, *events, made.ended(99)) == ({}, False)


def test_the_time_follows_from_the_length_of_steps():
    slow = [made.summary(step, time=made.BEGAN + 400 * step) for step in range(3)]
    assert lost_after(3999, made.started(), *slow) == ({}, False)
    assert lost_after(4001, made.started(), *slow)[1]


def test_a_process_that_exists_may_take_its_time():
    assert lost_after(1e9, here(os.getpid(), time=made.BEGAN), *SECOND) == ({}, False)


def test_a_process_that_does_not_exist_is_lost_at_once():
    reasons, is_over = lost_after(0, here(12345), *SECOND, gone=[0])
    assert is_over
    assert f"rank 0: its process 12345 on {host_name()} does not exist any more, and wrote no last event" in reasons[0]


def test_ranks_that_wait_for_a_lost_one_are_waited_for_within_the_bound():
    job = here(os.getpid(), 0, 2), here(12345, 1, 2), *SECOND, *(made.summary(step, 1) for step in range(3))
    assert (set(lost_after(1, *job, gone=[1])[0]), lost_after(1, *job, gone=[1])[1]) == ({1}, False)
    assert lost_after(LEAST_SILENCE + 1, *job, gone=[1])[1]


def test_a_rank_that_never_wrote_is_named_once_no_other_writes():
    begun = made.started(0, 2), *SECOND
    assert lost_after(1, *begun) == ({}, False)
    assert lost_after(1, *begun, made.ended(99)) == ({}, False)  # it ended well: rank 1 may have written elsewhere
    reasons, is_over = lost_after(1, *begun, made.ended(99, how="error"))
    assert (set(reasons), is_over) == ({1}, True)
    assert reasons[1] == "there are no events of rank 1, and the other ranks have not ended well"
    reasons, is_over = lost_after(LEAST_SILENCE + 1, here(os.getpid(), 0, 2), *SECOND)
    assert (set(reasons), is_over) == ({1}, True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_that_are_gone():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:

        def gone(**more):
            return gone_processes(RunHistory([here(process.pid, **{"time": 4e9, **more})]))

        assert gone() == set()
        assert gone(time=made.BEGAN - 1e9) == {0}  # it began later than the events: another process of this number
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert gone() == {0}  # nobody has asked for its exit code yet
        process.wait()
        assert gone() == {0}
        assert gone(host="elsewhere") == set()
        assert gone(pid_namespace="pid:[1]") == set()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
