"""A model of training steps under DDP, from gradient times, buckets and the cost of collectives.

The time of a step is computed from recorded times that no other rank delays (the time before the backward pass, the time until
each gradient is ready, the time after the last collective) and from the cost of collectives. Buckets, their costs and delays of
ranks can be replaced. Buckets are sent one after the other, as they share a link. Each is sent once it is ready on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.timeline.step_split import Floats

MIB = 2**20
DEFAULT_CAPS = (MIB, 25 * MIB)
"""Default bytes of DDP's buckets: the first one, and the others."""
Cost = Callable[[Floats], Floats]
"""Function from the bytes of collectives to their seconds, float64[...] -> float64[...]."""


def assign_buckets(sizes: Sequence[int], caps: Sequence[int]) -> list[list[int]]:
    """The buckets into which DDP puts gradients of the given sizes.

    A bucket is closed once it holds its cap or more; no gradient is divided. The last cap also applies to all further buckets.

    Args:
        sizes: Bytes of each gradient.
        caps: Bytes of each bucket.

    Returns: Indices of gradients by bucket.
    """
    result: list[list[int]] = []
    bucket, size = list[int](), 0
    for index, byte_count in enumerate(sizes):
        bucket.append(index)
        size += byte_count
        if size >= caps[min(len(result), len(caps) - 1)]:
            result.append(bucket)
            bucket, size = [], 0
    return [*result, bucket] if bucket else result


@dataclass(frozen=True)
class DdpSteps:
    """Recorded times of the steps of a training under DDP that do not depend on buckets.

    Attributes:
        sizes: Bytes of each gradient, in the order in which they are ready, int64[gradients].
        before: Seconds from the begin of a step to the begin of its backward pass, float64[ranks, steps].
        ready: Seconds from the begin of the backward pass until each gradient is ready, float64[ranks, steps, gradients].
        backward: Seconds from the begin to the end of the backward pass without waiting, float64[ranks, steps].
        after: Seconds from the end of the backward pass and its collectives to the end of the step, float64[ranks, steps].
        skew: Seconds by which each rank begins the first step late, float64[ranks].
    """

    sizes: NDArray[np.int64]
    before: Floats
    ready: Floats
    backward: Floats
    after: Floats
    skew: Floats

    def step_seconds(self, buckets: Sequence[Sequence[int]], cost: Cost, size_factor: float = 1.0) -> Floats:
        """Predicted seconds of each step with the given buckets, float64[steps].

        A step lasts from when the last rank ended the previous one until the last rank ends it.

        Args:
            buckets: Indices of gradients by bucket, see `assign_buckets`.
            cost: Cost of a collective.
            size_factor: Bytes sent for each byte of gradients (0.5: 16 bits for 32).
        """
        steps = self.before.shape[1]
        seconds = cost(size_factor * np.array([float(self.sizes[list(bucket)].sum()) for bucket in buckets]))
        filled = np.stack([self.ready[:, :, list(bucket)].max(2) for bucket in buckets], 2)
        clock, result = self.skew.astype(float), np.empty(steps)
        for step in range(steps):
            begin = clock + self.before[:, step]
            entered = (begin[:, None] + filled[:, step]).max(0)
            link = -np.inf
            for bucket in range(len(buckets)):
                link = max(link, entered[bucket]) + seconds[bucket]
            end = np.maximum(begin + self.backward[:, step], link) + self.after[:, step]
            result[step] = end.max() - clock.max()
            clock = end
        return result


@dataclass(frozen=True)
class LinkCost:
    """The duration of a collective as a linear function of its size: a latency plus a cost per byte.

    The line was fitted to collectives of ``smallest`` to ``largest`` bytes.
    """

    latency: float
    per_byte: float
    smallest: float
    largest: float

    def __call__(self, size: Floats) -> Floats:
        """Seconds of collectives of the given sizes."""
        return self.latency + self.per_byte * size

    @property
    def grows(self) -> bool:
        """Whether larger collectives cost more.

        This holds for any link; if it is false, the collectives of the fit did not show it.
        """
        return self.per_byte > 0

    def covers(self, size: Floats) -> bool:
        """Whether the cost grows with size, and all sizes are within the range of its fit."""
        return self.grows and bool(len(size) == 0 or (size.min() >= self.smallest and size.max() <= self.largest))


def server_cost(all_reduce: LinkCost, ranks: int, servers: int) -> LinkCost:
    """The cost of pushing a bucket to parameter servers and pulling its sum.

    The servers are separate from the ranks. Each has a link like a rank's, and an even share of each bucket. A rank's link
    carries the bucket once, and a server's link the parts of all ranks, first in one direction, then in the other. The most
    loaded link determines the cost.

    Args:
        all_reduce: Cost of a ring all-reduce of the ranks, which has 2 (n - 1) latencies, and carries 2 (n - 1) / n of the
            payload.
        ranks: Number n of ranks, at least 2.
        servers: Number of servers, at least 1.
    """
    hops = 2 * (ranks - 1)
    per_byte = all_reduce.per_byte * ranks / hops
    return LinkCost(
        2 * all_reduce.latency / hops, 2 * max(1.0, ranks / servers) * per_byte, all_reduce.smallest, all_reduce.largest
    )


def fit_link_cost(sizes: Floats, seconds: Floats) -> LinkCost:
    """Fit a nonnegative latency and cost per byte to the mean time of each size.

    If all collectives have one size, the whole time counts as the cost of its bytes.

    Means are used because mean step times are predicted: a few slow collectives lengthen the mean step, but not the median.
    """
    distinct = np.unique(sizes)
    means = np.array([seconds[sizes == size].mean() for size in distinct])
    if len(distinct) == 1:
        return LinkCost(0.0, float(means[0] / distinct[0]), float(distinct[0]), float(distinct[0]))
    from scipy.optimize import nnls

    weights = 1 / means.clip(1e-9)  # relative errors count, so that small sizes matter
    (latency, per_byte), _ = nnls(np.stack([weights, distinct * weights], 1), np.ones(len(distinct)))
    return LinkCost(float(latency), float(per_byte), float(distinct[0]), float(distinct[-1]))
