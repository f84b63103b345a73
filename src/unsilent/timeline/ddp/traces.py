"""Builds the model of a training under DDP from profiler traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval, known_value
from unsilent.report.text import count_text
from unsilent.timeline.ddp.buckets import RecordedBuckets, recorded_buckets
from unsilent.timeline.ddp.model import DdpSteps, LinkCost, fit_link_cost
from unsilent.timeline.job import BACKWARD, COLLECTIVE, Job
from unsilent.timeline.slowdown import CONFIDENCE
from unsilent.timeline.step_split import Floats, latest_entries, step_bounds
from unsilent.timeline.stragglers import has_several_passes

MOST_ERROR = 0.1
"""Predictions are not trusted if the mean error for recorded steps is more than this share of their time."""
RESAMPLES = 200
StepSeconds = Callable[[LinkCost], Floats]
"""Function from the cost of a collective to the predicted seconds of each step."""


class Transfers(NamedTuple):
    """Recorded collectives that carried gradients: the bytes, seconds and step index of each."""

    size: Floats
    seconds: Floats
    step: NDArray[np.int64]


@dataclass(frozen=True)
class DdpJob:
    """Recorded steps and buckets of a training under DDP, and the cost of its collectives.

    Attributes:
        steps: Times of the steps that do not depend on buckets.
        buckets: Gradients of each recorded bucket, by their bytes; indices in the order in which they are ready.
        cost: Cost of a collective, fitted to the collectives of the trace.
        recorded: Seconds of each step, float64[steps].
        item_bytes: Bytes of one number of a gradient when sent; -1: unknown.
        notes: Notes for the reader of any prediction, one sentence each.
        transfers: Transfers that ``cost`` was fitted to; ``None`` if it was not fitted.
    """

    steps: DdpSteps
    buckets: list[list[int]]
    cost: LinkCost
    recorded: Floats
    item_bytes: int = -1
    notes: tuple[str, ...] = ()
    transfers: Transfers | None = None

    @property
    def error(self) -> float:
        """Relative error of the predicted mean step time, positive if the prediction is too long."""
        return float(self.replayed().mean() / self.recorded.mean() - 1)

    @property
    def doubt(self) -> str:
        """Why predictions are not to be trusted, or an empty text if they may be trusted.

        Single steps are compared, as a cost that was fitted to the recording always fits its mean step.
        """
        error = float(np.abs(self.replayed() - self.recorded).mean() / self.recorded.mean())
        if error <= MOST_ERROR:
            return ""
        return (
            f"the model of DDP misses single recorded steps by {100 * error:.3g} % on average (accepted: up to "
            f"{100 * MOST_ERROR:g} %)"
        )

    def ratio(self, predicted: StepSeconds, baseline: StepSeconds) -> Interval:
        """Predicted mean step time divided by that of a baseline, with a bootstrap interval.

        Steps are resampled, and the cost of collectives is fitted anew to each sample.
        """
        estimate, n = float(predicted(self.cost).mean() / baseline(self.cost).mean()), len(self.recorded)
        if n < 2:
            return known_value(estimate, n)
        generator, ratios, fitted = np.random.default_rng(0), [], self.transfers
        for _ in range(RESAMPLES):
            steps, cost = generator.integers(n, size=n), self.cost
            if fitted is not None:
                transfers = np.concatenate([np.flatnonzero(fitted.step == step) for step in steps])
                cost = fit_link_cost(fitted.size[transfers], fitted.seconds[transfers]) if len(transfers) else cost
            ratios.append(float(predicted(cost)[steps].mean() / baseline(cost)[steps].mean()))
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(ratios, (tail, 1 - tail))
        # percentile limits may exclude the estimate, if a resampled fit has another form
        return Interval(
            estimate, min(float(low), estimate), max(float(high), estimate), CONFIDENCE, n, "bootstrap over steps"
        )

    def replayed(self) -> Floats:
        """Seconds of each step as the model predicts them with the recorded buckets, float64[steps]."""
        return self.steps.step_seconds(self.buckets, self.cost)


def ddp_job(job: Job, cost: LinkCost | None = None) -> DdpJob:
    """The training under DDP that a job recorded.

    ``cost`` is the cost of a collective; with ``None``, it is fitted to the collectives of the trace.

    Raises:
        UsageError: Gradients, a backward pass or all-reduces are missing, or differ between ranks.
    """
    ranks, count = job.ranks, len(job.steps)
    if (job.world_size or len(ranks)) < 2:
        raise UsageError(
            "the job has one rank, which sends no gradients; record a training under DDP on 2 ranks or more"
        )
    if has_several_passes(job) or not any("reducer" in name for name in job.operations.names):
        raise UsageError(
            "the traces show no training under DDP with one backward pass in each step; record such a training"
        )
    gradients = {rank: job.gradients.get(rank) for rank in ranks}
    counts = {
        tuple(np.bincount(of_rank.step[of_rank.step >= 0], minlength=count).tolist()) if of_rank is not None else ()
        for of_rank in gradients.values()
    }
    each = set(next(iter(counts))) if len(counts) == 1 else set()
    if len(each) != 1 or not max(each):
        raise UsageError(
            "the traces do not show the same gradients in every step and rank (AccumulateGrad); record a training under DDP"
        )
    gradient_count = int(max(each))
    shape = (len(ranks), count, gradient_count)
    times, sizes = np.empty(shape), np.empty(shape, np.int64)
    for row, rank in enumerate(ranks):
        of_rank = gradients[rank]
        assert of_rank is not None
        order = np.lexsort((of_rank.ready, of_rank.step))
        order = order[of_rank.step[order] >= 0]
        times[row] = of_rank.ready[order].reshape(shape[1:])
        sizes[row] = of_rank.size[order].reshape(shape[1:])
    if (sizes != sizes[0, 0]).any() or (sizes < 0).any():
        raise UsageError(
            "gradients become ready in another order in some steps, or their sizes are unknown; record with record_shapes=True, "
            "and a training that uses its parameters in the same order in every step"
        )
    return _from_times(job, times, sizes[0, 0], cost)


def _from_times(job: Job, times: Floats, sizes: np.ndarray, cost: LinkCost | None) -> DdpJob:
    ranks = job.ranks
    seen, buckets = job.operations, recorded_buckets(job, sizes)
    begins, ends = (np.array(part) for part in zip(*(step_bounds(job, rank) for rank in ranks), strict=True))
    backward, last = np.full(begins.shape, np.inf), np.full(begins.shape, -np.inf)
    of_step = seen.step >= 0
    rows = np.searchsorted(ranks, seen.rank)
    computing = of_step & (seen.phase == BACKWARD) & (seen.kind != COLLECTIVE)
    np.minimum.at(backward, (rows[computing], seen.step[computing]), seen.start[computing])
    if not np.isfinite(backward).all():
        raise UsageError("the traces show a step without a backward pass; record a training under DDP")
    np.maximum.at(
        last,
        (rows[buckets.carries], seen.step[buckets.carries]),
        seen.end[buckets.carries],
    )
    end = np.maximum(times.max(2), backward)
    steps = DdpSteps(
        sizes, backward - begins, times - backward[:, :, None], end - backward, ends - np.maximum(last, end),
        begins[:, 0] - begins[:, 0].min(),
    )  # fmt: skip
    transfers, notes = None, list(_notes(job, buckets))
    if cost is None:
        transfers = _transfers(job, buckets.carries)
        cost = fit_link_cost(transfers.size, transfers.seconds)
        apart = float(np.abs(transfers.seconds / cost(transfers.size) - 1).mean())
        notes.append(
            f"the times of recorded collectives differ from the cost fitted to them by {100 * apart:.2g} % on average"
        )
    return DdpJob(
        steps,
        buckets.gradients,
        cost,
        _periods(begins, ends),
        buckets.item_bytes,
        tuple(notes),
        transfers,
    )


def _notes(job: Job, buckets: RecordedBuckets) -> Iterator[str]:
    operations, world_size = job.operations, job.world_size or len(job.ranks)
    if ((operations.kind == COLLECTIVE) & (operations.step >= 0) & ~buckets.carries).any():
        yield "collectives that carry no gradients are assumed to last as recorded, waits included"
    if len(job.ranks) < world_size:
        yield (
            f"{len(job.ranks):,} of {count_text(world_size, 'rank')} {'was' if len(job.ranks) == 1 else 'were'} read: when the "
            "gradients of the others are ready is not known, and waiting for them counts as the cost of a collective"
        )


def _periods(begins: Floats, ends: Floats) -> Floats:
    """Seconds from the last rank's end of one step to that of the next, float64[steps]."""
    return np.asarray(ends.max(0) - np.append(begins[:, :1].max(0), ends.max(0)[:-1]))


def _transfers(job: Job, which: np.ndarray) -> Transfers:
    """Seconds of each collective after its last rank entered it and the previous collective ended."""
    operations, (entered, _) = job.operations, latest_entries(job)
    numbers = operations.collective[which]
    ended, size = np.full(len(entered), -np.inf), np.zeros(len(entered))
    np.maximum.at(ended, numbers, operations.end[which])
    np.maximum.at(size, numbers, operations.size[which])
    step = np.zeros(len(entered), np.int64)
    step[numbers] = operations.step[which]
    ordered = np.unique(numbers)
    ordered = ordered[np.argsort(ended[ordered], kind="stable")]
    before = np.append(-np.inf, np.maximum.accumulate(ended[ordered])[:-1])  # gloo has two at once on one link
    seconds = ended[ordered] - np.maximum(entered[ordered], before)
    is_known = (size[ordered] > 0) & (seconds > 0)
    if not is_known.any():
        raise UsageError("the traces do not say how large collectives are; record with record_shapes=True")
    return Transfers(size[ordered][is_known], seconds[is_known], step[ordered][is_known])
