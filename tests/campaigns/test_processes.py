"""The executor's own bookkeeping, without a process."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace

import pytest

from unsilent.campaigns.observer import Silent
from unsilent.campaigns.processes import PAUSE, ProcessExecutor, Refillable
from unsilent.campaigns.spec import TrialId, WorkerSettings

TRIAL = TrialId("a", 1, 0)


def test_whether_any_is_left_takes_none():
    assert not Refillable(deque(), iter(())).any_left()
    source = Refillable(deque(), iter([TRIAL]))
    assert source.any_left()
    assert list(source) == [TRIAL]
    assert not source.any_left()


@pytest.mark.parametrize("stopped", [0.0, 10 * PAUSE])
def test_a_stopped_driver_takes_no_time_from_its_workers(stopped):
    executor = ProcessExecutor(
        SimpleNamespace(), jobs=1, deadline=None, observer=Silent(), worker_settings=WorkerSettings()
    )
    now = time.monotonic()
    worker = SimpleNamespace(since=now - 100)
    executor._workers.append(worker)
    executor._looked = now - stopped
    executor._forgive_pauses()
    assert worker.since == pytest.approx(now - 100 + stopped, abs=1)
    executor._workers.clear()
