"""``python -m benchmarks.campaign_rates``: what limits a very large campaign beside its trials.

``store``: rows a second that a store takes, bytes of a trial on disk, and what resuming reads. ``driver``: rows a second that
the driver of a Ray cluster takes and stores when trials cost nothing; a process that answers every order at once with rows
of a real campaign stands for the cluster. ``memory``: of the plan and of the trials that are done.
"""

from __future__ import annotations

import os
import pickle
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

from unsilent.campaigns import TrialId, ray_executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.process_connection import Message, ProcessConnection
from unsilent.campaigns.runner import WorkerJob
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.runner import TrialRunner
from unsilent.studies.pvf.spec import PvfSpec, PvfTrialRow

Item = TypeVar("Item")
SPEC = PvfSpec("digits-cnn", options=(("eval", "64"),))
STORED, DRIVEN, PLANNED = 200_000, 100_000, 1_000_000
TOGETHER = 100
"""Rows in one message, as of a supervisor whose trials cost a millisecond."""


def main() -> None:
    """Print the figures."""
    runner = TrialRunner(SPEC)
    targets = list(runner.targets)
    real = [runner.run(TrialId(target, 1, k)) for target in targets for k in range(50)]
    print(f"digits-cnn, 64 samples, {os.cpu_count()} CPUs")
    _memory(targets)
    with tempfile.TemporaryDirectory() as folder:
        _store(Path(folder) / "store", runner, real)
        _driver(Path(folder) / "driver", runner, real)


def _many(real: Sequence[PvfTrialRow], count: int) -> Iterator[PvfTrialRow]:
    """Rows like the real ones, each of a trial of its own."""
    for k, row in enumerate(islice(cycle(real), count)):
        yield replace(row, trial=row.trial._replace(k=k))


def _pieces(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _store(path: Path, runner: TrialRunner, real: Sequence[PvfTrialRow]) -> None:
    rows = list(_many(real, STORED))
    with PvfStore(path, write=True) as store:
        store.bind_campaign(SPEC, runner.establish_baseline())
        cpu, wall = time.process_time(), time.perf_counter()
        for some in _pieces(rows, 500):
            store.add_rows(some)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"store: {STORED / wall:,.0f} rows/s ({1e6 * cpu / STORED:.0f} us of CPU each)")
    print(f"store: {path.stat().st_size / STORED:.0f} bytes each on disk")
    with PvfStore(path) as store:
        wall = time.perf_counter()
        store.stored_trial_ids()
        print(f"store: what is done is read at {STORED / (time.perf_counter() - wall):,.0f} trials/s")


class _Answering:
    """Stands for `ray_launch.Link`: orders go to a process that answers them at once."""

    def __init__(self, *_: object) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "benchmarks.campaign_rates", str(theirs.fileno())]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        self._line = ProcessConnection(ours.detach())

    def send(self, *message: object) -> None:
        self._line.send(*message)

    def receive(self, timeout: float) -> Message | None:
        return self._line.receive(timeout)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


def answer(line: ProcessConnection) -> None:
    """Be a cluster whose trials cost nothing."""
    runner = TrialRunner(SPEC)
    real = {target: [runner.run(TrialId(target, 1, k)) for k in range(50)] for target in runner.targets}
    description = runner.establish_baseline()
    while True:
        message = line.receive(1.0)
        if message is None:
            continue
        if message[0] == "hire":
            line.send("news", message[1], pickle.dumps([("ready", description, 1, "here")]), 0.0, 0.0)
        elif message[0] == "give":
            for some in _pieces(pickle.loads(message[2]), TOGETHER):
                rows = [replace(real[trial.target][trial.k % 50], trial=trial) for trial in some]
                events = [*(("row", row) for row in rows), ("proven", list(some))]
                line.send("news", message[1], pickle.dumps(events), 0.0, 0.0)


def _driver(path: Path, runner: TrialRunner, real: Sequence[PvfTrialRow]) -> None:
    ray_executor.BridgeProcess = _Answering  # type: ignore[assignment, misc]
    trials = [row.trial for row in _many(real, DRIVEN)]
    executor = ray_executor.RayExecutor(WorkerJob(PVF.runner, SPEC), 16, Observer())
    with PvfStore(path, write=True) as store, executor:
        store.bind_campaign(SPEC, executor.establish_baseline())
        cpu, wall = time.process_time(), time.perf_counter()
        for rows in executor.run(trials):
            if rows:
                store.add_rows(rows)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        assert len(store.stored_trial_ids()) == DRIVEN
    print(f"driver and store: {DRIVEN / wall:,.0f} rows/s ({1e6 * cpu / DRIVEN:.0f} us of CPU each in the driver)")


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _memory(targets: Sequence[str]) -> None:
    before = _resident()
    plan = [TrialId(targets[k % len(targets)], 1, k) for k in range(PLANNED)]
    done = {TrialId(*trial) for trial in plan}
    print(f"driver: {(_resident() - before) / len(done):.0f} bytes of memory for each trial that is planned and done")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        try:
            answer(ProcessConnection(int(sys.argv[1])))
        except EOFError:
            pass
    else:
        main()
