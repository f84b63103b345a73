"""How many trials: for one share, and for strata whose variances a pilot has shown.

Sources: Leveugle et al. 2009 (DATE, sample size of a finite fault population); Neyman 1934 (allocation in proportion to weight
times deviation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv

from unsilent.statistics.bounded import Stratum, stratified
from unsilent.statistics.intervals import Interval, check_confidence, normal_quantile

MIN_TRIALS = 10
"""Trials of a stratum at least."""
_COARSENESSES = np.geomspace(1.0, 1e-3, 14)
_HALVINGS = 16
_HOPELESS = 10**15
"""More trials than anyone will run; how many more does not matter."""


def sample_size(half_width: float, confidence: float = 0.95, share: float = 0.5, population: int | None = None) -> int:
    """Trials after which a normal interval of a ``share`` has this half-width; without repeats where a population is given.

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


def expected_half_width(variance: float, coarsest: float, confidence: float) -> float:
    """Half-width to be expected, roughly, of `stratified` where its estimate has this variance.

    ``coarsest``: the most that one trial moves the estimate, the greatest ``W_h / n_h``. As if the variance came from a Poisson
    number of such steps: with hardly any variance it is the limit of no events, with much of it the normal interval.
    """
    tail = (1 - confidence) / 2
    steps = variance / coarsest**2
    low = float(gammaincinv(steps, tail)) if steps > 0 else 0.0
    return coarsest * (float(gammaincinv(steps + 1, 1 - tail)) - low) / 2


def expected_interval(pilot: Sequence[Stratum], sizes: Sequence[int], confidence: float) -> Interval:
    """The interval of so many trials of each stratum that end as those of the pilot did."""
    return stratified(
        [replace(s, counts=s.counts * (n / s.counts.sum())) for s, n in zip(pilot, sizes, strict=True)], confidence
    )


def allocate(pilot: Sequence[Stratum], half_width: float, confidence: float = 0.95) -> tuple[int, ...]:
    """About the fewest trials of each stratum for which the half-width that is foreseen is at most ``half_width``.

    ``pilot``: its trials show means and variances. Every stratum gets trials in proportion to its weight, since what it has
    not shown may be there all the same, and those that vary more by Neyman's rule.

    Raises:
        ValueError: the half-width is not above 0, or the pilot has a stratum without trials.
    """
    if not half_width > 0 or any(not s.n for s in pilot):
        raise ValueError("expected a half-width above 0 and at least one pilot trial in each stratum")
    weights = np.array([s.weight for s in pilot])
    spread = weights * np.sqrt([s.variance for s in pilot])
    empty = expected_half_width(0.0, 1.0, confidence)
    best: NDArray[np.float64] | None = None
    for coarse in _COARSENESSES * half_width / empty:
        sizes = _sizes(weights, spread, float(coarse), half_width, confidence)
        if best is None or sizes.sum() < best.sum():
            best = sizes
    assert best is not None
    result = tuple(int(n) for n in best)
    while sum(result) < _HOPELESS and (wide := expected_interval(pilot, result, confidence).half_width) > half_width:
        result = tuple(math.ceil(n * max(1.02, wide / half_width)) for n in result)
    return result


def _sizes(
    weights: NDArray[np.float64], spread: NDArray[np.float64], coarse: float, half_width: float, confidence: float
) -> NDArray[np.float64]:
    """Sizes where no trial moves the estimate by more than ``coarse``, with as much Neyman allocation as is needed."""
    base = np.maximum(weights / coarse, MIN_TRIALS)

    def sizes(scale: float) -> NDArray[np.float64]:
        return np.ceil(np.maximum(base, scale * spread))

    def wide(scale: float) -> bool:
        n = sizes(scale)
        return expected_half_width(float((spread**2 / n).sum()), float((weights / n).max()), confidence) > half_width

    if not wide(0.0) or not spread.any():
        return sizes(0.0)
    low = 0.0
    high = normal_quantile(confidence) ** 2 * float(spread.sum()) / half_width**2  # what a normal interval would need
    while wide(high):
        low, high = high, 2 * high
        if high > _HOPELESS:
            return np.full(weights.size, float(_HOPELESS))  # as coarse as this it never gets there
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if wide(middle) else (low, middle)
    return sizes(high)
