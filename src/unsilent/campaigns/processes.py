"""The executor with worker processes: it survives what a trial does to its process.

A worker that dies takes one trial with it, the first it had not answered: that trial's outcome is ``crash``. A trial that
passes the deadline has its worker killed: ``hang``. Either way a new worker takes over. The driver itself never imports
torch. Workers that do not reproduce the first one's golden fingerprint are refused.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from unsilent.campaigns.observer import Observer
from unsilent.campaigns.spec import CampaignSpec, Description, TrialId, TrialRow
from unsilent.errors import UnsilentError, UsageError

DEADLINE_FACTOR = 20
SHORTEST_DEADLINE = 10.0
"""Seconds. A noisy machine can stall a millisecond trial for seconds; that is not a hang."""
CHUNK_SECONDS = 0.1
LARGEST_CHUNK = 64


@dataclass(eq=False)
class _Worker:
    """One child process: what it was asked and has not answered, oldest first."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    waiting: deque[TrialId] = field(default_factory=deque)
    since: float = 0.0
    ready: bool = False
    cpu: float = 0.0


class ProcessExecutor:
    """``jobs`` workers, started lazily: the first trains and describes, the others follow when there is work."""

    def __init__(self, spec: CampaignSpec, *, jobs: int, deadline: float | None, observer: Observer) -> None:
        self._spec, self._jobs, self._observer = spec, jobs, observer
        self._deadline = deadline
        self._workers: list[_Worker] = []
        self._description: Description | None = None
        self._count = 0
        self._cpu = 0.0
        self._pace = 0.05

    # -- life of workers ---------------------------------------------------------------------------------------

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "unsilent.campaigns.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        worker = _Worker(self._count, process, Connection(ours.detach()))
        self._count += 1
        self._workers.append(worker)
        worker.connection.send(("start", self._spec))
        return worker

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._cpu += worker.cpu
        worker.process.kill()
        worker.process.wait()
        worker.connection.close()

    def describe(self) -> Description:
        """Start the first worker, let it load the workload, and return what it found."""
        if self._description is None:
            worker = self._spawn()
            while not worker.ready:
                self._receive(worker)
        assert self._description is not None
        return self._description

    def _welcome(self, worker: _Worker, description: Description) -> None:
        if self._description is None:
            self._description = description
            self._pace = max(description.golden_seconds, 1e-4)
        elif description.campaign != self._description.campaign:
            then, now = self._description.fingerprint, description.fingerprint
            changed = ", ".join(k for k in now if now[k] != then.get(k)) or "its targets"
            raise UsageError(
                f"a worker does not reproduce the golden fingerprint ({changed} differ); make the workload deterministic"
            )
        worker.ready = True

    # -- messages ----------------------------------------------------------------------------------------------

    def _receive(self, worker: _Worker) -> TrialRow | None:
        """Handle one message; raises the worker's own error, or ``UsageError`` when it dies while loading."""
        try:
            message: tuple[Any, ...] = worker.connection.recv()
        except (EOFError, ConnectionResetError, OSError):
            if worker.ready:
                raise _Lost("died" + _how(worker.process)) from None
            how = _how(worker.process)
            self._discard(worker)
            raise UsageError(
                f"the worker process died while loading {self._spec.workload!r}{how}; run the workload alone to see why"
            ) from None
        kind = message[0]
        if kind == "loading":
            self._observer.loading(*message[1:])
        elif kind == "ready":
            worker.cpu = message[2]
            self._welcome(worker, message[1])
        elif kind == "failed":
            raise message[1]
        elif kind == "row":
            worker.cpu = message[2]
            if worker.waiting and worker.waiting[0] == message[1].trial:
                worker.waiting.popleft()
            worker.since = time.monotonic()
            row: TrialRow = message[1]
            return replace(row, worker=worker.number)
        return None

    def _feed(self, worker: _Worker, source: Iterator[TrialId]) -> None:
        """Keep a little work queued at the worker, so that it never waits for the driver."""
        want = max(1, min(LARGEST_CHUNK, int(CHUNK_SECONDS / self._pace)))
        if len(worker.waiting) > want // 2:
            return
        chunk = [t for _, t in zip(range(want), source, strict=False)]
        if chunk:
            if not worker.waiting:
                worker.since = time.monotonic()
            worker.waiting.extend(chunk)
            self._send(worker, ("run", chunk))

    def _send(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        try:
            worker.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has died; receiving says so

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, trials: Iterable[TrialId]) -> Iterator[TrialRow]:
        """Run trials on all workers; rows come in the order in which they end."""
        self.describe()
        backlog: deque[TrialId] = deque()
        source = _source(backlog, iter(trials))
        while True:
            for worker in [w for w in self._workers if w.ready]:
                self._feed(worker, source)
            busy = any(w.waiting for w in self._workers)
            if not busy and not backlog:
                return
            if len(self._workers) < self._jobs and all(w.waiting or not w.ready for w in self._workers):
                self._spawn()
            yield from self._collect(backlog)

    def _collect(self, backlog: deque[TrialId]) -> Iterator[TrialRow]:
        """Wait for messages or a deadline, and deal with what came."""
        by_connection = {w.connection: w for w in self._workers}
        wait(list(by_connection), timeout=0.2)
        for worker in by_connection.values():
            try:
                while worker.connection.poll():
                    row = self._receive(worker)
                    if row is not None:
                        self._pace = 0.9 * self._pace + 0.1 * max(row.seconds, 1e-5)
                        self._observer.trial(row)
                        yield row
                if worker.waiting and time.monotonic() - worker.since > self._limit():
                    raise _Lost(f"passed the deadline of {self._limit():.0f} s", hang=True)
            except _Lost as lost:
                yield from self._replace(worker, lost, backlog)

    def _limit(self) -> float:
        assert self._description is not None
        return self._deadline or max(SHORTEST_DEADLINE, DEADLINE_FACTOR * self._description.golden_seconds)

    def _replace(self, worker: _Worker, lost: _Lost, backlog: deque[TrialId]) -> Iterator[TrialRow]:
        """Record what the lost worker was doing as that trial's outcome, give its other trials back."""
        from unsilent.outcomes.base import Outcome

        waiting, spent = list(worker.waiting), time.monotonic() - worker.since
        self._discard(worker)
        fresh = self._spawn()
        while not fresh.ready:
            self._receive(fresh)
        if not waiting:
            return
        backlog.extendleft(reversed(waiting[1:]))
        self._observer.worker_lost(waiting[0], str(lost))
        self._send(fresh, ("lost", waiting[0], Outcome.HANG if lost.hang else Outcome.CRASH, spent))
        row = None
        while row is None:
            row = self._receive(fresh)
        self._observer.trial(row)
        yield row

    # -- end ---------------------------------------------------------------------------------------------------

    def cpu_seconds(self) -> float:
        """CPU time of all workers, as far as they have told."""
        return self._cpu + sum(w.cpu for w in self._workers)

    def finish(self) -> None:
        """Let every idle worker prove its model intact and stop; raises its error when it cannot."""
        for worker in [w for w in self._workers if w.ready and not w.waiting]:
            self._send(worker, ("stop",))
            try:
                self._receive(worker)
            except _Lost:
                raise UnsilentError("a worker died while proving its model intact; results are stored") from None

    def close(self) -> None:
        """Kill all workers."""
        for worker in list(self._workers):
            self._discard(worker)

    def __enter__(self) -> ProcessExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


class _Lost(Exception):
    """A worker is gone (or must go)."""

    def __init__(self, why: str, hang: bool = False) -> None:
        super().__init__(why)
        self.hang = hang


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    return f" (signal {-code})" if code < 0 else f" (exit code {code})"


def _source(backlog: deque[TrialId], trials: Iterator[TrialId]) -> Iterator[TrialId]:
    """Trials given back by lost workers first, then the planned ones; may be asked again after it ran dry."""
    return iter(_Refillable(backlog, trials))


class _Refillable:
    """An iterator that stops when both sources are empty and goes on when one fills again."""

    def __init__(self, backlog: deque[TrialId], trials: Iterator[TrialId]) -> None:
        self._backlog, self._trials = backlog, trials

    def __iter__(self) -> _Refillable:
        return self

    def __next__(self) -> TrialId:
        return self._backlog.popleft() if self._backlog else next(self._trials)
