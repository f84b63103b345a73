"""The executor with worker processes: it survives what a trial does to its process.

A worker that dies takes one trial with it, the first it had not answered: that trial's outcome is ``crash``. A trial that
passes the deadline has its worker killed: ``hang``. Either way a new worker takes over. The driver itself never imports
torch. Workers that do not reproduce the first one's golden fingerprint are refused.
"""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from unsilent.campaigns.children import ended, started
from unsilent.campaigns.kinds import Found, Row, Spec
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.spec import Json, Means, TrialId
from unsilent.campaigns.stopwatch import Stopwatch
from unsilent.errors import UnsilentError, UsageError
from unsilent.faults.receipts import Receipt
from unsilent.traced import Trace

DEADLINE_FACTOR = 20
SHORTEST_DEADLINE = 10.0
"""Seconds. A noisy machine can stall a millisecond trial for seconds; that is not a hang."""
ANSWER_FACTOR = 20
"""Deadlines of a trial that a worker may stay silent for when it is asked for something else."""
CHUNK_SECONDS = 0.1
LARGEST_CHUNK = 64
PAUSE = 2.0
"""Seconds between two looks at the workers after which the driver itself must have been stopped."""
SALVAGE_SECONDS = 5.0


@dataclass(eq=False)
class _Worker:
    """One child process: rows that no proof covers yet, and what it was asked and has not answered, oldest first."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    held: list[Row] = field(default_factory=list)
    waiting: deque[TrialId] = field(default_factory=deque)
    since: float = 0.0
    ready: bool = False
    proving: bool = False
    cpu: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is expected of it."""
        return bool(self.waiting) or self.proving

    def release(self) -> list[Row]:
        """The rows that were held, now proven."""
        rows, self.held = self.held, []
        return rows


