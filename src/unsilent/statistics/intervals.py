"""Confidence intervals for a share of events (Clopper & Pearson 1934) and for a median.

Quantiles come from ``scipy.special``, which loads ten times faster than ``scipy.stats`` and is what ``scipy.stats`` calls.

Invariants: never a Wald interval; ``0 <= low <= estimate <= high <= 1``; zero events still give an upper
bound above 0; no data gives estimate None and [0, 1]; swapping right and wrong mirrors the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv, ndtri

from unsilent.basics.interval import Interval as Interval


def clopper_pearson(events: float, n: float, confidence: float = 0.95) -> Interval:
    """The Clopper-Pearson interval for a share of events; ``events`` and ``n`` may be real numbers."""
    events = _checked_events(events, n, confidence)
    if n == 0:
        return Interval(None, 0.0, 1.0, confidence, 0, "Clopper-Pearson")
    tail, share = (1 - confidence) / 2, events / n
    low = 0.0 if events == 0 else float(betaincinv(events, n - events + 1, tail))
    high = 1.0 if events == n else float(betaincinv(events + 1, n - events, 1 - tail))
    # Rounding must not put the estimate outside of the limits.
    return Interval(share, min(low, share), max(high, share), confidence, int(n), "Clopper-Pearson")


def median_interval(values: Sequence[float] | NDArray[np.float64], confidence: float = 0.95) -> Interval:
    """The interval for the median of independent values; a limit is infinite if there are too few values.

    The limits hold for every distribution.
    """
    check_confidence(confidence)
    x = np.sort(np.asarray(values, np.float64))
    n, k = len(x), np.arange(len(x) // 2 + 1)
    below = betainc(n - k, k + 1, 0.5)  # probability of k heads or fewer among n fair coins
    outside = int((2 * below <= (1 - confidence) * (1 + 1e-12)).sum()) - 1
    low, high = (-math.inf, math.inf) if outside < 0 else (float(x[outside]), float(x[-1 - outside]))
    middle = (float(x[(n - 1) // 2]) + float(x[n // 2])) / 2
    return Interval(middle, low, high, confidence, n, "order statistics")


def check_confidence(confidence: float) -> None:
    """Raise ``ValueError`` unless the value is a valid confidence level."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}")


def normal_quantile(confidence: float) -> float:
    """The normal quantile z of a two-sided interval with this confidence."""
    return float(ndtri((1 + confidence) / 2))


def _checked_events(events: float, n: float, confidence: float) -> float:
    """The number of events, clipped to [0, n] against rounding errors."""
    check_confidence(confidence)
    slack = 1e-9 * max(n, 1.0)
    if not (math.isfinite(n) and n >= 0 and -slack <= events <= n + slack):
        raise ValueError(f"need 0 <= events <= n, got events = {events!r}, n = {n!r}")
    return min(max(float(events), 0.0), float(n))
