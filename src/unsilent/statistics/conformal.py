"""Thresholds with a chosen rate of false alarms, from scores of clean samples alone (split conformal prediction).

If clean scores are exchangeable, a further clean sample exceeds the threshold with at most the chosen probability, whatever the
distribution of scores. Source: Vovk, Gammerman, Shafer, *Algorithmic Learning in a Random World* (2005), chapter 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import betabinom

from unsilent.errors import UsageError


def samples_needed(rate: float) -> int:
    """Clean samples from which on a threshold can have this rate of false alarms.

    >>> samples_needed(0.01)
    99

    Raises:
        UsageError: the rate is not between 0 and 1.
    """
    _check_rate(rate)
    return math.ceil(1 / rate - 1 - 1e-9)


def _check_rate(rate: float) -> None:
    if not isinstance(rate, (int, float)) or not 0 < rate < 1:
        raise UsageError(
            f"the rate of false alarms is {rate!r}; expected a share of samples between 0 and 1, like 0.01"
        )


def conformal_threshold(scores: Sequence[float] | NDArray[np.float64], rate: float) -> float:
    """The score that a further clean sample exceeds with a probability of at most ``rate``.

    Args:
        scores: Of clean samples, float64[n]; infinity is allowed.
        rate: Of false alarms, per sample.

    Raises:
        UsageError: there are fewer than `samples_needed`, a score is NaN, or the rate is not between 0 and 1.

    >>> conformal_threshold(range(1, 100), 0.01)
    99.0
    """
    values = np.sort(np.asarray(scores, np.float64))
    _check_rate(rate)
    if np.isnan(values).any():
        raise UsageError("a score of a clean sample is NaN; give clean samples whose activations are finite")
    if len(values) < samples_needed(rate):
        raise UsageError(
            f"there are {len(values):,} clean samples for a rate of {rate:g}; expected {samples_needed(rate):,} or more: give "
            "more samples, or choose a higher rate"
        )
    return float(values[_rank(len(values), rate) - 1])


def expected_false_alarms(calibrated: int, rate: float, tested: int, confidence: float) -> tuple[int, int]:
    """The limits between which the number of false alarms lies with this probability: a beta-binomial distribution.

    Args:
        calibrated: Clean samples of which the threshold was taken.
        rate: Asked for.
        tested: Further clean samples.
        confidence: Between 0 and 1.

    >>> expected_false_alarms(999, 0.01, 1000, 0.95)
    (3, 20)
    """
    above = calibrated + 1 - _rank(calibrated, rate)
    distribution = betabinom(tested, above, calibrated + 1 - above)
    tail = (1 - confidence) / 2
    return int(distribution.ppf(tail)), int(distribution.ppf(1 - tail))


def _rank(count: int, rate: float) -> int:
    """Which of the scores in ascending order is the threshold, from 1."""
    return min(count, math.ceil((count + 1) * (1 - rate) - 1e-9))
