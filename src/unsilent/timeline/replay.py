"""Replays a job: when each operation starts and ends, given its duration and the gap before it.

An operation starts a gap after the latest end of the operations that it depends on. If it depends on none, it starts a gap
after the begin of its step: the begin on its own rank, or that on all ranks if no step depends on another one. A member of a
collective ends its own transfer time after the latest start of the members. Operations that wait only for the one before them
form a chain, whose times follow from that of its first operation. The order of chains is computed once (`schedule`). A replay
then processes it level by level, with all chains of a level and all requested variants at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.timeline.job import Job, Operations
from unsilent.timeline.schedule import make_schedule

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Replay:
    """Replays one job with given durations and gaps.

    Attributes:
        job: The job that is replayed.
        durations: Recorded durations in seconds, float64[n]; for a member of a collective its transfer time, from the last
            start of the members to its own end.
        gaps: Recorded gaps in seconds, float64[n]: the time between an operation's earliest possible start and its actual
            start.
        is_chained: Whether steps depend on each other.

    Raises:
        UsageError: There are no operations, or some wait for each other.
    """

    def __init__(self, job: Job) -> None:
        operations = job.operations
        if not len(operations):
            raise UsageError("the trace has no operations of complete steps; expected at least one step of all ranks")
        self.job = job
        self._by_step, self._steps = _bounds(operations.step)
        steps = operations.step[self._by_step[self._steps]]
        depends = _depends_on_earlier(job, steps)
        self.is_chained = bool(depends.any())
        self._release = _step_begins(job, by_rank=self.is_chained)
        numbers = np.array(job.steps)[steps]
        self._follows = depends & (np.diff(numbers, prepend=numbers[:1]) == 1)
        self._resumes = depends & ~self._follows
        _, collectives = np.unique(operations.collective, return_inverse=True)
        self.durations = operations.duration.astype(np.float64)
        is_member = operations.collective >= 0
        latest_start = np.full(collectives.max() + 1, -np.inf)
        np.maximum.at(latest_start, collectives[is_member], operations.start[is_member])
        self.durations[is_member] = (operations.end - latest_start[collectives])[is_member]
        latest = latest_end(job, np.ones(len(job.edges.source), bool))
        self.gaps = operations.start - np.where(np.isneginf(latest), self._release, latest)
        self._schedule = make_schedule(job)

    def run(self, durations: Floats, gaps: Floats) -> tuple[Floats, Floats]:
        """Start and end of each operation in a replay, in seconds since the job's begin.

        Args:
            durations: Seconds, float64[n], or float64[n, k] for k replays at once; for a member of a collective its transfer
                time.
            gaps: Seconds, float64[n], equal in all replays.

        Returns:
            Two arrays of the shape of ``durations``.
        """
        shape = durations.shape
        plan, n = self._schedule, len(gaps)
        durations = durations.reshape(n, -1)
        lasting, waiting = durations[plan.heads], gaps[plan.heads, None]
        start, end = np.empty_like(lasting), np.empty_like(lasting)
        start[:] = self._release[plan.heads, None]
        after = self._after_heads(durations, gaps)
        behind = after[plan.sources_behind]
        for level in plan.levels:
            begun = slice(level.first, level.last)
            if len(level.sources):
                ended = end.take(level.sources, 0)
                if len(level.behind):
                    ended[level.behind] += behind[level.behind_first : level.behind_first + len(level.behind)]
                start[begun] = np.maximum.reduceat(ended, level.source_begins, 0)
            start[begun] += waiting[begun]
            np.add(start[begun], lasting[begun], out=end[begun])
            if len(level.members):
                latest = np.maximum.reduceat(start.take(level.members, 0), level.member_begins, 0)
                end[level.members] = latest.take(level.which, 0) + lasting.take(level.members, 0)
        result = np.empty((2, *durations.shape))
        result[0, plan.heads], result[1, plan.heads] = start, end
        if len(plan.followers):
            after += np.repeat(end, plan.counts, axis=0)
            result[0, plan.followers], result[1, plan.followers] = after - durations[plan.followers], after
        return result[0].reshape(shape), result[1].reshape(shape)

    def _after_heads(self, durations: Floats, gaps: Floats) -> Floats:
        """Seconds from the end of a chain's first operation to the end of each later one, float64[followers, k]."""
        plan = self._schedule
        after = np.cumsum(durations[plan.followers] + gaps[plan.followers, None], axis=0)
        begins = (np.cumsum(plan.counts) - plan.counts)[plan.counts > 0]
        earlier = np.zeros((len(begins), after.shape[1]))
        earlier[1:] = after[begins[1:] - 1]
        after -= np.repeat(earlier, plan.counts[plan.counts > 0], axis=0)
        return after

    def step_seconds(self, start: Floats, end: Floats) -> Floats:
        """Seconds from the last rank's end of one step to its end of the next, float64[steps].

        With k replays, float64[steps, k].

        A rank that is ahead of the others makes no step longer. The first step, and each step that depends on no earlier one,
        counts from the recorded begin of the last rank. A step after steps that were not recorded counts from its own begin.
        """
        last = np.maximum.reduceat(end.take(self._by_step, 0), self._steps, 0)
        begin = np.maximum.reduceat(self._release[self._by_step], self._steps)
        before = np.empty_like(last)
        before.T[:] = begin
        before[self._follows] = last[np.flatnonzero(self._follows) - 1]
        before[self._resumes] = np.minimum.reduceat(start.take(self._by_step, 0), self._steps, 0)[self._resumes]
        return np.asarray(last - before)


