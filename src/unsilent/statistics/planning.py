"""Required numbers of trials, for one share or for strata with variances from a pilot.

Sources: Leveugle et al. 2009 (DATE, sample size of a finite fault population); Neyman 1934 (allocation in proportion to weight
times deviation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv

from unsilent.statistics.bounded import Stratum, stratified
from unsilent.statistics.intervals import Interval, check_confidence, normal_quantile

MIN_TRIALS = 10
"""Minimum number of trials of a stratum."""
_COARSENESSES = np.geomspace(1.0, 1e-3, 14)
_HALVINGS = 16
_HOPELESS = 10**15
"""Limit for numbers of trials, more than anyone will run."""


def sample_size(half_width: float, confidence: float = 0.95, share: float = 0.5, population: int | None = None) -> int:
    """Number of trials for a normal interval of a ``share`` with this half-width.

    With a ``population``, trials are drawn without replacement.

    >>> sample_size(0.01, population=8_630_000)
    9593
    """
    check_confidence(confidence)
    if not (half_width > 0 and 0 <= share <= 1):
        raise ValueError(
            f"half-width is {half_width!r}, share is {share!r}; expected a half-width above 0 and a share from 0 to 1"
        )
    needed = normal_quantile(confidence) ** 2 * share * (1 - share) / half_width**2
    if population is not None:
        needed = population / (1 + (population - 1) / needed) if needed else 0.0
    return max(1, math.ceil(round(needed, 6)))


def expected_half_width(variance: Any, coarsest: Any, confidence: Any, step: Any = None) -> Any:
    """Approximate half-width of the `stratified` interval for an estimate with this variance.

    The estimate is modelled as a sum of Poisson-like steps (a gamma distribution under resampling). The upper limit has one more
    outcome, of the stratum with the coarsest trials. Their sum is approximated by a gamma distribution with the same first three
    moments. With almost no variance this is the limit for no events, with a large variance the normal interval.

    Args:
        variance: Variance of the estimate.
        coarsest: Largest change of the estimate by one trial, the greatest ``W_h / n_h``.
        confidence: Confidence of both limits together.
        step: Typical change by one trial, the mean of ``W_h / n_h`` weighted by variance; ``None`` for ``coarsest``.
    """
    tail = (1 - confidence) / 2
    coarsest = np.asarray(coarsest, np.float64)
    variance = np.maximum(variance, 1e-12 * coarsest**2)
    step = coarsest if step is None else np.asarray(step, np.float64)
    below = variance / step - step * gammaincinv(variance / step**2, tail)
    both = variance + coarsest**2
    scale = (variance * step + coarsest**3) / both
    above = coarsest - both / scale + scale * gammaincinv(both / scale**2, 1 - tail)
    return (above + below) / 2


def expected_interval(pilot: Sequence[Stratum], sizes: Sequence[int], confidence: float) -> Interval:
    """The interval for these numbers of trials if their outcomes are distributed like the pilot's."""
    return stratified(
        [replace(s, counts=s.counts * (n / s.counts.sum())) for s, n in zip(pilot, sizes, strict=True)], confidence
    )


def allocate(
    pilot: Sequence[Stratum], half_width: float, confidence: float = 0.95, is_rough: bool = False
) -> tuple[int, ...]:
    """Approximately the fewest trials of each stratum for which the expected half-width is small enough.

    ``pilot``: strata with pilot trials, from which means and variances are taken. Every stratum gets trials at least in
    proportion to its weight, since the pilot may have missed events; strata that vary more get more by Neyman's rule.
    ``is_rough``: skip the check with the computed interval, for comparing designs; the result is then a few percent off.

    Raises:
        ValueError: the half-width is not above 0, or the pilot has a stratum without trials.
    """
    if not half_width > 0 or any(not s.n for s in pilot):
        raise ValueError("expected a half-width above 0 and at least one pilot trial in each stratum")
    weights = np.array([s.weight for s in pilot])
    spread = weights * np.sqrt([s.variance for s in pilot])
    sizes = _sizes(weights, spread, half_width, confidence)
    result = tuple(int(n) for n in sizes[sizes.sum(1).argmin()])
    if is_rough:
        return result
    while sum(result) < _HOPELESS and (wide := expected_interval(pilot, result, confidence).half_width) > half_width:
        result = tuple(math.ceil(n * max(1.02, (wide / half_width) ** 1.5)) for n in result)
    return result


def _sizes(
    weights: NDArray[np.float64], spread: NDArray[np.float64], half_width: float, confidence: float
) -> NDArray[np.float64]:
    """Candidate numbers of trials per stratum, one row per coarseness, float64[coarsenesses, strata]."""
    empty = float(expected_half_width(0.0, 1.0, confidence))
    base = np.maximum(weights / (_COARSENESSES * half_width / empty)[:, None], MIN_TRIALS)

    def sizes(scale: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.ceil(np.maximum(base, scale[:, None] * spread))

    def wide(scale: NDArray[np.float64]) -> NDArray[np.bool_]:
        rates = weights / (n := sizes(scale))
        parts = spread**2 / n
        variance = parts.sum(1)
        step = np.divide((parts * rates).sum(1), variance, out=rates.max(1), where=variance > 0)
        is_wide: NDArray[np.bool_] = expected_half_width(variance, rates.max(1), confidence, step) > half_width
        return is_wide

    low = np.zeros(len(base))
    high = np.full(len(base), normal_quantile(confidence) ** 2 * float(spread.sum()) / half_width**2)
    if not spread.any():
        return sizes(low)
    while (more := wide(high) & (high < _HOPELESS)).any():
        low, high = np.where(more, high, low), np.where(more, 2 * high, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = np.where(too := wide(middle), middle, low), np.where(too, high, middle)
    return np.where((high >= _HOPELESS)[:, None], _HOPELESS, sizes(high))


def oracle_trials(truth: Sequence[Stratum], half_width: float, confidence: float = 0.95) -> int:
    """Approximately the fewest trials of a design that knows each stratum's outcomes in advance.

    ``truth``: all outcomes of each stratum with their probabilities (or numbers) as counts. This design has one look and no
    pilot, so a campaign that stops when it is precise needs at least as many trials on average. The ratio to it is the cost of
    planning.
    """
    return sum(allocate([replace(s, expected_mean=s.mean) for s in truth], half_width, confidence))
