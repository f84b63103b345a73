"""What a campaign says it has cost: wall and CPU time of the same stretch, and only of sessions that ran trials."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import unsilent
from unsilent.campaigns import Budget, run_campaign
from unsilent.campaigns.executors import make_executor
from unsilent.campaigns.stopwatch import Stopwatch
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.spec import PvfSpec


def usage(path):
    with PvfStore(path) as store:
        return store.total_session_seconds()


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_both_clocks_cover_the_same():
    watch = Stopwatch()
    burn(0.1)
    time.sleep(0.1)
    wall, cpu = watch.lap()
    assert 0.09 < cpu <= wall
    assert wall > 0.19
    again, busy = watch.lap()
    assert busy <= again + 0.02 < 0.15


@pytest.mark.slow
def test_set_up_before_the_campaign_is_in_both(tiny, tmp_path):
    """A worker that has described itself before `run_campaign` (for --assert) has spent wall time, too."""
    spec, path = PvfSpec(f"{tiny}:make"), tmp_path / "s.sqlite"
    with PvfStore(path, write=True) as store, make_executor("serial", PVF.runner, spec) as executor:
        start = time.monotonic()
        executor.establish_baseline()
        set_up = time.monotonic() - start
        run_campaign(spec, Budget(2), executor, store)
    wall, cpu = usage(path)
    assert wall > set_up
    assert cpu < 1.5 * wall


def live():
    torch.manual_seed(0)
    return unsilent.Workload(nn.Linear(4, 3), [torch.ones(2, 4)], judge="top1", name="live")


@pytest.mark.parametrize("name", ["live", "worker"])
@pytest.mark.slow
def test_asking_again_for_what_is_there_adds_no_time(name, tiny, tmp_path):
    path, asked = tmp_path / "s.sqlite", live if name == "live" else lambda: f"{tiny}:make"
    first = unsilent.pvf(asked(), trials=5, store=path)
    assert min(usage(path)) > 0
    again = unsilent.pvf(asked(), trials=5, store=path)
    assert (again.seconds, again.cpu_seconds) == (first.seconds, first.cpu_seconds) == usage(path)
    more = unsilent.pvf(asked(), trials=6, store=path)
    assert more.seconds > first.seconds


def test_an_executor_is_charged_once(tmp_path):
    """Two campaigns of one executor: the second has not what the first has cost."""
    from unsilent.studies.pvf.study import live_executor

    spec = PvfSpec("live")
    with live_executor(spec, live()) as executor:
        time.sleep(0.3)
        for name in ("a", "b"):
            with PvfStore(tmp_path / name, write=True) as store:
                run_campaign(spec, Budget(3), executor, store)
    assert usage(tmp_path / "a")[0] > 0.3 > usage(tmp_path / "b")[0]
