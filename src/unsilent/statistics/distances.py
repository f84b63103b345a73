"""Distances between the weights of replicas: L2 of the raw weights, and of weights scaled to unit length.

The raw distance grows with the weights, and one huge weight can dominate it. The normalised distance lies between 0 and 2 and
compares models of any size. Both are computed from differences, never from ``|a|^2 + |b|^2 - 2 ab``, whose rounding errors would
give equal vectors a distance above 0. All calculations use float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.statistics.intervals import Interval
from unsilent.statistics.replica_spread import mean_over_pairs


@dataclass(frozen=True, slots=True)
class Distances:
    """Distances of each pair of replicas, float64[R, R]; equal vectors are at exactly 0."""

    raw: NDArray[np.float64]
    normalised: NDArray[np.float64]

    def mean_raw(self, confidence: float = 0.95) -> Interval:
        """Mean raw distance of two replicas."""
        return mean_over_pairs(self.raw, confidence)

    def mean_unit(self, confidence: float = 0.95) -> Interval:
        """Mean distance of two replicas on the unit sphere."""
        return mean_over_pairs(self.normalised, confidence, max_difference=2.0)


def distance(first: NDArray[Any], second: NDArray[Any]) -> tuple[float, float]:
    """Raw and normalised distance of two weight vectors [P]; infinite if any weight is not finite.

    ``|a/|a| - b/|b||^2 = (|a - b|^2 - (|a| - |b|)^2) / (|a| |b|)``. A zero vector has a normalised distance
    of 0 from another zero vector, and of 1 from any other vector.

    >>> [round(d, 6) for d in distance(np.array([3.0, 0.0]), np.array([0.0, 3.0]))]
    [4.242641, 1.414214]
    """
    a, b = (np.asarray(v, dtype=np.float64).ravel() for v in (first, second))
    if a.shape != b.shape:
        raise UsageError(
            f"weights of {a.size} and {b.size} elements cannot be compared; compare runs of the same model"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf, math.inf
    scale = max(float(np.abs(a).max(initial=0.0)), float(np.abs(b).max(initial=0.0)))
    if scale == 0:
        return 0.0, 0.0
    a, b = a / scale, b / scale  # squares of very large values would overflow
    apart, norm_a, norm_b = (float(np.linalg.norm(v)) for v in (a - b, a, b))
    if norm_a == 0 or norm_b == 0:
        return apart * scale, 1.0
    around = max(0.0, (apart - (norm_a - norm_b)) * (apart + (norm_a - norm_b)))
    return apart * scale, min(2.0, math.sqrt(around / norm_a / norm_b))


def weight_distances(load: Callable[[int], NDArray[Any]], count: int) -> Distances:
    """Distances of all pairs of replicas; ``load(r)`` returns the weights of replica r, [P].

    At most two replicas are in memory at a time.
    """
    raw, unit = np.zeros((count, count)), np.zeros((count, count))
    for i in range(count - 1):
        weights = np.asarray(load(i), dtype=np.float64)
        for j in range(i + 1, count):
            raw[i, j], unit[i, j] = distance(weights, load(j))
    return Distances(raw + raw.T, unit + unit.T)
