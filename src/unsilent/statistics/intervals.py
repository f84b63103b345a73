"""Confidence intervals for the probability of an incorrect output: plain, clustered by fault, and stratified.

Sources: Wilson 1927 (score interval); Clopper & Pearson 1934; Korn & Graubard 1998, Survey Methodology
24:193 (proportions with clustered data, few events); Zou & Donner 2008, Statistics in Medicine 27:1693
(MOVER). Quantiles are SciPy's; ``scipy.special`` is used because it loads ten times faster than
``scipy.stats`` and is what that calls.

Invariants: never a Wald interval; ``0 <= low <= estimate <= high <= 1``; zero events still give an upper
bound above 0; no data gives estimate None and [0, 1]; swapping right and wrong mirrors the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

Method = Literal["wilson", "clopper-pearson"]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with two-sided limits; ``n`` counts independent trials; None where n is 0."""

    estimate: float | None
    low: float
    high: float
    confidence: float
    n: int
    method: str

    @property
    def half_width(self) -> float:
        """Half the distance between the limits: what a requested precision is compared with."""
        return (self.high - self.low) / 2


def wilson(events: float, n: float, confidence: float = 0.95) -> Interval:
    """Score interval: all p with ``|events/n - p| <= z sqrt(p (1 - p) / n)``; both arguments may be real.

    >>> round(wilson(0, 1000).high, 4)
    0.0038
    """
    events = _checked(events, n, confidence)
    if n == 0:
        return _no_data(confidence, "Wilson")
    z2 = _z(confidence) ** 2
    centre = (events + z2 / 2) / (n + z2)
    spread = math.sqrt(z2 * (events * (n - events) / n + z2 / 4)) / (n + z2)
    # At the ends the formula gives exactly 0 and 1, up to rounding.
    low = 0.0 if events == 0 else centre - spread
    high = 1.0 if events == n else centre + spread
    return _interval(events / n, low, high, confidence, int(n), "Wilson")


def clopper_pearson(events: float, n: float, confidence: float = 0.95) -> Interval:
    """Interval by inverting both binomial tails: covers at least as asked; both arguments may be real."""
    events = _checked(events, n, confidence)
    if n == 0:
        return _no_data(confidence, "Clopper-Pearson")
    tail = (1 - confidence) / 2
    low = 0.0 if events == 0 else float(betaincinv(events, n - events + 1, tail))
    high = 1.0 if events == n else float(betaincinv(events + 1, n - events, 1 - tail))
    return _interval(events / n, low, high, confidence, int(n), "Clopper-Pearson")


def clustered(
    incorrect: NDArray[Any], sizes: NDArray[Any], confidence: float = 0.95, method: Method = "wilson"
) -> Interval:
    """Probability that a unit is wrong, where trial i had ``incorrect[i]`` of ``sizes[i]`` units wrong.

    One fault is scored on many samples, so samples are not independent; faults are. The ratio ``p = sum x /
    sum m`` gets its linearised between-trial variance, which becomes an effective sample size ``p (1 - p) /
    var`` for Wilson or Clopper-Pearson (Korn & Graubard), reduced by their degrees-of-freedom factor
    ``(t_{M-1} / t_{k-1})^2`` (M units, k trials) and never above M. Without variance to go by (p is 0 or 1,
    or one trial) it is the number of trials. The reported ``n`` is the number of trials (with at least one
    unit).

    One guard is added, because a few mild trials make that variance look small: k trials cannot rule out a
    kind of fault that makes every sample wrong and was not drawn. With u the upper limit of 0 events in k
    trials, the upper limit is at least ``p + (1 - p) u`` and (mirror image) the lower one at most ``p (1 -
    u)``. Without it one wrong sample in one trial would give a *lower* upper limit than none.

    Coverage of the Wilson kind, 95 % asked, simulated (mixtures of harmless, mild and catastrophic faults,
    100 to 2000 trials of 200 samples, p from 0.0004 to 0.04; 1000 repeats of each of 195 settings): median
    0.97, lowest 0.90 (where catastrophic faults are expected less than once). Without the guard the lowest
    was 0.21. It is not a guarantee.
    """
    if method not in _METHODS:
        raise ValueError(f"method {method!r} is not one of {', '.join(_METHODS)}")
    base = _METHODS[method]
    x, m = _trials(incorrect, sizes)
    k, units = m.size, float(m.sum())
    none = base(0, k, confidence)
    label = f"{none.method}, clustered by fault"
    if k == 0:
        return replace(none, method=label)
    p = float(x.sum()) / units
    n_eff = _effective(x, m, p, confidence)
    found = base(p * n_eff, n_eff, confidence)
    low, high = min(found.low, p * (1 - none.high)), max(found.high, p + (1 - p) * none.high)
    return _interval(p, low, high, confidence, k, label)


