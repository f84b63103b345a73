"""How many workers run a campaign when nobody said."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from unsilent.campaigns import processes
from unsilent.campaigns.executors import chosen_job_count, make_executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import EngineOptions
from unsilent.campaigns.processes import ProcessExecutor
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.spec import TrialId
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.pvf.spec import PvfSpec

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "free", "options", "expected"),
    [
        (1, 64 * GIB, {}, 1),
        (2, 64 * GIB, {}, 1),
        (8, 64 * GIB, {}, 7),
        (8, None, {}, 7),
        (8, 7 * GIB, {}, 3),
        (8, GIB // 2, {}, 1),
        (8, 64 * GIB, {"threads": 3}, 2),
        (8, 64 * GIB, {"threads": 32}, 1),
        (8, 64 * GIB, {"device": "cuda"}, 1),
    ],
)
def test_the_default_leaves_one_core_free_and_fits_into_memory(monkeypatch, cores, free, options, expected):
    monkeypatch.setattr(processes, "core_count", lambda: cores)
    monkeypatch.setattr(processes, "available_memory_bytes", lambda: free)
    assert processes.default_job_count(PvfSpec("digits-cnn", **options)) == expected


def test_cores_are_those_that_the_process_may_use():
    assert processes.core_count() == len(os.sched_getaffinity(0)) <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("name", "jobs", "address", "expected"),
    [(None, None, None, 7), ("processes", None, None, 7), ("serial", None, None, 1), ("ray", None, None, 1),
     (None, None, "10.0.0.1:6379", 1), (None, 3, None, 3), ("ray", 3, None, 3)],
)  # fmt: skip
def test_what_was_asked_comes_first_and_one_worker_runs_elsewhere(monkeypatch, name, jobs, address, expected):
    monkeypatch.setattr(processes, "core_count", lambda: 8)
    monkeypatch.setattr(processes, "available_memory_bytes", lambda: None)
    assert chosen_job_count(name, PvfSpec("digits-cnn"), jobs, address) == expected


def test_a_worker_starts_only_where_twice_its_memory_is_free_for_each_that_starts(monkeypatch):
    monkeypatch.setattr(processes, "peak_memory_bytes", lambda pid: 3 * GIB)
    monkeypatch.setattr(processes, "available_memory_bytes", lambda: 12 * GIB)
    assert [processes.has_memory_for_another(1, starting) for starting in (0, 1, 2)] == [True, True, False]
    monkeypatch.setattr(processes, "peak_memory_bytes", lambda pid: None)
    assert processes.has_memory_for_another(1, 100)


def test_the_memory_of_a_process_is_known():
    assert 2**20 < (processes.peak_memory_bytes(os.getpid()) or 0) < 2**40
    assert processes.peak_memory_bytes(2**30) is None


@pytest.mark.parametrize(("slowly", "loading", "room", "expected"), [
    (False, 1000.0, False, True), (True, 1000.0, True, False), (True, 0.0, True, True), (True, 0.0, False, False),
])  # fmt: skip
def test_workers_that_nobody_asked_for_wait_until_they_are_worth_it(monkeypatch, slowly, loading, room, expected):
    executor = ProcessExecutor(WorkerJob(PVF.runner, PvfSpec("digits-cnn")), 4, Observer(), grows_slowly=slowly)
    monkeypatch.setattr(processes, "has_memory_for_another", lambda pid, starting: room)
    executor._grows_at = time.monotonic() + loading

    class Running:
        ready, process = True, type("Process", (), {"pid": 1})

    executor._workers.append(Running())  # type: ignore[arg-type]
    assert executor._may_grow() is expected


@pytest.mark.slow
def test_rows_do_not_depend_on_the_default(tiny, monkeypatch):
    monkeypatch.setattr(processes, "core_count", lambda: 3)
    spec = replace(PvfSpec(f"{tiny}:make"), per="component")
    rows, workers = {}, {}
    for jobs in (None, 1):
        with EngineOptions(jobs=jobs).open_executor(PVF.runner, spec) as executor:
            target = executor.establish_baseline().targets[0].name
            executor._grows_at = 0.0  # as if trials had run for long
            found = [row for some in executor.run(TrialId(target, 1, k) for k in range(600)) for row in some]
        rows[jobs] = {str(row.reproducible_values()) for row in found}  # as text: NaN is not equal to itself
        workers[jobs] = executor._count
    assert workers == {None: 2, 1: 1}
    assert len(rows[1]) == 600
    assert rows[None] == rows[1]


@pytest.mark.slow
def test_a_short_campaign_starts_one_worker(tiny, monkeypatch):
    monkeypatch.setattr(processes, "core_count", lambda: 9)
    with make_executor(None, PVF.runner, PvfSpec(f"{tiny}:make")) as executor:
        target = executor.establish_baseline().targets[0].name
        assert sum(len(some) for some in executor.run(TrialId(target, 1, k) for k in range(200))) == 200
        assert executor._count == 1
