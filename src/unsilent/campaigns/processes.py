"""The executor that runs trials in worker processes, so that a trial that crashes ends only its worker.

A trial whose worker dies runs again, alone in another worker. Only if that one dies as well is the outcome ``crash``. The
outcome is ``crash`` at once if the worker reports after the trial that it can run no other (a device stopped by an assertion),
and ``hang`` if the trial exceeds the deadline. Each time a new worker takes over. The driver itself never imports torch.
Workers that do not reproduce the first one's golden fingerprint are refused.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

from unsilent.basics.child_processes import end_child, receive, start_child
from unsilent.basics.closing import Closing
from unsilent.basics.errors import ProcessUnusable, UnsilentError, UsageError
from unsilent.basics.free_memory import available_memory_bytes, peak_memory_bytes
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.spec import Baseline, CampaignRow, DeferredTrial, Spec, TrialId
from unsilent.campaigns.stopwatch import Stopwatch

WORKER_BYTES = 2 << 30
"""Free memory required for each worker. This is an estimate, as nothing is loaded yet."""
ROOM = 2
"""Another worker is started only if this many times the peak memory of a running worker is free."""


def default_job_count(spec: Spec) -> int:
    """The default number of workers: as many as fit on all cores but one, or 1 on an accelerator.

    It is at most the free memory divided by `WORKER_BYTES`.
    """
    if getattr(spec, "device", "cpu") != "cpu":
        return 1
    free = available_memory_bytes()
    cores = (core_count() - 1) // max(1, spec.threads)
    return max(1, cores if free is None else min(cores, free // WORKER_BYTES))


def core_count() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_memory_for_another(pid: int, starting: int) -> bool:
    """Whether memory suffices for another worker like process ``pid``.

    ``starting`` is the number of workers that are starting and have not loaded anything yet.
    """
    free, used = available_memory_bytes(), peak_memory_bytes(pid)
    return free is None or used is None or free >= ROOM * used * (1 + starting)


DEADLINE_FACTOR = 20
SHORTEST_DEADLINE = 10.0
"""Seconds. A noisy machine can stall a millisecond trial for seconds; that is not a hang."""
ANSWER_FACTOR = 20
"""Multiple of a trial's deadline within which a worker must answer other requests."""
CHUNK_SECONDS = 0.1
LARGEST_CHUNK = 64
PAUSE = 2.0
"""If more seconds pass between two checks of the workers, the driver itself must have been stopped."""
SALVAGE_SECONDS = 5.0


@dataclass(eq=False)
class _Worker:
    """One worker process, with its unanswered trials (oldest first) and its rows that are not verified yet."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    unverified_rows: list[CampaignRow] = field(default_factory=list)
    unanswered_trials: deque[TrialId] = field(default_factory=deque)
    since: float = 0.0
    ready: bool = False
    proving: bool = False
    cpu: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether the worker has unanswered trials or an unanswered request to verify rows."""
        return bool(self.unanswered_trials) or self.proving

    @property
    def unproven(self) -> list[TrialId]:
        """The trials of the rows that are not verified yet."""
        return [row.trial for row in self.unverified_rows]