def combine(weights: Sequence[float], intervals: Sequence[Interval], confidence: float = 0.95) -> Interval:
    """Stratified sum ``p = sum W_h p_h`` with MOVER limits: ``low = p - sqrt(sum (W_h (p_h - l_h))^2)``.

    The upper limit likewise. Each stratum brings its own limits, so strata without events keep an honest
    upper bound. Weights are not negative and sum to 1. A stratum without trials may be anything from 0 to
    1: its whole weight is added to the upper limit and the estimate is None (unless its weight is 0).
    """
    if len(weights) != len(intervals):
        raise ValueError(f"{len(weights)} weights for {len(intervals)} intervals")
    if any(not w >= 0 for w in weights) or not math.isclose(math.fsum(weights), 1.0, abs_tol=1e-6):
        raise ValueError(f"weights must be at least 0 and sum to 1; their sum is {math.fsum(weights)!r}")
    pairs = [(w, i) for w, i in zip(weights, intervals, strict=True) if w > 0]
    if any(not math.isclose(i.confidence, confidence) for _, i in pairs):
        raise ValueError(f"intervals at another confidence than {confidence} cannot be combined")
    known = [(w, i, i.estimate) for w, i in pairs if i.estimate is not None]
    missing = math.fsum(w for w, i in pairs if i.estimate is None)
    p = math.fsum(w * e for w, _, e in known)
    below = math.sqrt(math.fsum((w * (e - i.low)) ** 2 for w, i, e in known))
    above = math.sqrt(math.fsum((w * (i.high - e)) ** 2 for w, i, e in known))
    n = sum(i.n for _, i in pairs)
    found = _interval(min(p, 1.0), p - below, p + above + missing, confidence, n, "stratified (MOVER)")
    return found if missing == 0 else replace(found, estimate=None)


_METHODS: dict[str, Callable[[float, float, float], Interval]] = {
    "wilson": wilson,
    "clopper-pearson": clopper_pearson,
}


def _effective(x: NDArray[np.float64], m: NDArray[np.float64], p: float, confidence: float) -> float:
    """Korn & Graubard's effective sample size of trials with ``x`` of ``m`` units wrong."""
    k, units = m.size, float(m.sum())
    if k < 2:
        return float(k)
    residual = x - p * m
    variance = k / (k - 1) * float(residual @ residual) / units**2
    # Rounding leaves about 1e-16 of m^2 where every trial has the same share wrong.
    if variance <= 1e-24 or not 0 < p < 1:
        return float(k)
    tail = (1 + confidence) / 2
    freedom = stdtrit(max(units - 1, 1.0), tail) / stdtrit(k - 1.0, tail)
    return min(p * (1 - p) / variance * float(freedom) ** 2, units)


def _trials(incorrect: NDArray[Any], sizes: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, m = np.asarray(incorrect, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    if x.ndim != 1 or x.shape != m.shape:
        raise ValueError(f"incorrect and sizes must be equally long vectors, got {x.shape} and {m.shape}")
    if not bool(np.all((x >= 0) & (x <= m) & np.isfinite(m))):
        raise ValueError("every trial needs 0 <= incorrect <= size")
    some = m > 0
    return x[some], m[some]


def _checked(events: float, n: float, confidence: float) -> float:
    """The events, cut to [0, n] where they leave it by rounding alone."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}")
    slack = 1e-9 * max(n, 1.0)
    if not (math.isfinite(n) and n >= 0 and -slack <= events <= n + slack):
        raise ValueError(f"need 0 <= events <= n, got events = {events!r}, n = {n!r}")
    return min(max(float(events), 0.0), float(n))


def _interval(p: float, low: float, high: float, confidence: float, n: int, method: str) -> Interval:
    """Limits cut to [0, 1] and, against rounding, never inside the estimate."""
    return Interval(p, max(0.0, min(low, p)), min(1.0, max(high, p)), confidence, n, method)


def _no_data(confidence: float, method: str) -> Interval:
    return Interval(None, 0.0, 1.0, confidence, 0, method)


def _z(confidence: float) -> float:
    return float(ndtri((1 + confidence) / 2))