class ProcessExecutor:
    """``jobs`` workers, started lazily: the first trains and describes, the others follow when there is work.

    Rows are handed out once their worker has proven that the model is intact and trials leave no trace; rows of a worker
    that is lost before that are run again. ``environment`` is that of the workers, the driver's own when None.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        jobs: int,
        deadline: float | None,
        observer: Observer,
        means: Means,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._spec, self._jobs, self._observer = spec, jobs, observer
        self._deadline, self._means = deadline, replace(means, jobs=max(jobs, means.jobs))
        self._environment = environment
        self._pack = 1
        self._answer: Any = None
        self._suspects: set[TrialId] = set()
        """Trials that a worker was running together when it was lost: each is run again alone."""
        self._workers: list[_Worker] = []
        self._description: Found | None = None
        self._count = 0
        self._cpu = self._told = 0.0
        self._watch = Stopwatch()
        self._pace = 0.05
        self._looked = time.monotonic()

    # -- life of workers ---------------------------------------------------------------------------------------

    def _spawn(self) -> _Worker:
        worker = _Worker(self._count, *started("unsilent.campaigns.worker", self._environment))
        self._count += 1
        self._workers.append(worker)
        self._send(worker, ("start", self._spec, self._means))
        return worker

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._cpu += worker.cpu
        ended(worker.process, worker.connection)

    def describe(self) -> Found:
        """Start the first worker, let it load the workload, and return what it found."""
        if self._description is None:
            self._await_ready(self._spawn())
        assert self._description is not None
        return self._description

    @property
    def pack(self) -> int:
        """How many trials a worker may run together; known once it has described itself."""
        return self._pack

    def explain(self) -> Json:
        """What the engine of a worker does."""
        found: Json = self._ask("explain")
        return found

    def trace(self, trial: TrialId, batch: int) -> Trace:
        """How the faults of a trial spread through the evaluation of one batch."""
        found: Trace = self._ask("trace", trial, batch)
        return found

    def receipt(self, trial: TrialId) -> Receipt:
        """What the faults of a trial find and write."""
        found: Receipt = self._ask("receipt", trial)
        return found

    def _ask(self, verb: str, *arguments: Any) -> Any:
        """What a worker answers; raises ``UnsilentError`` when it dies or is silent for too long."""
        self.describe()
        worker, self._answer = self._workers[0], None
        self._send(worker, (verb, *arguments))
        patience = ANSWER_FACTOR * self._limit(worker)
        while self._answer is None:
            if not worker.connection.poll(patience):
                raise UnsilentError(f"the worker said nothing for {patience:.0f} s when asked to {verb}")
            try:
                self._receive(worker)
            except _Lost as lost:
                raise UnsilentError(f"the worker {lost} when asked to {verb}") from None
        return self._answer

    def _await_ready(self, worker: _Worker) -> None:
        while not worker.ready:
            self._receive(worker)

    def _welcome(self, worker: _Worker, description: Found) -> None:
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

    def _receive(self, worker: _Worker) -> list[Row]:
        """Handle one message and return the rows it proves.

        Raises the worker's own error, ``_Lost`` when it is gone, ``UsageError`` when it goes while loading.
        """
        try:
            while not worker.connection.poll(0.2):
                # Its children may hold the socket open after it died, so the process itself is looked at as well.
                if worker.process.poll() is not None and not worker.connection.poll():
                    raise EOFError
            message: tuple[Any, ...] = worker.connection.recv()
        except (EOFError, OSError):
            if worker.ready:
                raise _Lost("died" + _how(worker.process)) from None
            how = _how(worker.process)
            self._discard(worker)
            raise UsageError(
                f"the worker process died while loading {self._spec.workload!r}{how}; run the workload alone to see why"
            ) from None
        return self._handle(worker, message)

    def _handle(self, worker: _Worker, message: tuple[Any, ...]) -> list[Row]:
        kind = message[0]
        if kind == "failed":
            raise message[1]
        if kind == "loading":
            self._observer.loading(*message[1:])
        elif kind == "ready":
            worker.cpu, self._pack = message[2], message[3]
            self._welcome(worker, message[1])
        elif kind in ("explained", "traced", "received"):
            self._answer = message[1]
        elif kind == "proven":
            worker.cpu, worker.proving = message[1], False
            return worker.release()
        elif kind == "row":
            row, worker.cpu, proven = replace(message[1], worker=worker.number), message[2], message[3]
            if worker.waiting and worker.waiting[0] == row.trial:
                worker.waiting.popleft()
            worker.since = time.monotonic()
            worker.held.append(row)
            self._suspects.discard(row.trial)
            self._pace = 0.9 * self._pace + 0.1 * max(row.seconds, 1e-5)
            self._observer.trial(row)
            return worker.release() if proven else []
        return []

    def _feed(self, worker: _Worker, source: Refillable) -> None:
        """Keep a little work queued at the worker, so that it never waits for the driver; without work, ask for proof."""
        want = max(self._pack, min(LARGEST_CHUNK, int(CHUNK_SECONDS / self._pace)))
        if len(worker.waiting) > want // 2 or (worker.waiting and worker.waiting[0] in self._suspects):
            return
        chunk = self._chunk(worker, want, source)
        if not worker.waiting:
            worker.since = time.monotonic()
        if chunk:
            worker.waiting.extend(chunk)
            self._send(worker, ("run", chunk))
        elif not worker.waiting and worker.held and not worker.proving:
            worker.proving = True
            self._send(worker, ("prove",))

    def _chunk(self, worker: _Worker, want: int, source: Refillable) -> list[TrialId]:
        """The next trials for a worker; a suspect goes alone to a worker that has nothing else to do."""
        chunk: list[TrialId] = []
        for trial in islice(source, want):
            if trial in self._suspects:
                if not chunk and not worker.waiting:
                    return [trial]
                source.put_back(trial)
                break
            chunk.append(trial)
        return chunk

    def _send(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        try:
            worker.connection.send(message)
        except OSError:
            pass  # it has died; receiving says so

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[Row]]:
        """Run trials on all workers; rows come together as they are proven."""
        self.describe()
        backlog: deque[TrialId] = deque()
        source = Refillable(backlog, iter(trials))
        while True:
            for worker in [w for w in self._workers if w.ready]:
                self._feed(worker, source)
            if not backlog and not any(w.busy for w in self._workers):
                return
            working = [w for w in self._workers if w.waiting or not w.ready]
            if len(self._workers) < self._jobs and len(working) == len(self._workers):
                self._spawn()
            yield from self._collect(backlog)
            yield []  # who asked may stop here, also during a long trial

    def _collect(self, backlog: deque[TrialId]) -> Iterator[list[Row]]:
        """Wait for messages or a deadline, and deal with what came."""
        wait([w.connection for w in self._workers], timeout=0.2)
        self._forgive_pauses()
        for worker in list(self._workers):
            try:
                while worker.connection.poll() or (worker.ready and worker.process.poll() is not None):
                    yield self._receive(worker)
                if worker.busy and time.monotonic() - worker.since > self._limit(worker):
                    raise _Lost(f"passed the deadline of {self._limit(worker):.0f} s", hang=True)
            except _Lost as lost:
                yield from self._replace(worker, lost, backlog)

    def _forgive_pauses(self) -> None:
        """A machine that was suspended, or a stopped process group, is no hang of the trial."""
        now = time.monotonic()
        gap = now - self._looked
        if gap > PAUSE:
            for worker in self._workers:
                worker.since += gap
        self._looked = now

    def _limit(self, worker: _Worker) -> float:
        """Seconds that a worker may stay silent: one deadline, and time for what it runs together before the first row."""
        assert self._description is not None
        golden = self._description.golden_seconds
        together = min(self._pack, len(worker.waiting)) if self._pack > 1 else 0
        return (self._deadline or max(SHORTEST_DEADLINE, DEADLINE_FACTOR * golden)) + 2 * together * golden

    def _replace(self, worker: _Worker, lost: _Lost, backlog: deque[TrialId]) -> Iterator[list[Row]]:
        """Record what the lost worker was doing as that trial's outcome; all else it was given is run again."""
        from unsilent.outcomes.base import Outcome

        waiting, unproven = list(worker.waiting), [row.trial for row in worker.held]
        spent = time.monotonic() - worker.since
        self._discard(worker)
        fresh = self._spawn()
        self._await_ready(fresh)
        if self._pack > 1 and len(waiting) > 1:
            self._suspects.update(waiting)
            backlog.extendleft(reversed([*waiting, *unproven]))
            return
        backlog.extendleft(reversed([*unproven, *waiting[1:]]))
        if not waiting:
            return
        self._suspects.discard(waiting[0])
        self._observer.worker_lost(waiting[0], str(lost))
        self._send(fresh, ("lost", waiting[0], Outcome.HANG if lost.hang else Outcome.CRASH, spent))
        self._send(fresh, ("prove",))
        fresh.proving = True
        try:
            while fresh.proving:
                yield self._receive(fresh)
        except _Lost as again:
            raise UnsilentError(f"a fresh worker {again} at once; what was stored is safe, see what kills it") from None

    # -- end ---------------------------------------------------------------------------------------------------

    def spent(self) -> tuple[float, float]:
        """Wall and CPU seconds since it was made or this was last asked; of the workers what they have told."""
        wall, cpu = self._watch.lap()
        told, self._told = self._told, self._cpu + sum(w.cpu for w in self._workers)
        return wall, cpu + self._told - told

    def salvage(self) -> list[Row]:
        """After an interrupt: the rows that a proof, asked for now and waited for a little, still covers."""
        rows: list[Row] = []
        for worker in [w for w in self._workers if w.ready and w.held]:
            self._send(worker, ("prove",))
            worker.proving = True
            end = time.monotonic() + SALVAGE_SECONDS
            try:
                while worker.proving and time.monotonic() < end:
                    if worker.connection.poll(0.1):
                        rows += self._receive(worker)
            except (_Lost, UnsilentError):
                continue
        return rows

    def close(self) -> None:
        """Kill all workers."""
        for worker in list(self._workers):
            self._discard(worker)

    def __enter__(self) -> ProcessExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


class Refillable:
    """An iterator that stops when both sources are empty and goes on when one fills again."""

    def __init__(self, backlog: deque[TrialId], trials: Iterator[TrialId]) -> None:
        self._backlog, self._trials = backlog, trials

    def any_left(self) -> bool:
        """Whether there is a next one now."""
        for trial in self:
            self.put_back(trial)
            return True
        return False

    def put_back(self, trial: TrialId) -> None:
        """Have it come next again."""
        self._backlog.appendleft(trial)

    def __iter__(self) -> Refillable:
        return self

    def __next__(self) -> TrialId:
        return self._backlog.popleft() if self._backlog else next(self._trials)
