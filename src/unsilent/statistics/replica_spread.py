"""Differences among replicas of one training run: spread of a number, churn of predictions, first differing step.

Every measure here is a mean over pairs of replicas (a U-statistic of degree 2), including the variance, the mean of ``(x - y)^2 /
2``. Pairs share replicas, so R replicas are only R independent units, not R (R - 1) / 2. Intervals therefore leave out one
*replica* at a time (jackknife; Arvesen 1969, Ann. Math. Statist. 40:2076) and use Student's t with R - 1 degrees of freedom. The
jackknife variance is biased upwards (Efron & Stein 1981, Ann. Statist. 9:586), which is the safe side. Logarithms are used if the
kernel cannot be negative. A bootstrap over replicas that drops pairs of one original covers 45 to 76 % instead of 95 % at
five replicas or fewer. The jackknife's coverage, and the cases in which it fails too, are in docs/evidence/noise.md.

For a standard deviation the jackknife is not enough: if half of the replicas have one value and half another, its interval has
no width, since leaving out one replica has no first-order effect. `spread` combines it with the chi-square interval of a normal
sample and takes the smaller of the lower limits and the larger of the upper limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.statistics.intervals import Interval, check_confidence, clopper_pearson, median_interval

MIN_REPLICAS = 3
"""Minimum number of replicas for an interval: leaving one out must leave a pair."""
FEW_REPLICAS = 10
"""Number of replicas below which the ``method`` of an interval notes that there are few."""
MAX_LIMIT_FACTOR = 1000.0
"""Limits further than this factor from the estimate are useless, so they are not reported."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Variation of one number over replicas, with intervals.

    Attributes:
        sd: Standard deviation with n - 1 in the denominator.
        mean, least, greatest: Mean, smallest and largest value of the replicas.
    """

    sd: Interval
    mean: float
    least: float
    greatest: float

    @property
    def range(self) -> float:
        """Greatest minus least value; without an interval, since it grows with the number of replicas."""
        return self.greatest - self.least


def spread(
    values: Sequence[float] | NDArray[Any], confidence: float = 0.95, max_difference: float | None = None
) -> Spread:
    """Spread over replicas of a number with one value per replica, float64[R].

    ``max_difference``: largest possible difference between two replicas, for example 1 for an accuracy.

    >>> found = spread([0.70, 0.71, 0.69, 0.70], max_difference=1.0)
    >>> round(found.sd.estimate, 4), round(found.range, 2)
    (0.0082, 0.02)
    """
    x = np.asarray(values, dtype=np.float64)
    check_replica_count(x.shape[0] if x.ndim else 0)
    check_finite("a value of", x)
    least, greatest = float(x.min()), float(x.max())
    scale = max(greatest / 2 - least / 2, 0.0) or 1.0  # squares of very large values would overflow
    part = x / scale - least / scale
    kernel = (part[:, None] - part[None, :]) ** 2 / 2
    result = sd_interval_from_variance(
        mean_over_pairs(kernel, confidence, None if max_difference is None else (max_difference / scale) ** 2 / 2)
    )
    sd, low, high = (scale * value for value in (result.estimate or 0.0, result.low, result.high))
    if sd:
        below, above = _normal_factors(len(x), confidence)
        low, high = min(low, below * sd), max(high, above * sd)
        result = replace(result, method=result.method.replace("replicas", "replicas and chi-square"))
    high = high if max_difference is None else min(high, max_possible_sd(len(x), max_difference))
    mean = least + scale * float(part.mean())
    return Spread(replace(result, estimate=sd, low=low, high=max(sd, high)), mean, least, greatest)


def max_possible_sd(count: int, most: float = 1.0) -> float:
    """Upper limit of the sample standard deviation of ``count`` values within [0, most]."""
    return most * math.sqrt(count / (count - 1)) / 2


def _normal_factors(count: int, confidence: float) -> tuple[float, float]:
    """Limits of a normal distribution's standard deviation, as multiples of the sample's."""
    from scipy.special import chdtri

    tail = (1 - confidence) / 2
    below, above = (math.sqrt((count - 1) / float(chdtri(count - 1, share))) for share in (tail, 1 - tail))
    return below, above


def pairwise_churn(predictions: NDArray[Any]) -> NDArray[np.float64]:
    """Share of samples that two replicas predict differently, for each pair; int[R, n] -> float64[R, R]."""
    predictions = np.asarray(predictions)
    if predictions.ndim != 2 or predictions.shape[1] == 0 or predictions.dtype.kind not in "iub":
        raise UsageError(
            f"churn needs predicted classes as whole numbers [replicas, samples], "
            f"found {predictions.dtype} {list(predictions.shape)}; give the argmax, not the scores"
        )
    return np.array([(predictions != row).mean(axis=1) for row in predictions], dtype=np.float64)


def churn(predictions: NDArray[Any], confidence: float = 0.95) -> Interval:
    """Mean share of predictions that differ between two replicas; predictions are int[R, n].

    >>> churn(np.array([[0, 1, 2, 1], [0, 1, 2, 2], [0, 1, 1, 1]])).estimate
    0.3333333333333333
    """
    return mean_over_pairs(pairwise_churn(predictions), confidence, max_difference=1.0)


def mean_over_pairs(
    matrix: NDArray[np.float64], confidence: float = 0.95, max_difference: float | None = None
) -> Interval:
    """Mean of a symmetric matrix over pairs of different replicas, float64[R, R].

    ``max_difference``: largest possible value of a pair; ``None`` if there is no maximum. If all replicas are equal, the
    upper limit is the Clopper-Pearson limit of R // 2 pairs without a common replica times ``max_difference``, or infinity
    without a maximum. Limits further than a factor of `MAX_LIMIT_FACTOR` from the estimate become 0 and ``max_difference``.
    """
    check_confidence(confidence)
    count = matrix.shape[0] if matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] else 0
    check_replica_count(count)
    pairs = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(pairs, 0.0)
    check_finite("a comparison with", pairs)
    if not np.allclose(pairs, pairs.T, rtol=1e-9, atol=0.0):
        raise ValueError("the matrix over pairs must be symmetric")
    label = "jackknife over replicas" + (f", few ({count})" if count < FEW_REPLICAS else "")
    if not pairs.any():
        high = math.inf if max_difference is None else max_difference * clopper_pearson(0, count // 2, confidence).high
        return Interval(0.0, 0.0, high, confidence, count, f"all {count} replicas equal")
    total = float(pairs.sum())
    estimate = total / (count * (count - 1))
    without = (total - 2 * pairs.sum(axis=1)) / ((count - 1) * (count - 2))
    if pairs.min() >= 0 and without.min() > 1e-9 * estimate:
        half = _half(np.log(without), confidence)
        low, high = 0.0, math.inf
        if half <= math.log(MAX_LIMIT_FACTOR):
            low, high = estimate * math.exp(-half), estimate * math.exp(half)
    else:  # one replica contributes the whole mean, or the matrix has negative values
        half = _half(without, confidence)
        low, high = estimate - half, estimate + half
        low = max(0.0, low) if pairs.min() >= 0 else low
    high = high if max_difference is None else min(max_difference, high)
    return Interval(estimate, min(low, estimate), max(high, estimate), confidence, count, label)


def _half(without: NDArray[np.float64], confidence: float) -> float:
    """Half-width of an interval from the jackknife estimates, which each leave out one replica."""
    from scipy.special import stdtrit

    count = len(without)
    error = math.sqrt((count - 1) / count * float(((without - without.mean()) ** 2).sum()))
    return float(stdtrit(count - 1, (1 + confidence) / 2)) * error


def sd_interval_from_variance(interval: Interval) -> Interval:
    """The interval of a standard deviation from that of a variance; negative limits become 0."""
    parts = (interval.estimate or 0.0, interval.low, interval.high)
    estimate, low, high = (math.sqrt(max(0.0, x)) for x in parts)
    return replace(interval, estimate=estimate, low=low, high=high)


def first_differing_index(first: Sequence[Any], second: Sequence[Any]) -> int | None:
    """Index of the first record in which two series differ; None if they are equal.

    If one series ends early, the index is its length.

    >>> first_differing_index(["a", "b", "c"], ["a", "x", "c"]), first_differing_index("abc", "ab")
    (1, 2)
    >>> first_differing_index("ab", "ab") is None
    True
    """
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def median_first_differing_step(steps: Sequence[int | None], confidence: float = 0.95) -> Interval:
    """Median first step at which replicas differ from one clean twin; None (never) counts as infinite.

    Limits are order statistics, so they hold for every distribution; with too few replicas they are 0 and infinity. The function
    must not be used for the steps of all pairs, because pairs share replicas.
    """
    check_replica_count(len(steps))
    interval = median_interval([math.inf if step is None else float(step) for step in steps], confidence)
    return replace(interval, low=max(0.0, interval.low))


def check_replica_count(count: int) -> None:
    """Raise `UsageError` if there are too few replicas for an interval."""
    if count < MIN_REPLICAS:
        raise UsageError(
            f"{count} replicas are too few to measure how much replicas differ; "
            f"at least {MIN_REPLICAS} are needed, and {FEW_REPLICAS} or more are better: make {MIN_REPLICAS - count} more"
        )


def check_finite(subject: str, values: NDArray[np.float64]) -> None:
    """Raise `UsageError` naming the first replica with a value that is not finite."""
    if not np.isfinite(values).all():
        first = int(np.argwhere(~np.isfinite(values))[0][0])
        raise UsageError(
            f"{subject} clean replica {first} is not finite; a noise floor needs valid runs: inspect that run, or leave it out"
        )
