"""Thresholds with a chosen rate of false alarms, against simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.errors import UsageError
from unsilent.statistics.conformal import conformal_threshold, expected_false_alarms, samples_needed


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


@pytest.mark.parametrize(("calibrated", "rate"), [(199, 0.05), (999, 0.01), (500, 0.1)])
def test_false_alarms_lie_within_their_limits_as_often_as_promised(calibrated, rate):
    rng = np.random.default_rng(3)
    low, high = expected_false_alarms(calibrated, rate, 400, 0.9)
    inside, total = 0, 0
    for _ in range(1000):
        threshold = conformal_threshold(rng.standard_cauchy(calibrated), rate)
        alarms = int((rng.standard_cauchy(400) > threshold).sum())
        inside += low <= alarms <= high
        total += alarms
    assert inside >= 860  # 900 expected at least, 9.5 of them a standard deviation
    assert total / 400_000 <= rate * 1.05


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