class ProcessExecutor(Closing):
    """An executor with ``jobs`` worker processes.

    The first one loads the workload and finds the baseline; the others start when there is work for them.

    Rows are returned once their worker has proven that the model is intact and trials leave no trace. Trials of a worker that
    is lost before that are run again. ``environment`` is that of the workers; ``None`` is the driver's own. With
    ``grows_slowly``, other workers start only after trials have run for as long as the first worker took to load, and only if
    memory is left, so that a short campaign does not start workers that it does not need.
    """

    def __init__(
        self,
        job: WorkerJob,
        jobs: int,
        observer: Observer,
        environment: Mapping[str, str] | None = None,
        grows_slowly: bool = False,
    ) -> None:
        self._grows_slowly, self._grows_at, self._all_ready_at = grows_slowly, 0.0, 0.0
        self._make_runner, self._spec, self._jobs, self._observer = job.make_runner, job.spec, jobs, observer
        self._deadline, settings = job.deadline, job.worker_settings
        self._means = replace(settings, jobs=max(jobs, settings.jobs))
        self._environment = environment
        self._pack = 1
        self._answer: tuple[Any, ...] = ()
        self._suspects: set[TrialId] = set()
        """Trials that may have ended a worker or that ran out of memory. Each is run again alone."""
        self._backlog: deque[TrialId] = deque()
        self._workers: list[_Worker] = []
        self._description: Baseline | None = None
        self._count = 0
        self._cpu = self._reported = 0.0
        self._watch = Stopwatch()
        self._pace = 0.05
        self._looked = time.monotonic()

    # -- life of workers ---------------------------------------------------------------------------------------

    def _spawn(self) -> _Worker:
        worker = _Worker(self._count, *start_child("unsilent.campaigns.worker", self._environment))
        self._count += 1
        self._workers.append(worker)
        self._send(worker, ("start", self._make_runner, self._spec, self._means))
        return worker

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._cpu += worker.cpu
        end_child(worker.process, worker.connection)

    def establish_baseline(self) -> Baseline:
        """Start the first worker, which loads the workload, and return the baseline of the campaign."""
        if self._description is None:
            begun = time.monotonic()
            self._await_ready(self._spawn())
            self._grows_at = 2 * time.monotonic() - begun  # then trials have run for as long as it took to load
            self._all_ready_at = self._grows_at + (time.monotonic() - begun if self._grows_slowly else 0.0)
        assert self._description is not None
        return self._description

    @property
    def max_trials_together(self) -> int:
        """The largest number of trials that a worker runs together.

        The number is available once a worker has reported its baseline.
        """
        return self._pack

    def ask_runner(self, what: str, *arguments: Any) -> Any:
        """The answer of a worker's runner.

        Raises ``UnsilentError`` when the worker dies or does not answer in time.
        """
        self.establish_baseline()
        worker, self._answer = self._workers[0], ()
        self._send(worker, ("ask", what, *arguments))
        patience = ANSWER_FACTOR * self._limit(worker)
        while not self._answer:
            if not worker.connection.poll(patience):
                raise UnsilentError(
                    f"the worker did not make the {what} within {patience:.0f} s; run the same command again"
                )
            try:
                self._receive(worker)
            except _Lost as lost:
                raise UnsilentError(
                    f"the worker {lost} while it made the {what}; run the workload alone to see why"
                ) from None
        return self._answer[0]

    def _await_ready(self, worker: _Worker) -> _Worker:
        """Wait until a worker has loaded the workload, and return it or its replacement."""
        while not worker.ready:
            try:
                self._receive(worker)
            except _Lost as lost:
                self._discard(worker)
                if not self._give_up_shortcuts(lost):
                    raise UnsilentError(f"a worker that loaded {self._spec.workload!r} {lost}") from None
                worker = self._spawn()
        return worker

    def _give_up_shortcuts(self, lost: _Lost) -> bool:
        """Disable shortcuts for all later workers if preparing them ended this one; whether it did."""
        if lost.shortcuts and self._means.engine != "plain":
            self._observer.say(
                f"preparing shortcuts failed, because a worker {lost}; the campaign continues without shortcuts (--engine plain)"
            )
            self._means = replace(self._means, engine="plain")
        return lost.shortcuts

    def _welcome(self, worker: _Worker, description: Baseline) -> None:
        if self._description is None:
            self._description = description
            self._pace = max(description.golden_seconds, 1e-4)
        elif description.campaign != self._description.campaign:
            then, now = self._description.fingerprint, description.fingerprint
            changed = ", ".join(k for k in now if now[k] != then.get(k)) or "its targets"
            raise UsageError(
                f"a worker does not reproduce the golden run of the first worker ({changed} differ); "
                "make the workload deterministic"
            )
        worker.ready = True

    # -- messages ----------------------------------------------------------------------------------------------

    def _receive(self, worker: _Worker) -> list[CampaignRow]:
        """Handle one message of a worker and return the rows that it verifies.

        Raises the worker's own error, ``_Lost`` if the worker is lost, or ``UsageError`` if it is lost while loading.
        """
        try:
            message: tuple[Any, ...] = receive(worker.process, worker.connection)
        except (EOFError, OSError):
            if worker.ready:
                raise _Lost("died" + _how(worker.process)) from None
            how = _how(worker.process)
            self._discard(worker)
            raise UsageError(
                f"the worker process died while loading {self._spec.workload!r}{how}; run the workload alone to see why"
            ) from None
        return self._handle(worker, message)

    def _handle(self, worker: _Worker, message: tuple[Any, ...]) -> list[CampaignRow]:
        kind = message[0]
        if kind == "failed":
            raise message[1]
        if kind == "unusable":
            raise _Lost(f"cannot run trials any more ({message[1]})", unusable=message[1])
        if kind == "loading":
            self._observer.loading(*message[1:])
        elif kind == "said":
            self._observer.say(message[1])
        elif kind == "ready":
            worker.cpu, self._pack = message[2], message[3]
            self._welcome(worker, message[1])
        elif kind == "answered":
            self._answer = message[1:]
        elif kind == "proven":
            worker.cpu, worker.proving = message[1], False
            return self._release(worker)
        elif kind == "rows":
            worker.cpu, worker.since = message[2], time.monotonic()
            for row in message[1]:
                self._take(worker, row)
            return self._release(worker) if message[3] else []
        return []

    def _take(self, worker: _Worker, row: CampaignRow | DeferredTrial) -> None:
        """Store a row as not verified yet, or queue a deferred trial to run again alone."""
        if worker.unanswered_trials and worker.unanswered_trials[0] == row.trial:
            worker.unanswered_trials.popleft()
        if isinstance(row, DeferredTrial):
            if row.reason:
                self._observer.say(f"trial {row.trial}: {row.reason}; the trial runs again, alone")
            self._suspects.add(row.trial)
            self._backlog.appendleft(row.trial)
            return
        worker.unverified_rows.append(row.with_worker(worker.number))
        self._pace = 0.9 * self._pace + 0.1 * max(row.seconds, 1e-5)
        self._observer.trial(worker.unverified_rows[-1])

    def _release(self, worker: _Worker) -> list[CampaignRow]:
        """The rows of a worker, which are verified now."""
        rows, worker.unverified_rows = worker.unverified_rows, []
        self._suspects.difference_update(row.trial for row in rows)
        return rows

    def _feed(self, worker: _Worker, source: RefillableIterator) -> None:
        """Keep the worker's queue filled.

        Without further trials, request the verification of its rows.
        """
        want = max(self._pack, min(LARGEST_CHUNK, int(CHUNK_SECONDS / self._pace)))
        if len(worker.unanswered_trials) > want // 2:
            return
        chunk = [] if self._one_runs_alone() else self._chunk(worker, want, source)
        if not worker.unanswered_trials:
            worker.since = time.monotonic()
        if chunk:
            worker.unanswered_trials.extend(chunk)
            self._send(worker, ("run", chunk, chunk[0] in self._suspects))
        elif not worker.unanswered_trials and worker.unverified_rows and not worker.proving:
            worker.proving = True
            self._send(worker, ("prove",))

    def _chunk(self, worker: _Worker, want: int, source: RefillableIterator) -> list[TrialId]:
        """The next trials for a worker.

        A trial suspected of ending a worker runs alone, while no other worker runs anything.
        """
        chunk: list[TrialId] = []
        for trial in islice(source, want):
            if trial in self._suspects:
                if not chunk and not worker.unverified_rows and not any(w.busy for w in self._workers):
                    return [trial]
                source.put_back(trial)
                break
            chunk.append(trial)
        return chunk

    def _one_runs_alone(self) -> bool:
        """Whether a trial suspected of ending a worker is running or not verified yet, so that no other may start."""
        return bool(self._suspects) and any(
            trial in self._suspects for w in self._workers for trial in (*w.unanswered_trials, *w.unproven)
        )

    def _send(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        try:
            worker.connection.send(message)
        except OSError:
            pass  # it has died; receiving reports it

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[CampaignRow]]:
        """Run trials on all workers and yield lists of rows that are verified."""
        self.establish_baseline()
        source = RefillableIterator(self._backlog, iter(trials))
        while True:
            for worker in [w for w in self._workers if w.ready]:
                self._feed(worker, source)
            if not self._backlog and not any(w.busy for w in self._workers):
                return
            working = [w for w in self._workers if w.unanswered_trials or not w.ready]
            if len(self._workers) < self._jobs and len(working) == len(self._workers) and self._may_grow():
                self._spawn()
            yield from self._collect()
            yield []  # the caller may stop here, even during a long trial

    def _may_grow(self) -> bool:
        """Whether another worker may start.

        With a default number of workers, each must be worth its start-up time and fit into memory.
        """
        if not self._grows_slowly:
            return True
        starting = sum(not worker.ready for worker in self._workers)
        return time.monotonic() >= self._grows_at and has_memory_for_another(self._workers[0].process.pid, starting)

    def _collect(self) -> Iterator[list[CampaignRow]]:
        """Wait for messages or a deadline, handle them, and yield lists of rows that are verified."""
        wait([w.connection for w in self._workers], timeout=0.2)
        self._forgive_pauses()
        for worker in list(self._workers):
            try:
                while worker.connection.poll() or (worker.ready and worker.process.poll() is not None):
                    yield self._receive(worker)
                if worker.busy and time.monotonic() - worker.since > self._limit(worker):
                    raise _Lost(f"passed the deadline of {self._limit(worker):.0f} s", hang=True)
            except _Lost as lost:
                yield from self._replace(worker, lost)

    def _forgive_pauses(self) -> None:
        """Extend all deadlines by the time during which this machine or process was suspended."""
        now = time.monotonic()
        gap = now - self._looked
        if gap > PAUSE:
            for worker in self._workers:
                worker.since = min(now, worker.since + gap)
        self._looked = now

    def _limit(self, worker: _Worker) -> float:
        """The number of seconds that a worker may stay silent, given the trials that it runs together."""
        assert self._description is not None
        golden = self._description.golden_seconds
        limit = self._deadline or max(SHORTEST_DEADLINE, DEADLINE_FACTOR * golden)
        return limit if self._pack == 1 else limit + 2 * min(self._pack, len(worker.unanswered_trials)) * golden

    def _replace(self, worker: _Worker, lost: _Lost) -> Iterator[list[CampaignRow]]:
        """Replace a lost worker.

        The trial that ended it gets its row if it is certain which trial that was.
        """
        suspects, unsettled = self._suspected_trials(worker, lost), [*worker.unproven, *worker.unanswered_trials]
        settled = len(suspects) == 1 and (lost.certain or suspects[0] in self._suspects)
        spent = time.monotonic() - worker.since
        self._discard(worker)
        self._give_up_shortcuts(lost)
        self._suspects.update(suspects)
        others = [trial for trial in unsettled if trial not in self._suspects]
        self._backlog.extendleft(reversed([*([] if settled else suspects), *others]))
        if suspects:
            self._observer.worker_lost(suspects[0], f"{lost}; {_what_next(suspects, settled, lost)}")
        fresh = self._await_ready(self._spawn())
        if settled:
            yield from self._record(fresh, suspects[0], lost, spent)

    def _suspected_trials(self, worker: _Worker, lost: _Lost) -> list[TrialId]:
        """The trials that may have ended a worker: those it was running, else those not verified yet."""
        if lost.shortcuts:
            return []
        running = list(worker.unanswered_trials) if self._pack > 1 else list(worker.unanswered_trials)[:1]
        if lost.unusable and not lost.certain:
            return [*worker.unproven, *running]
        return running or worker.unproven

    def _record(self, fresh: _Worker, trial: TrialId, lost: _Lost, spent: float) -> Iterator[list[CampaignRow]]:
        """Let a new worker create the row of a trial that ended its worker."""
        reason = str(lost.unusable) if lost.unusable else f"worker: {lost.ended}"
        self._send(fresh, ("lost", trial, _outcome(lost.ended), spent, reason))
        self._send(fresh, ("prove",))
        fresh.proving = True
        try:
            while fresh.proving:
                yield self._receive(fresh)
        except _Lost as again:
            raise UnsilentError(
                f"a new worker {again} right after its start; stored results are safe: run the workload alone to see why"
            ) from None

    # -- end ---------------------------------------------------------------------------------------------------

    def wall_seconds(self, work: float) -> float:
        """Expected wall seconds for trials that would keep one worker busy for ``work`` seconds.

        The first worker works alone until the others have loaded the workload, which takes as long as it took the first one.
        """
        alone = min(work, max(0.0, self._all_ready_at - time.monotonic()))
        return alone + (work - alone) / self._jobs

    def seconds_since_last_call(self) -> tuple[float, float]:
        """Wall and CPU seconds since the previous call, including the CPU seconds that workers reported.

        The first call counts from construction.
        """
        wall, cpu = self._watch.lap()
        before, self._reported = self._reported, self._cpu + sum(w.cpu for w in self._workers)
        return wall, cpu + self._reported - before

    def salvage(self) -> list[CampaignRow]:
        """After an interrupt: the finished rows that workers can still verify within a short time."""
        rows: list[CampaignRow] = []
        for worker in [w for w in self._workers if w.ready and w.unverified_rows]:
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


