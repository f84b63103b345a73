"""Worker processes for replicas: each has the environment its switches need, and runs all replicas that need the same.

The driver's side; it never imports torch. A worker that dies ends the command with an error that names the run: a clean run that
kills its process is no outcome, and what was stored is safe.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from unsilent.campaigns.children import ended, started
from unsilent.campaigns.stopwatch import Stopwatch
from unsilent.closing import Closing
from unsilent.errors import UnsilentError, UsageError
from unsilent.replicas.looks import Look, Looked
from unsilent.replicas.spec import Replica, ReplicaRow, ReplicaSpec, Trained
from unsilent.replicas.switches import Switches

Environment = tuple[tuple[str, str], ...]
SECOND_TWIN = Replica(Switches(), 1)
"""It gets a fresh process. The first twin runs in the one that described the training, so it has trained some steps before: what
depends on the process (the order of sets, say), or is left behind for the next run there, must not hide."""


@dataclass(eq=False)
class _Worker:
    number: int
    environment: Environment
    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    running: Replica | Look | None = None
    since: float = 0.0
    runs: int = 0
    cpu: float = 0.0


class ReplicaPool(Closing):
    """Up to ``jobs`` workers, started when there is work for them; ends all of them on exit.

    ``deadline``: seconds after which a run that is not over ends all; None: none.
    """

    def __init__(self, spec: ReplicaSpec, jobs: int, deadline: float | None = None) -> None:
        self._spec, self._jobs, self._deadline = spec, jobs, deadline
        self._workers: list[_Worker] = []
        self._count = 0
        self._gone_cpu = 0.0
        self._watch = Stopwatch()
        self._processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def describe(self) -> Trained:
        """What the training is, as a worker without any switch finds it."""
        worker = self._start(())
        self._receive(worker)
        worker.ready, worker.runs = False, 1
        self._send(worker, ("describe",))
        found: Trained = self._receive(worker)[1]
        return found

    def run(self, replicas: Iterable[Replica]) -> Iterator[ReplicaRow]:
        """Run them all; rows come as they end."""
        for worker, _, row in self._results(replicas):
            yield replace(row, worker=worker)

    def look(self, looks: Iterable[Look]) -> Iterator[tuple[Look, Looked]]:
        """Look at all of them; what was seen comes as they end."""
        for _, look, seen in self._results(looks):
            yield look, seen

    def _results(self, jobs: Iterable[Any]) -> Iterator[tuple[int, Any, Any]]:
        """Number of the worker, job and result."""
        waiting = sorted(jobs, key=lambda job: (job.switches.environment, job.number))
        while waiting or any(w.running for w in self._workers):
            self._hand_out(waiting)
            busy = {w.connection: w for w in self._workers if w.running or not w.ready}
            for connection in wait(list(busy), timeout=0.5):
                worker = busy[connection]  # type: ignore[index]
                message = self._receive(worker)
                if message[0] == "done":
                    job, worker.running, worker.runs = worker.running, None, worker.runs + 1
                    yield worker.number, job, message[1]
            self._check_deadline()

    def _hand_out(self, waiting: list[Any]) -> None:
        """Give every idle worker a run of its environment, end those that have none left, start new ones."""
        for worker in [w for w in self._workers if w.ready and not w.running]:
            own = [job for job in waiting if job.switches.environment == worker.environment]
            mine = next((job for job in own if self._fits(job)), None)
            if mine is None:
                if waiting and not own:
                    self._end(worker)
                continue
            if mine == SECOND_TWIN and worker.runs:
                self._end(worker)
                continue
            waiting.remove(mine)
            worker.running, worker.since = mine, time.monotonic()
            self._send(worker, ("look" if isinstance(mine, Look) else "run", mine))
        starting = [w.environment for w in self._workers if not w.ready]
        open_ = [r.switches.environment for r in waiting]
        for environment in starting:
            if environment in open_:
                open_.remove(environment)
        while open_ and len(self._workers) < self._jobs:
            self._start(open_.pop(0))

    def _check_deadline(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            busy = worker.running or not worker.ready
            if busy and self._deadline is not None and now - worker.since > self._deadline:
                what = f"replica {worker.running}" if worker.running else "loading, and the first evaluation,"
                raise UsageError(
                    f"{self._spec.workload}: {what} was not over after {self._deadline:g} s; what was stored is safe: wait "
                    "longer (--deadline SECONDS), or make fewer steps (--steps N)"
                )

    def _fits(self, job: Replica | Look) -> bool:
        """Whether there are processors for its threads: threads of two runs that take turns wait a hundred times longer."""
        taken = sum(w.running.switches.threads for w in self._workers if w.running)
        return taken == 0 or taken + job.switches.threads <= self._processors

    def _start(self, environment: Environment) -> _Worker:
        # What cuBLAS needs to be deterministic; without CUDA nobody reads it.
        variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, **dict(environment)}
        worker = _Worker(self._count, environment, *started("unsilent.replicas.worker", variables))
        worker.since = time.monotonic()
        self._count += 1
        self._workers.append(worker)
        self._send(worker, ("start", self._spec))
        return worker

    def _send(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        try:
            worker.connection.send(message)
        except OSError:
            pass  # it has died; receiving says so

    def _receive(self, worker: _Worker) -> tuple[Any, ...]:
        """The next message of a worker; raises its own error, ``UnsilentError`` where it is gone."""
        try:
            while not worker.connection.poll(0.5):
                self._check_deadline()
                # Its children may hold the socket open after it died.
                if worker.process.poll() is not None and not worker.connection.poll():
                    raise EOFError
            message: tuple[Any, ...] = worker.connection.recv()
        except (EOFError, OSError):
            code = worker.process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            what = f"while it ran replica {worker.running}" if worker.running else "while it loaded the training"
            raise UnsilentError(
                f"{self._spec.workload}: a worker died ({how}) {what}; what was stored is safe: see what ends it, then run "
                "the same command again"
            ) from None
        if message[0] == "failed":
            raise message[1]
        worker.ready, worker.cpu = True, float(message[-1])
        return message

    def _end(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._gone_cpu += worker.cpu
        ended(worker.process, worker.connection)

    def spent(self) -> tuple[float, float]:
        """Wall and CPU seconds since it was made, its workers' included as far as they have told."""
        wall, cpu = self._watch.lap()
        return wall, cpu + self._gone_cpu + sum(w.cpu for w in self._workers)

    def close(self) -> None:
        """End all workers."""
        for worker in list(self._workers):
            self._end(worker)
