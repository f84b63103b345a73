"""Comparison of two estimates: difference and ratio, paired or not, and corrections for many comparisons.

Sources: Zou & Donner 2008, Statistics in Medicine 27:1693 (limits of a difference from those of its parts); Donner & Zou 2012,
Statistical Methods in Medical Research 21:347 (of a ratio); Holm 1979; Bonferroni.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.statistics.bounded import Stratum, stratified
from unsilent.statistics.intervals import Interval, clopper_pearson

_FINEST, _LOG_STEP = 1e-9, 1e-6


def difference(first: Interval, second: Interval) -> Interval:
    """The interval for ``first - second`` of independent estimates at the same confidence.

    Limits of a difference of shares lie in [-1, 1]; ``n`` is the smaller of the two sample sizes.

    >>> from unsilent.statistics import clopper_pearson
    >>> round(difference(clopper_pearson(56, 70), clopper_pearson(48, 80)).low, 4)
    0.0439
    """
    _alike(first, second)
    low = _limit_of_difference(first, second, -1, first.low, second.high)
    high = _limit_of_difference(first, second, 1, first.high, second.low)
    estimate = None if first.estimate is None or second.estimate is None else first.estimate - second.estimate
    return Interval(estimate, low, high, first.confidence, min(first.n, second.n), "difference (Zou & Donner)")


Counts = tuple[int, int]
"""Number of events and number of trials."""


def joint_differences(pairs: Sequence[tuple[Counts, Counts]], confidence: float = 0.95) -> list[Interval]:
    """The difference of each pair of shares, with limits that hold for all pairs together (Bonferroni)."""
    alone = 1 - (1 - confidence) / max(len(pairs), 1)
    result = [difference(clopper_pearson(*first, alone), clopper_pearson(*second, alone)) for first, second in pairs]
    return [replace(d, confidence=confidence, method=f"{d.method}, joint over {len(pairs)}") for d in result]


def _limit_of_difference(
    first: Interval, second: Interval, sign: int, first_limit: float, second_limit: float
) -> float:
    """One limit of the difference of two rates, from their intervals and estimates."""
    if first.estimate is None or second.estimate is None:
        return first_limit - second_limit
    return (
        first.estimate
        - second.estimate
        + sign * math.hypot(first_limit - first.estimate, second_limit - second.estimate)
    )


def ratio(first: Interval, second: Interval) -> Interval:
    """The interval for ``first / second`` of independent estimates at the same confidence.

    The limits lie between 0 and infinity; the estimate is None if ``second`` is 0.
    """
    _alike(first, second)
    n, label = min(first.n, second.n), "ratio (Donner & Zou)"
    if first.estimate is None or second.estimate is None:
        high = first.high / second.low if second.low > 0 else math.inf
        return Interval(None, first.low / second.high, high, first.confidence, n, label)
    p, q = first.estimate, second.estimate
    return Interval(
        estimate=p / q if q > 0 else None,
        low=max(0.0, _quotient(p, q, first.low, second.high, -1)),
        high=_quotient(p, q, first.high, second.low, 1),
        confidence=first.confidence,
        n=n,
        method=label,
    )


def _quotient(p: float, q: float, p_limit: float, q_limit: float, sign: int) -> float:
    """One limit of the ratio of two rates: the ratio ``x`` at which a limit of ``p - x q`` is 0.

    A root of ``x^2 t (2q - t) - 2 x p q + m (2p - m)``; m and t are limits of p and q.
    """
    a, c = q_limit * (2 * q - q_limit), p_limit * (2 * p - p_limit)
    root = math.sqrt(max(0.0, (p * q) ** 2 - a * c))
    if sign < 0:
        return c / (p * q + root) if p * q + root > 0 else 0.0
    if q_limit <= 0:
        return math.inf
    return (p * q + root) / a if a > 0 else math.inf


def paired(differences: NDArray[Any] | Sequence[float], confidence: float = 0.95) -> Interval:
    """The interval for the mean of paired outcome differences, each from -1 to 1, float64[n]."""
    return paired_strata([(1.0, differences)], confidence)


def paired_strata(strata: Iterable[tuple[float, NDArray[Any] | Sequence[float]]], confidence: float = 0.95) -> Interval:
    """The interval for the weighted mean ``sum W_h d_h`` of paired differences in strata; the weights sum to 1.

    Most differences are 0, so the expected mean of every stratum is 0 (`Stratum.expected_mean`).
    """
    seen = [(weight, np.asarray(d, dtype=np.float64)) for weight, d in strata if weight]
    shifted = stratified([Stratum.of((d + 1) / 2, weight, centre=0.5) for weight, d in seen], confidence)
    low, high, method = 2 * shifted.low - 1, 2 * shifted.high - 1, "paired difference (Gaffke)"
    if shifted.estimate is None:
        return replace(shifted, low=low, high=high, method=method)
    estimate = math.fsum(weight * float(d.mean()) for weight, d in seen)  # not shifted back: 0 stays 0
    return replace(shifted, estimate=estimate, low=min(low, estimate), high=max(high, estimate), method=method)


def p_value(interval_at: Callable[[float], Interval]) -> float:
    """The smallest error level, at least 1e-9, at which the interval excludes 0; 1 if none does."""

    def outside(log_level: float) -> float:
        """Distance of 0 from the interval at an error level; negative inside."""
        result = interval_at(1 - math.exp(log_level))
        return max(result.low, -result.high)

    from scipy.optimize import brentq  # slow to load

    least, most = math.log(_FINEST), math.log1p(-_FINEST)
    if outside(most) <= 0:
        return 1.0
    if outside(least) > 0:
        return _FINEST
    return min(1.0, math.exp(brentq(outside, least, most, xtol=_LOG_STEP)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p values, which control the family-wise error rate under any dependence."""
    order = np.argsort(p_values)
    adjusted, worst = [0.0] * len(order), 0.0
    for rank, i in enumerate(order.tolist()):
        worst = max(worst, min(1.0, p_values[i] * (len(order) - rank)))
        adjusted[i] = worst
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values that control the false discovery rate under positive dependence.

    Source: Benjamini & Hochberg 1995, J. R. Statist. Soc. B 57:289.
    """
    order = np.argsort(p_values)
    adjusted, best = [0.0] * len(order), 1.0
    for i, rank in zip(order[::-1].tolist(), range(len(order), 0, -1), strict=True):
        best = min(best, p_values[i] * len(order) / rank)
        adjusted[i] = best
    return adjusted


def _alike(first: Interval, second: Interval) -> None:
    if not math.isclose(first.confidence, second.confidence):
        raise ValueError(f"intervals at confidence {first.confidence} and {second.confidence} cannot be compared")