def latest_end(job: Job, used: NDArray[np.bool_]) -> Floats:
    """The latest recorded end of the operations that each operation depends on, or -inf if there are none.

    ``used`` selects the edges that count, bool[m].
    """
    result = np.full(len(job.operations), -np.inf)
    np.maximum.at(result, job.edges.target[used], job.operations.end[job.edges.source[used]])
    return result


def unexplained_gaps(job: Job, left_out: tuple[int, ...] = ()) -> Floats:
    """Seconds that each operation could have started earlier by its dependencies, float64[n].

    An operation can start at the begin of its step at the earliest. ``left_out`` are kinds of edges that are ignored, which
    makes no gap smaller.
    """
    latest = latest_end(job, ~np.isin(job.edges.kind, left_out))
    return np.asarray(np.maximum(job.operations.start - np.maximum(latest, _step_begins(job)), 0.0))


def leave_one_step_out(replay: Replay) -> Floats:
    """Relative error of each step's time when it is predicted from the other steps.

    The error is predicted / recorded - 1, and NaN with one step.

    Each operation takes the mean duration and the mean gap of its counterparts in the other steps. A counterpart has the same
    place among the operations with its name in its lane and step. An operation that occurs in only one step keeps its own values.
    """
    operations = replay.job.operations
    recorded = replay.step_seconds(operations.start, operations.end)
    if len(recorded) < 2:
        return np.full(len(recorded), np.nan)
    same = same_place(operations, operations.lane)
    # if steps depend on each other, only the first operations wait for nothing, and their gaps are unlike others
    is_first = replay.is_chained & (np.bincount(replay.job.edges.target, minlength=len(same)) == 0)
    gapped = np.where(is_first, len(same) + np.arange(len(same)), same)
    predicted = replay.step_seconds(*replay.run(_of_others(replay.durations, same), _of_others(replay.gaps, gapped)))
    return np.asarray(predicted / recorded - 1)


def _of_others(values: Floats, same: Indices) -> Floats:
    """The mean of the other values with the same number in ``same``, float64[n].

    A value without others is kept.
    """
    counts, sums = np.bincount(same)[same], np.bincount(same, values)[same]
    return np.where(counts > 1, (sums - values) / np.maximum(counts - 1, 1), values)


def same_place(operations: Operations, of: NDArray[np.int32]) -> Indices:
    """Numbers that are equal for operations at the same place of different steps, int64[n].

    Operations of different lanes can get equal numbers if their values of ``of`` are equal.
    """
    order = np.lexsort((operations.start, operations.step, operations.name, operations.lane))
    keys = np.stack([operations.lane, operations.name, operations.step])[:, order]
    begins = np.concatenate([[0], np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    numbers = np.zeros(len(order), np.int64)
    for values in (of, operations.name, place):
        numbers = np.unique(numbers * (int(values.max()) + 1) + values, return_inverse=True)[1]
    return numbers


def _step_begins(job: Job, by_rank: bool = False) -> Floats:
    """Begin of each operation's step, float64[n]; 0 for operations outside of steps.

    The earliest rank counts, or each operation's own rank with ``by_rank``.
    """
    operations = job.operations
    row = np.searchsorted(job.ranks, operations.rank) if by_rank else np.zeros(len(operations), np.intp)
    begins = np.full((len(job.ranks), int(operations.step.max()) + 2), np.inf)
    np.minimum.at(begins, (row, operations.step), operations.start)
    begins[:, -1] = 0.0  # where those of no step wrote
    return np.asarray(begins[row, operations.step])


def _depends_on_earlier(job: Job, steps: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether some operation of each step depends on an earlier step, bool[steps]."""
    source, target = job.operations.step[job.edges.source], job.operations.step[job.edges.target]
    return np.isin(steps, target[source < target])  # -1, of no step: between two steps


def _bounds(step: NDArray[np.int32]) -> tuple[Indices, Indices]:
    """Operations ordered by step, and the position of each step's first operation."""
    order = np.argsort(step, kind="stable")
    order = order[np.searchsorted(step[order], 0) :]
    return order, np.flatnonzero(np.diff(step[order], prepend=-1))