class _Lost(Exception):
    """A worker is lost: it died, passed its deadline, or reported that it is ``unusable``."""

    def __init__(self, why: str, hang: bool = False, unusable: ProcessUnusable | None = None) -> None:
        super().__init__(why)
        self.ended, self.unusable = "hang" if hang else "crash", unusable
        self.certain = hang or (unusable is not None and unusable.caused_by_trial)
        """Whether the running trial certainly caused the loss, so that it need not be run again."""
        self.shortcuts = unusable is not None and unusable.while_preparing_shortcuts


def _outcome(name: str) -> Any:
    from unsilent.outcomes.base import Outcome  # which loads numpy

    return Outcome[name.upper()]


def _what_next(suspects: list[TrialId], settled: bool, lost: _Lost) -> str:
    if settled:
        return f"the trial is recorded as a {lost.ended}"
    if len(suspects) == 1:
        return "the trial runs again, alone"
    return f"the trial and {len(suspects) - 1} others run again, one at a time"


def _how(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return ""
    return f" (signal {-code})" if code < 0 else f" (exit code {code})"


class RefillableIterator:
    """An iterator over a backlog and further trials, which continues after its end if trials were added."""

    def __init__(self, backlog: deque[TrialId], trials: Iterator[TrialId]) -> None:
        self._backlog, self._trials = backlog, trials

    def any_left(self) -> bool:
        """Whether there is a next trial now."""
        for trial in self:
            self.put_back(trial)
            return True
        return False

    def put_back(self, trial: TrialId) -> None:
        """Insert a trial that comes next."""
        self._backlog.appendleft(trial)

    def __iter__(self) -> RefillableIterator:
        return self

    def __next__(self) -> TrialId:
        return self._backlog.popleft() if self._backlog else next(self._trials)
