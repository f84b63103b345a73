"""Peaks of allocated memory, from traces with memory events (``profile_memory=True``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.timeline.job import PHASES, Job
from unsilent.timeline.step_split import step_bounds


@dataclass(frozen=True)
class MemoryPeak:
    """The most that a rank had allocated in recorded steps.

    Attributes:
        rank: Rank with this peak.
        bytes: Number of allocated bytes, as counted in the trace.
        step: Number of the step, as in `Job.steps`.
        phase: One of `PHASES`, that of the last operation of the host that had begun.
    """

    rank: int
    bytes: int
    step: int
    phase: str


def memory_peaks(job: Job) -> list[MemoryPeak]:
    """The memory peak of each rank whose trace has memory events in steps.

    Of several equal peaks, the first one is given.
    """
    result, operations = [], job.operations
    is_host = np.array([not lane.is_device for lane in job.lanes], bool)[operations.lane] & (operations.collective < 0)
    for rank, events in job.memory.items():
        steps = steps_of_events(job, rank)
        inside = np.flatnonzero(steps >= 0)
        if not len(inside):
            continue
        peak = inside[events[inside, 1].argmax()]
        begun = np.flatnonzero(is_host & (operations.rank == rank) & (operations.start <= events[peak, 0]))
        phase = int(operations.phase[begun[-1]]) if len(begun) else 0
        result.append(MemoryPeak(rank, int(events[peak, 1]), job.steps[int(steps[peak])], PHASES[phase]))
    return result


def steps_of_events(job: Job, rank: int) -> NDArray[np.int64]:
    """Index in `Job.steps` of each memory event of a rank, or -1 for events outside of steps."""
    begin, end = step_bounds(job, rank)
    known = np.flatnonzero(np.isfinite(begin) & np.isfinite(end))
    times = job.memory[rank][:, 0]
    place = np.searchsorted(begin[known], times, "right") - 1
    steps = np.append(known, -1)[place]
    return np.asarray(np.where((steps >= 0) & (times < np.append(end, -np.inf)[steps]), steps, -1))


def blocks(events: NDArray[np.float64]) -> NDArray[np.float64]:
    """Blocks of memory in the order of their allocation, float64[blocks, 3].

    A row has the times of allocation and of freeing (inf: never freed), and the bytes.
    """
    order = np.lexsort((np.arange(len(events)), events[:, 3]))
    ordered = events[order]
    is_new = ordered[:, 2] > 0
    is_freed = np.append((ordered[1:, 3] == ordered[:-1, 3]) & (ordered[1:, 2] < 0), False)[: len(ordered)]
    freed = np.where(is_freed, np.append(ordered[1:, 0], np.inf)[: len(ordered)], np.inf)
    result = np.stack([ordered[:, 0], freed, ordered[:, 2]], 1)[is_new]
    return np.asarray(result[np.argsort(result[:, 0], kind="stable")])
