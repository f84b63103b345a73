"""What every executor must do, whatever it runs trials on. A new executor joins with one row in ``EXECUTORS``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from conftest import TINY
from unsilent.campaigns import TrialId, WorkerSettings
from unsilent.campaigns.executors import EXECUTORS as NAMES
from unsilent.campaigns.executors import Executor, make_executor
from unsilent.outcomes import Outcome
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.pvf.spec import PvfSpec, PvfTrialRow

pytestmark = pytest.mark.slow

EXECUTORS = {"serial": 1, "processes": 2, "ray": 2}
"""Name and jobs."""
FRAGILE = (
    TINY
    + """

def fragile():
    def run(model, batch):
        if corrupted(model):
            os.kill(os.getpid(), 9)
        while bool((model.first.bias.detach() != Tiny().first.bias).any()):
            pass
        return model(batch)

    return unsilent.Workload(Tiny().eval(), batches(), run=run, name="fragile")
"""
)
SPEC = PvfSpec("fragile.py:fragile", at=("first.*", "last.*"), per="tensor")
DEADLY = {TrialId("last.bias", 1, 0): Outcome.CRASH, TrialId("first.bias", 1, 0): Outcome.HANG}
"""The process of a trial that corrupts ``last.bias`` dies, one that corrupts ``first.bias`` never ends."""
MANY = [TrialId(target, 1, k) for k in range(60) for target in ("first.weight", "last.weight")]
AROUND = [TrialId("first.weight", 1, 100), *DEADLY, TrialId("last.weight", 1, 100)]
DEADLINE = 3.0


class Ran(NamedTuple):
    """What one executor gave."""

    executor: Executor
    many: list[PvfTrialRow]
    deadly: list[PvfTrialRow]
    spent: list[tuple[float, float]]


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(p) for p in found.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("executors")
    (path / "fragile.py").write_text(FRAGILE)
    before = os.getcwd()
    os.chdir(path)
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def reference(folder: None) -> dict[TrialId, tuple[object, ...]]:
    """The rows of one process that takes no shortcut."""
    with make_executor("serial", PVF.runner, SPEC, worker_settings=WorkerSettings("plain")) as executor:
        return {row.trial: row.reproducible_values() for batch in executor.run(MANY) for row in batch}


@pytest.fixture(scope="module", params=EXECUTORS)
def ran(request: pytest.FixtureRequest, folder: None) -> Iterator[Ran]:
    if request.param == "ray" and find_spec("ray") is None:
        pytest.skip("ray is not installed")
    before = children(os.getpid())  # ranks of distributed trainings that other tests of this process keep ready
    with make_executor(request.param, PVF.runner, SPEC, jobs=EXECUTORS[request.param], deadline=DEADLINE) as executor:
        executor.establish_baseline()
        rows, spent = [], [executor.seconds_since_last_call()]
        for trials in (MANY, AROUND):
            rows.append([row for batch in executor.run(iter(trials)) for row in batch])
            spent.append(executor.seconds_since_last_call())
        yield Ran(executor, rows[0], rows[1], spent)
    left = set(children(os.getpid())) - set(before)
    assert not [p for p in left if "unsilent" in command_of(p)], "processes were left behind"


def command_of(pid: int) -> str:
    return subprocess.run(["ps", "-p", str(pid), "-o", "args="], capture_output=True, text=True).stdout


def test_the_table_has_all() -> None:
    assert set(EXECUTORS) == set(NAMES)


def test_rows_are_the_reference_and_each_comes_once(ran: Ran, reference: dict[TrialId, tuple[object, ...]]) -> None:
    assert sorted(row.trial for row in ran.many) == sorted(MANY)
    assert {row.trial: row.reproducible_values() for row in ran.many} == reference


def test_a_crash_and_a_hang_are_outcomes_of_their_trials_alone(ran: Ran) -> None:
    assert sorted(row.trial for row in ran.deadly) == sorted(AROUND)
    for row in ran.deadly:
        ended = set(row.outcome_codes) & {Outcome.CRASH, Outcome.HANG}
        assert ended == ({DEADLY[row.trial]} if row.trial in DEADLY else set()), row.trial


def test_wall_and_cpu_time_are_told_since_last_asked(ran: Ran) -> None:
    assert all(wall > 0 and cpu > 0 for wall, cpu in ran.spent)
    _, cpu = ran.executor.seconds_since_last_call()
    assert 0 <= cpu < sum(cpu for _, cpu in ran.spent)


def test_nothing_to_do_is_soon_done(ran: Ran) -> None:
    assert not [row for batch in ran.executor.run(iter(())) for row in batch]
