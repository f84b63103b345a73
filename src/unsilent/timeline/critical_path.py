"""The chain of operations that determines how long a step takes, across ranks: each began when the one before it had ended."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unsilent.timeline.job import COLLECTIVE, Job
from unsilent.timeline.step_split import latest_entries


class Link(NamedTuple):
    """A part of a critical path.

    Attributes:
        operation: Index.
        seconds: Seconds that it adds: its duration; of a collective, from when its last rank entered it.
        gap: Seconds between the end of what it waited for and its start.
    """

    operation: int
    seconds: float
    gap: float


def critical_path(job: Job, step: int) -> list[Link]:
    """The critical path of a step (an index of `Job.steps`), in the order of time; empty where no operation is of the step."""
    operations = job.operations
    of_step = np.flatnonzero(operations.step == step)
    if not len(of_step):
        return []
    order = np.argsort(job.edges.target, kind="stable")
    sources, targets = job.edges.source[order], job.edges.target[order]
    entered, last = latest_entries(job)
    now, result = int(of_step[np.argmax(operations.end[of_step])]), []
    while True:
        begin = float(operations.start[now])
        if operations.kind[now] == COLLECTIVE and (number := int(operations.collective[now])) >= 0:
            end, begin, now = float(operations.end[now]), float(entered[number]), int(last[number])
        else:
            end = float(operations.end[now])
        first, stop = np.searchsorted(targets, [now, now + 1])
        before = sources[first:stop]
        before = before[(operations.step[before] == step) & (operations.start[before] < operations.start[now])]
        latest = int(before[np.argmax(operations.end[before])]) if len(before) else -1
        gap = max(round(begin - float(operations.end[latest]), 9), 0.0) if latest >= 0 else 0.0
        result.append(Link(now, max(end - begin, 0.0), gap))
        if latest < 0:
            return result[::-1]
        now = latest
