"""Finds the rank that delays the others, and the part of the step in which it is late.

A collective makes the ends of a backward pass equal on all ranks, and the ranks that are not late contain the wait. So a step
is divided at moments that no other rank delays: its begin, the first operations of the forward and the backward pass, the
launches of its first and its last collective, and the first operation of the optimizer. A rank is reported if its part takes
longer than the median of the other ranks by more than the noise floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unsilent.timeline.job import BACKWARD, CHAIN, FORWARD, LAUNCH, OPTIMIZER, WAIT, Job
from unsilent.timeline.step_split import Floats, StepSplit, split_steps, step_bounds

PARTS = ("loader", "forward", "early backward", "late backward", "optimizer")
"""Parts of a step in which a rank may be late; the backward pass is divided at the launch of its first collective."""
CONFIDENCE = 0.999
"""Confidence of the limits of all ranks and parts together."""
LEAST_SHARE = 0.005
"""Least share of a step that counts; smaller differences are not relevant, and clocks differ by as much."""
LEAST_STEPS = 5
AT_ONCE = 3e-4
"""Longest time in seconds until a thread continues after a wait (or a tenth of the wait, if that is longer)."""


@dataclass(frozen=True)
class Excess:
    """How much longer one rank takes for a part of a step than the other ranks.

    Attributes:
        rank, part: Rank, and part of a step (one of `PARTS`).
        seconds: Median over steps of the difference from the median of the other ranks.
        floor: Amount by which the median may be too large, at `CONFIDENCE` for all ranks and parts together: the larger of the
            limits by its standard error and by the order of the values, and at least `LEAST_SHARE` of a step. An excess below
            it is not separable from noise.
        steps: Number of compared steps.
        is_awaited: Whether the others wait for this rank at least as long as it waits for them.
    """

    rank: int
    part: str
    seconds: float
    floor: float
    steps: int
    is_awaited: bool = True

    @property
    def is_separable(self) -> bool:
        """Whether the rank is late in this part of the step by more than noise."""
        return self.seconds > self.floor and self.is_awaited


def part_seconds(job: Job) -> Floats:
    """Seconds of each part of a step, float64[ranks, steps, parts]; NaN for a missing part."""
    operations = job.operations
    is_launch = np.zeros(len(operations), bool)
    launches = job.edges.kind == LAUNCH
    is_launch[job.edges.source[launches & (operations.collective[job.edges.target] >= 0)]] = True
    if not is_launch.any():
        is_launch = operations.collective >= 0
    result, waits = np.full((len(job.ranks), len(job.steps), len(PARTS)), np.nan), _waits(job)
    for number, rank in enumerate(job.ranks):
        of_rank = (operations.rank == rank) & (operations.step >= 0)
        begin, end = step_bounds(job, rank)
        forward = _earliest_starts(job, of_rank & (operations.phase == FORWARD))
        backward = _earliest_starts(job, of_rank & (operations.phase == BACKWARD))
        # gradients may be set to zero at the begin of a step, which is also an operation of the optimizer
        last_backward = -_earliest_starts(job, of_rank & (operations.phase == BACKWARD), -1)
        is_after = operations.start >= last_backward[operations.step]
        optimizer = _earliest_starts(job, of_rank & (operations.phase == OPTIMIZER) & is_after)
        of_backward = of_rank & is_launch & (operations.start >= backward[operations.step])
        of_backward &= ~(operations.start >= optimizer[operations.step])
        first, last = _earliest_starts(job, of_backward), -_earliest_starts(job, of_backward, -1)
        last = np.where(np.isfinite(last), last, np.nan)
        moments = (begin, forward, backward, first, last)
        for part, (begun, ended) in enumerate(pairwise(moments)):
            result[number, :, part] = ended - begun
        # a collective that the host waits for is not its own work
        is_inside = of_rank & (operations.start > first[operations.step]) & (operations.start <= last[operations.step])
        result[number, :, PARTS.index("late backward")] -= np.bincount(
            operations.step[is_inside], waits[is_inside], len(job.steps)
        )
        result[number, :, len(PARTS) - 1] = end - optimizer
    return result


def _waits(job: Job) -> Floats:
    """Seconds before each operation in which its thread waited for a collective, float64[n].

    If the collective ended long before the end of a gap, the gap is not a wait for it, as the thread would have continued at
    once.
    """
    operations, edges = job.operations, job.edges
    result = np.zeros(len(operations))
    chain = edges.kind == CHAIN
    previous = np.full(len(operations), np.nan)
    previous[edges.target[chain]] = operations.end[edges.source[chain]]
    waited = (edges.kind == WAIT) & (operations.collective[edges.source] >= 0)
    source, target = edges.source[waited], edges.target[waited]
    gap = operations.start[target] - previous[target]
    late = operations.start[target] - operations.end[source]
    is_wait = late <= np.maximum(AT_ONCE, 0.1 * gap)
    np.maximum.at(result, target[is_wait], np.nan_to_num(operations.end[source] - previous[target])[is_wait])
    return result


def has_several_passes(job: Job) -> bool:
    """Whether forward operations follow the begin of the backward pass in most steps of the first rank."""
    operations = job.operations
    of_rank = (operations.rank == job.ranks[0]) & (operations.step >= 0)
    backward = _earliest_starts(job, of_rank & (operations.phase == BACKWARD))
    last_forward = -_earliest_starts(job, of_rank & (operations.phase == FORWARD), -1)
    return bool(np.mean(last_forward > backward) > 0.5)


def _earliest_starts(job: Job, which: NDArray[np.bool_], sign: int = 1) -> Floats:
    """The earliest start of the selected operations in each step, float64[steps]; NaN for steps without any.

    With ``sign`` -1, the negative of the latest start.
    """
    result = np.full(len(job.steps), np.inf)
    np.minimum.at(result, job.operations.step[which], sign * job.operations.start[which])
    return np.where(np.isfinite(result), result, np.nan)


def has_like_parts(job: Job) -> bool:
    """Whether all ranks run the same parts of steps, so that they can be compared.

    False for stages of a pipeline and for several backward passes in a step.
    """
    return len(set(job.stages.values())) <= 1 and not has_several_passes(job)


def excesses(job: Job, split: StepSplit | None = None) -> list[Excess]:
    """How late every rank is in every part of a step, the clearest first.

    ``split`` saves dividing the steps again.

    The result is empty if there are too few ranks or steps to compare, or if parts are not alike.
    """
    if len(job.ranks) < 2 or len(job.steps) < LEAST_STEPS or not has_like_parts(job):
        return []
    waiting = np.nanmean((split or split_steps(job)).waiting_for, 2)
    begins_ends = [step_bounds(job, rank) for rank in job.ranks]
    step = float(np.nanmedian([end - begin for begin, end in begins_ends]))
    return array_excesses(part_seconds(job), job.ranks, PARTS, step, waiting.sum(0) >= waiting.sum(1))


def array_excesses(
    seconds: Floats, ranks: Sequence[int], parts: Sequence[str], step: float, is_awaited: NDArray[np.bool_]
) -> list[Excess]:
    """How late every rank is in every part, the clearest first; empty with too few ranks or steps.

    Args:
        seconds: Seconds of parts, float64[ranks, steps, parts]; NaN: unknown.
        ranks, parts: Numbers of the ranks and names of the parts.
        step: Duration of a step in seconds.
        is_awaited: Whether others wait for each rank, see `Excess`, bool[ranks].
    """
    result = []
    for number, rank in enumerate(ranks if len(ranks) > 1 else ()):
        differences = differences_from_others(seconds, number)
        for part, name in enumerate(parts):
            values = differences[np.isfinite(differences[:, part]), part]
            if len(values) >= LEAST_STEPS:
                floor = max(LEAST_SHARE * step, _half_width(values, 1 - (1 - CONFIDENCE) / (len(ranks) * len(parts))))
                excess = Excess(rank, name, float(np.median(values)), floor, len(values), bool(is_awaited[number]))
                result.append(excess)
    return sorted(
        result, key=lambda excess: (-excess.is_awaited, -excess.seconds / excess.floor if excess.floor else 0.0)
    )


def differences_from_others(seconds: Floats, number: int) -> Floats:
    """Seconds of one rank's parts minus the median of the other ranks, float64[steps, parts]."""
    result: Floats = seconds[number] - np.median(np.delete(seconds, number, 0), 0)
    return result


def _half_width(values: Floats, confidence: float) -> float:
    """Half the width of a confidence interval of the median, for samples that may have outliers.

    The lower limit is also at most one that holds for any distribution: more values are above that one than chance explains. If
    there are too few values, the smallest one is used. A rank is therefore not a straggler if another program delays it in half
    of the steps.
    """
    from scipy import stats

    median, count = float(np.median(values)), len(values)
    spread = 1.4826 * float(np.median(np.abs(values - median)))
    quantile = float(stats.t.ppf((1 + confidence) / 2, count - 1))
    below = int(np.searchsorted(stats.binom.cdf(np.arange(count), count, 0.5), (1 - confidence) / 2, "right")) - 1
    by_order = median - float(np.sort(values)[max(below, 0)])
    by_error: float = quantile * 1.2533 * spread / count**0.5
    return max(by_error, by_order)
