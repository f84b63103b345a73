"""Thresholds with a chosen false-alarm rate from scores of clean samples (split conformal prediction).

If clean scores are exchangeable, a further clean sample exceeds the threshold with at most the chosen probability, whatever the
distribution of scores. Source: Vovk, Gammerman, Shafer, *Algorithmic Learning in a Random World* (2005), chapter 2.

Samples that are copies of one original are not exchangeable, but originals are. A threshold from G originals with equally many
samples each has a false-alarm probability of at most ``rate + (1 - rate) / (G + 1)``. Proof: let Q be the smallest score such
that a share of ``(1 - rate) G / (G + 1)`` of the samples of G + 1 originals is at most Q. The threshold is at least Q, because
the samples of the first G originals up to the threshold already make up this share. A sample of a random one of the G + 1
originals exceeds Q with a probability of at most 1 minus this share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError

EXCHANGES = 2000
"""Number of random divisions of the originals into two parts."""


def samples_needed(rate: float) -> int:
    """The least number of clean samples for a threshold with this false-alarm rate.

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
    """The score that a new clean sample exceeds with a probability of at most ``rate``.

    Args:
        scores: Scores of clean samples, float64[n]; infinity is allowed.
        rate: Rate of false alarms, per sample.

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


def promised_rate(rate: float, originals: int) -> float:
    """Upper limit of the false-alarm probability for a sample of a new original, given the threshold's rate.

    Args:
        rate: Requested rate of false alarms.
        originals: Number of independent originals of the clean samples, which have equally many samples each.

    >>> promised_rate(0.01, 98)
    0.02
    """
    return rate + (1 - rate) / (originals + 1)


def exchanged_false_alarms(
    calibration: Sequence[NDArray[np.float64]],
    test: Sequence[NDArray[np.float64]],
    rate: float,
    confidence: float,
    seed: int = 0,
) -> tuple[int, int]:
    """Limits for the number of false alarms if the calibration and test originals are exchangeable.

    Originals of both parts are exchanged at random, `EXCHANGES` times. Each time the threshold is computed again, and the false
    alarms among the samples of the other part are counted. All samples of an original stay together, so they may be dependent.

    Args:
        calibration: Scores of the samples of each original in the calibration part, float64[n] each.
        test: Scores of the samples of each original in the test part, float64[n] each.
        rate: Requested rate of false alarms.
        confidence: Confidence between 0 and 1.
        seed: Seed of the exchanges.

    >>> both = np.random.default_rng(0).normal(size=(1999, 1))
    >>> exchanged_false_alarms(both[:999], both[999:], 0.01, 0.95)
    (3, 20)
    """
    groups = [*calibration, *test]
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    scores = np.concatenate(groups)
    order = np.argsort(-scores, kind="stable")
    scores, owner = scores[order], owner[order]
    sizes = np.array([len(group) for group in groups])
    rng, counts = np.random.default_rng(seed), np.empty(EXCHANGES, np.int64)
    for number in range(EXCHANGES):
        chosen = np.zeros(len(groups), bool)
        chosen[rng.permutation(len(groups))[: len(calibration)]] = True
        calibrated = int(sizes[chosen].sum())
        above = calibrated - _rank(calibrated, rate)  # samples of calibration that may be above the threshold
        counts[number] = _test_samples_above(scores, owner, chosen, above)
    tail = (1 - confidence) / 2
    low, high = np.quantile(counts, [tail, 1 - tail], method="inverted_cdf")
    return int(low), int(high)


def _test_samples_above(
    scores: NDArray[np.float64], owner: NDArray[np.int64], chosen: NDArray[np.bool_], above: int
) -> int:
    """Number of samples outside of the chosen groups with scores above the chosen score of rank ``above``."""
    upto = 4 * above + 100
    while True:
        is_chosen = chosen[owner[:upto]]
        places = np.flatnonzero(is_chosen)
        if len(places) > above:
            place = int(np.searchsorted(-scores[:upto], -scores[places[above]], side="left"))
            return place - int(is_chosen[:place].sum())
        upto *= 4


def _rank(count: int, rate: float) -> int:
    """Rank of the threshold among the scores in ascending order, from 1."""
    return min(count, math.ceil((count + 1) * (1 - rate) - 1e-9))
