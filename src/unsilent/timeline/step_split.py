"""Divides the time of each rank's steps into computing, transferring, waiting for a late rank, and gaps.

At each moment of a step the first case that applies counts: the rank computes; a collective is transferred, as all its ranks
have entered it; the rank waits in a collective for a rank that has not entered it; neither (a gap), so the rank is idle or busy
only on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.timeline.job import COLLECTIVE, COMPUTE, COPY, Job

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepSplit:
    """Seconds of each rank's steps by how they were spent, float64[ranks, steps] each.

    Attributes:
        ranks: Ranks of the rows.
        begin, end: Begin of the first operation of each step, and of the first one of the next step (or the end of the last
            operation).
        compute: Time in which the rank computed.
        transfer: Time without computation in which a collective was transferred that all its ranks had entered. Time in a
            collective whose other ranks were not found is included, as transfer and waiting cannot be separated there.
        waiting: Remaining time in which the rank was in a collective that another rank had not entered.
        gap: All other time.
        waiting_for: float64[ranks, ranks, steps], ``waiting`` of a rank (first index) by the rank that came last (second
            index).
    """

    ranks: tuple[int, ...]
    begin: Floats
    end: Floats
    compute: Floats
    transfer: Floats
    waiting: Floats
    gap: Floats
    waiting_for: Floats


def latest_entries(job: Job) -> tuple[Floats, NDArray[np.int32]]:
    """When the last rank entered each collective, and the index of that rank's operation.

    The arrays are float64[collectives] and int32[collectives].
    """
    operations = job.operations
    members = np.flatnonzero(operations.collective >= 0)
    order = members[np.lexsort((operations.start[members], operations.collective[members]))]
    numbers = operations.collective[order]
    is_last = np.append(numbers[1:] != numbers[:-1], True) if len(order) else np.zeros(0, bool)
    count = int(numbers[-1]) + 1 if len(order) else 0
    start, last = np.full(count, -np.inf), np.full(count, -1, np.int32)
    start[numbers[is_last]] = operations.start[order[is_last]]
    last[numbers[is_last]] = order[is_last]
    return start, last


def step_bounds(job: Job, rank: int) -> tuple[Floats, Floats]:
    """Begin and end of each step on a rank, float64[steps]; NaN for steps that the rank lacks."""
    operations = job.operations
    of_rank = np.flatnonzero((operations.rank == rank) & (operations.step >= 0))
    if (times := job.step_times.get(rank)) is not None:
        return _joined_steps(job, times[:, 0], times[:, 1].copy())
    begin, end = np.full(len(job.steps), np.inf), np.full(len(job.steps), -np.inf)
    np.minimum.at(begin, operations.step[of_rank], operations.start[of_rank])
    np.maximum.at(end, operations.step[of_rank], operations.end[of_rank])
    return _joined_steps(job, np.where(np.isfinite(begin), begin, np.nan), np.where(np.isfinite(end), end, np.nan))


def _joined_steps(job: Job, begin: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Begin and end of steps, with each end moved to the begin of the next step if that was recorded."""
    for step in np.flatnonzero(np.isfinite(begin[:-1]) & np.isfinite(begin[1:])):
        if job.steps[step + 1] == job.steps[step] + 1:
            end[step] = begin[step + 1]
    return begin, end


def split_steps(job: Job) -> StepSplit:
    """The time of each rank's steps, divided by how it was spent."""
    ranks, steps, operations = job.ranks, len(job.steps), job.operations
    entered, last = latest_entries(job)
    row = {rank: number for number, rank in enumerate(ranks)}
    begin, end = (np.array(part) for part in zip(*(step_bounds(job, rank) for rank in ranks), strict=True))
    parts = {name: np.zeros((len(ranks), steps)) for name in ("compute", "transfer", "waiting", "gap")}
    waiting_for = np.zeros((len(ranks), len(ranks), steps))
    for number, rank in enumerate(ranks):
        of_rank = np.flatnonzero(operations.rank == rank)
        busy = of_rank[np.isin(operations.kind[of_rank], (COMPUTE, COPY)) & (operations.collective[of_rank] < 0)]
        inside = of_rank[operations.kind[of_rank] == COLLECTIVE]
        inside = inside[np.argsort(operations.collective[inside], kind="stable")]
        start, stop = operations.start[inside], operations.end[inside]
        first = np.searchsorted(operations.collective[inside], 0)  # collectives without a partner come before it
        matched = inside[first:]
        all_in = start.copy()
        all_in[first:] = np.clip(entered[operations.collective[matched]], start[first:], stop[first:])
        compute = _Covered(operations.start[busy], operations.end[busy])
        used = _Covered(np.append(operations.start[busy], all_in), np.append(operations.end[busy], stop))
        anything = _Covered(np.append(operations.start[busy], start), np.append(operations.end[busy], stop))
        totals = [covered.between(begin[number], end[number]) for covered in (compute, used, anything)]
        parts["compute"][number], parts["gap"][number] = totals[0], (end - begin)[number] - totals[2]
        parts["transfer"][number], parts["waiting"][number] = totals[1] - totals[0], totals[2] - totals[1]
        alone = ((all_in - start) - used.between(start, all_in))[first:]
        late = np.array([row[int(rank)] for rank in operations.rank[last[operations.collective[matched]]]], np.int64)
        is_of_step = operations.step[matched] >= 0
        np.add.at(waiting_for[number], (late[is_of_step], operations.step[matched][is_of_step]), alone[is_of_step])
        # two collectives may wait at once: each counts for its part
        whole = waiting_for[number].sum(0)
        waiting_for[number] *= np.divide(parts["waiting"][number], whole, out=np.zeros(steps), where=whole > 0)
    return StepSplit(ranks, begin, end, **parts, waiting_for=waiting_for)


class _Covered:
    """A set of time intervals, to measure how much of a time range they cover."""

    def __init__(self, start: Floats, end: Floats) -> None:
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order]) if len(start) else end
        is_new = np.append(True, start[1:] > reach[:-1]) if len(start) else np.zeros(0, bool)
        begins = start[is_new]
        ends = reach[np.append(np.flatnonzero(is_new)[1:] - 1, len(reach) - 1)] if len(start) else reach
        self._times = np.stack([begins, ends], 1).ravel()
        self._totals = np.stack([np.cumsum(ends - begins) - (ends - begins), np.cumsum(ends - begins)], 1).ravel()

    def between(self, start: Floats, end: Floats) -> Floats:
        """Covered seconds of each of the given time ranges, or NaN if a limit is NaN."""
        if not len(self._times):
            return np.where(np.isnan(start + end), np.nan, 0.0)
        result: Floats = np.interp(end, self._times, self._totals) - np.interp(start, self._times, self._totals)
        return result
