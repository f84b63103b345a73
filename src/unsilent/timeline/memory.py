"""Peaks of allocated memory, where traces have memory events (``profile_memory=True``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unsilent.timeline.job import PHASES, Job
from unsilent.timeline.step_split import step_bounds


@dataclass(frozen=True)
class MemoryPeak:
    """The most that a rank had allocated in recorded steps.

    Attributes:
        rank: It.
        bytes: As the trace counts them.
        step: Number of the step, as in `Job.steps`.
        phase: One of `PHASES`: of the last operation of the host that had begun.
    """

    rank: int
    bytes: int
    step: int
    phase: str


def memory_peaks(job: Job) -> list[MemoryPeak]:
    """The peak of each rank whose trace has memory events in steps; the first one of equal ones."""
    result, operations = [], job.operations
    is_host = np.array([not lane.is_device for lane in job.lanes], bool)[operations.lane] & (operations.collective < 0)
    for rank, events in job.memory.items():
        begin, end = step_bounds(job, rank)
        known = np.flatnonzero(np.isfinite(begin) & np.isfinite(end))
        place = np.searchsorted(begin[known], events[:, 0], "right") - 1
        inside = np.flatnonzero(place >= 0)
        inside = inside[events[inside, 0] < end[known[place[inside]]]]
        if not len(inside):
            continue
        peak = inside[events[inside, 1].argmax()]
        own = np.flatnonzero(is_host & (operations.rank == rank) & (operations.start <= events[peak, 0]))
        phase = int(operations.phase[own[-1]]) if len(own) else 0
        result.append(MemoryPeak(rank, int(events[peak, 1]), job.steps[int(known[place[peak]])], PHASES[phase]))
    return result
