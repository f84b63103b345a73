"""Thresholds with a chosen rate of false alarms, against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import betabinom

from conftest import few
from unsilent.basics.errors import UsageError
from unsilent.statistics.conformal import (
    EXCHANGES,
    conformal_threshold,
    exchanged_false_alarms,
    promised_rate,
    samples_needed,
)


@given(st.integers(1, 300), st.floats(0.004, 0.9), st.integers(0, 2**32))
def test_the_threshold_is_the_least_score_that_keeps_the_rate(count, rate, seed):
    scores = np.random.default_rng(seed).permutation(count).astype(float)
    if count < samples_needed(rate):
        with pytest.raises(UsageError, match="expected .* or more"):
            conformal_threshold(scores, rate)
        return
    threshold = conformal_threshold(scores, rate)
    # A further sample is above it with (scores above + 1) / (n + 1), the rank of a uniform place among n + 1.
    assert ((scores > threshold).sum() + 1) / (count + 1) <= rate + 1e-9
    lower = scores[scores < threshold]
    if len(lower):
        assert ((scores > lower.max()).sum() + 1) / (count + 1) > rate - 1e-9


def slow_exchange(calibration, test, rate, seed):
    """Numbers of false alarms with originals exchanged, by a loop over samples."""
    groups, rng, result = [*calibration, *test], np.random.default_rng(seed), []
    for _ in range(EXCHANGES):
        order = rng.permutation(len(groups))
        mine = [value for place in order[: len(calibration)] for value in groups[place]]
        threshold = conformal_threshold(mine, rate)
        result.append(sum(value > threshold for place in order[len(calibration) :] for value in groups[place]))
    return sorted(result)


@pytest.mark.parametrize("decimals", [9, 0])  # with ties
def test_limits_of_false_alarms_are_those_of_exchanged_originals(decimals):
    rng = np.random.default_rng(5)
    groups = [rng.normal(rng.normal(), 0.5, rng.integers(1, 9)).round(decimals) for _ in range(50)]
    counts = slow_exchange(groups[:20], groups[20:], 0.1, 7)
    low, high = exchanged_false_alarms(groups[:20], groups[20:], 0.1, 0.9, seed=7)
    assert np.mean(np.array(counts) <= low) >= 0.05 > np.mean(np.array(counts) < low)
    assert np.mean(np.array(counts) <= high) >= 0.95 > np.mean(np.array(counts) < high)


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "runs"), few([(1, 200), (10, 200), (10, 60)], (10, 60), several=True))
def test_false_alarms_lie_within_their_limits_as_often_as_promised(copies, runs):
    """Also with copies that are nearly alike, for which limits of independent samples are far too narrow."""
    rng = np.random.default_rng(3)
    inside, narrow, total = 0, 0, 0
    for _ in range(runs):
        groups = rng.standard_cauchy((200, 1)) + 0.1 * rng.normal(size=(200, copies))
        threshold = conformal_threshold(groups[:100].ravel(), 0.05)
        alarms = int((groups[100:] > threshold).sum())
        low, high = exchanged_false_alarms(groups[:100], groups[100:], 0.05, 0.9)
        inside += low <= alarms <= high
        above = 100 * copies + 1 - math.ceil((100 * copies + 1) * 0.95)
        law = betabinom(100 * copies, above, 100 * copies + 1 - above)
        narrow += law.ppf(0.05) <= alarms <= law.ppf(0.95)
        total += alarms
    assert inside >= 0.9 * runs - 4 * np.sqrt(0.09 * runs)
    assert narrow >= 0.83 * runs if copies == 1 else narrow < 0.6 * runs
    assert total / (runs * 100 * copies) <= promised_rate(0.05, 100)


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.02, 0.9), st.integers(0, 2**32))
def test_the_promised_rate_holds_for_any_scores(copies, originals, rate, seed):
    """Each original in turn is the further one: the mean over all of them is the probability of a false alarm."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, rng.integers(1, 50), (originals + 1, 1)) + rng.integers(0, 3, (originals + 1, copies))
    if originals * copies < samples_needed(rate):
        return
    alarms = [
        (groups[place] > conformal_threshold(np.delete(groups, place, 0).ravel(), rate)).mean()
        for place in range(originals + 1)
    ]
    assert np.mean(alarms) <= promised_rate(rate, originals) + 1e-9


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(UsageError, match="NaN"):
        conformal_threshold([1.0, float("nan")], 0.5)
    with pytest.raises(UsageError, match="between 0 and 1"):
        conformal_threshold([1.0], 1.5)
    with pytest.raises(UsageError, match="98 clean samples for a rate of 0.01; expected 99 or more"):
        conformal_threshold(np.zeros(98), 0.01)
    assert conformal_threshold([*range(98), np.inf], 0.01) == np.inf


@pytest.mark.parametrize("rate", [0, 1, -0.1, float("nan"), "1%"])
def test_a_rate_is_a_share(rate):
    with pytest.raises(UsageError, match="expected a share of samples between 0 and 1"):
        samples_needed(rate)
