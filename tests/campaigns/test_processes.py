"""The executor's own bookkeeping, without a process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from types import SimpleNamespace

import pytest

from unsilent.campaigns.observer import Observer
from unsilent.campaigns.processes import PAUSE, ProcessExecutor, RefillableIterator
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.spec import TrialId

TRIAL = TrialId("a", 1, 0)


def test_whether_any_is_left_takes_none():
    assert not RefillableIterator(deque(), iter(())).any_left()
    source = RefillableIterator(deque(), iter([TRIAL]))
    assert source.any_left()
    assert list(source) == [TRIAL]
    assert not source.any_left()


@pytest.mark.parametrize("stopped", [0.0, 10 * PAUSE])
def test_a_stopped_driver_takes_no_time_from_its_workers(stopped):
    executor = ProcessExecutor(WorkerJob(SimpleNamespace, SimpleNamespace()), 1, Observer())
    now = time.monotonic()
    worker = SimpleNamespace(since=now - 100)
    executor._workers.append(worker)
    executor._looked = now - stopped
    executor._forgive_pauses()
    assert worker.since == pytest.approx(now - 100 + stopped, abs=1)
    executor._workers.clear()


@pytest.mark.slow
def test_the_driver_of_a_campaign_never_loads_torch(tmp_path, monkeypatch):
    """Start and memory of every command would grow by it; what a worker sends must not bring it along."""
    (tmp_path / "small.py").write_text(
        "import torch, unsilent\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return unsilent.Workload(torch.nn.Linear(6, 3), [torch.randn(5, 6)])\n"
    )
    command = (
        "import sys; from unsilent.cli.main import run; "
        "code = run(['pvf', 'small.py:make', '--rel', '80%', '--ci', '20%', '--store', 's.sqlite', '--quiet', '--jobs', '1']); "
        "assert code == 0, code; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
