"""Intervals for the mean of outcomes between 0 and 1, also for clusters, strata and unequal weights.

A fault is scored on many samples, so its outcome is the share of samples that become wrong, a number from 0 to 1. Faults are
independent, samples are not. If all outcomes are 0 or 1, this is the interval of Clopper & Pearson (1934).

Gaffke's bound (N. Gaffke 2005, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
variable", Math. Methods Statist. 14:451; Learned-Miller & Thomas 2019, arXiv 1905.06208) adds one outcome, the worst possible,
to the observed ones and takes the quantile of their mean under uniform Dirichlet weights. The level is conjectured to hold for
every distribution on [0, 1]. This is proven for outcomes of 0 and 1; neither the searches of the second source nor ours refuted
it (docs/evidence/statistics.md has the coverage).

Strata are sampled at different rates. A trial of stratum h, which has weight W_h and n_h of all N trials, contributes ``F + (W_h
N / n_h) (x - f_h)`` with any f_h fixed before its trials and ``F = sum W_h f_h``. The mean is the stratified estimate for every
choice of f_h, and it varies least if f_h is near the mean of the stratum. So a single worst outcome, from the stratum with the
coarsest trials, covers everything that was not observed in any stratum.

Invariants: ``0 <= low <= estimate <= high <= 1``; no event still gives an upper limit above 0; no data gives estimate None and
[0, 1]; swapping right and wrong mirrors the interval of one stratum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from unsilent.statistics.dirichlet import Floats, dirichlet_mean_quantile
from unsilent.statistics.intervals import Interval, check_confidence


@dataclass(frozen=True)
class Stratum:
    """Outcomes of the trials of one stratum.

    Attributes:
        weight: Probability of the stratum under the distribution whose mean is estimated.
        values, counts: Distinct outcomes in [0, 1] and the number of trials with each outcome, float64[m].
        expected_mean: f_h above, which must be fixed before these trials are run (for example from a pilot).
    """

    weight: float
    values: Floats
    counts: Floats
    expected_mean: float = 0.0

    @classmethod
    def of(cls, outcomes: NDArray[Any] | Sequence[float], weight: float = 1.0, centre: float = 0.0) -> Self:
        """The stratum with one outcome per trial; raises ``ValueError`` for an outcome outside of [0, 1]."""
        values, counts = np.unique(np.asarray(outcomes, dtype=np.float64), return_counts=True)
        if values.size and not (values[0] >= 0 and values[-1] <= 1):
            raise ValueError(f"outcomes must lie between 0 and 1, got {values[0]} to {values[-1]}")
        return cls(weight, values, counts.astype(np.float64), centre)

    @property
    def n(self) -> int:
        """Number of trials."""
        return round(float(self.counts.sum()))

    @property
    def mean(self) -> float:
        """Mean outcome; requires at least one trial."""
        return float(self.counts @ self.values / self.counts.sum())

    @property
    def variance(self) -> float:
        """Unbiased variance of the outcomes; 0.0 for one trial."""
        return float(self.counts @ (self.values - self.mean) ** 2) / max(self.n - 1, 1)


def bounded_mean(outcomes: NDArray[Any] | Sequence[float], confidence: float = 0.95) -> Interval:
    """The interval for the mean of independent outcomes in [0, 1], float64[n].

    >>> bounded_mean([0, 0, 1, 0]).method
    'Gaffke (Clopper-Pearson)'
    """
    return stratified([Stratum.of(outcomes)], confidence)


def ratio_of_means(
    parts: NDArray[Any] | Sequence[float], wholes: NDArray[Any] | Sequence[float], most: float, confidence: float = 0.95
) -> Interval:
    """The interval for a ratio of two means over independent clusters, such as the samples of a fault.

    A share ``p`` is in the interval if it is in the interval for the mean of ``part / most + p (1 - whole / most)``. These values
    lie in [0, 1], and their mean is ``p`` if ``p`` is the ratio. The reported ``n`` counts clusters.

    Args:
        parts: Value of each cluster, float64[n], from 0 to its whole.
        wholes: Whole of each cluster, float64[n], above 0 and at most ``most``.
        most: Largest possible whole.
        confidence: Confidence between 0 and 1.

    Raises:
        ValueError: a part or a whole is out of these limits.

    >>> ratio_of_means([0, 2], [2, 2], most=2).estimate
    0.5
    """
    part, whole = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    if part.shape != whole.shape or not bool(np.all((part >= 0) & (part <= whole) & (whole > 0) & (whole <= most))):
        raise ValueError("expected parts from 0 to their wholes, and wholes above 0 and at most the greatest one")
    label = "Gaffke, ratio"
    if not part.size:
        return Interval(None, 0.0, 1.0, confidence, 0, label)

    from scipy.optimize import brentq  # slow to load

    check_confidence(confidence)
    tail = (1 - confidence) / 2

    def limit(p: float, worst: float, quantile: float) -> float:
        """A limit of the `bounded_mean` interval for a given ratio p."""
        stratum = Stratum.of(np.clip(part / most + p * (1 - whole / most), 0, 1))
        value = dirichlet_mean_quantile(*_merged_values(stratum.values, stratum.counts, worst), quantile)
        return max(value, stratum.mean) if worst else min(value, stratum.mean)

    low, high = limit(0.0, 0.0, tail), limit(1.0, 1.0, 1 - tail)
    low = brentq(lambda p: limit(p, 0.0, tail) - p, 0, 1, xtol=1e-5) if low > 0 else 0.0
    high = brentq(lambda p: limit(p, 1.0, 1 - tail) - p, 0, 1, xtol=1e-5) if high < 1 else 1.0
    estimate = float(part.sum() / whole.sum())
    return Interval(estimate, min(low, estimate), max(high, estimate), confidence, part.size, label)


def stratified(strata: Iterable[Stratum], confidence: float = 0.95) -> Interval:
    """The interval for the weighted mean ``sum W_h p_h`` of strata; weights are at least 0 and sum to 1.

    The mean of a stratum without trials may be anything from 0 to 1, so its weight is added to the upper limit and the estimate
    is ``None`` (unless its weight is 0). The reported ``n`` counts trials.
    """
    check_confidence(confidence)
    strata = [s for s in strata if s.weight != 0]
    total = math.fsum(s.weight for s in strata)
    if any(not s.weight > 0 for s in strata) or not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"weights must be at least 0 and sum to 1; their sum is {total!r}")
    known = [s for s in strata if s.n]
    label = _label(strata)
    if not known:
        return Interval(None, 0.0, 1.0, confidence, 0, label)
    seen = min(1.0, math.fsum(s.weight for s in known))
    result = _interval_of_known_strata(known, seen, confidence, label)
    if len(known) == len(strata):
        return result
    return replace(result, estimate=None, high=min(1.0, result.high + 1 - seen))


def _interval_of_known_strata(strata: Sequence[Stratum], seen: float, confidence: float, label: str) -> Interval:
    """The interval like in `stratified` for strata that all have trials, whose weights sum to ``seen``."""
    n = sum(s.n for s in strata)
    rates = [s.weight * n / s.n for s in strata]
    offset = math.fsum(s.weight * s.expected_mean for s in strata)
    values = np.concatenate(
        [offset + rate * (s.values - s.expected_mean) for rate, s in zip(rates, strata, strict=True)]
    )
    counts = np.concatenate([s.counts for s in strata])
    worst = max(offset + rate * (1 - s.expected_mean) for rate, s in zip(rates, strata, strict=True))
    best = min(offset - rate * s.expected_mean for rate, s in zip(rates, strata, strict=True))
    estimate = min(seen, math.fsum(s.weight * s.mean for s in strata))
    tail = (1 - confidence) / 2
    low = dirichlet_mean_quantile(*_merged_values(values, counts, best), tail)
    high = dirichlet_mean_quantile(*_merged_values(values, counts, worst), 1 - tail)
    return Interval(estimate, max(0.0, min(low, estimate)), min(seen, max(high, estimate)), confidence, n, label)


def _merged_values(values: Floats, counts: Floats, extra: float) -> tuple[Floats, Floats]:
    """Distinct values with their counts, after one trial of value ``extra`` was added."""
    distinct, where = np.unique(np.append(values, extra), return_inverse=True)
    return distinct, np.bincount(where, np.append(counts, 1.0)).astype(np.float64)


def _label(strata: Sequence[Stratum]) -> str:
    whole = all(bool(np.isin(s.values, (0.0, 1.0)).all()) for s in strata)
    if len(strata) == 1:
        return "Gaffke (Clopper-Pearson)" if whole else "Gaffke, clustered by fault"
    return "Gaffke, stratified" if whole else "Gaffke, stratified, clustered by fault"
