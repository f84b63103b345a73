"""Intervals against an independent oracle: exact binomial sums."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from unsilent.statistics import clopper_pearson
from unsilent.statistics.intervals import median_interval

COUNTS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
CONFIDENCE = st.sampled_from([0.8, 0.9, 0.95, 0.99])


def bisect(f, low, high):
    """Where the decreasing-then-negative ``f`` changes sign: f(low) and f(high) have opposite signs."""
    start = f(low) > 0
    for _ in range(100):
        middle = (low + high) / 2
        if (f(middle) > 0) == start:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def at_most(x, n, p):
    """P(X <= x) for a binomial, by the exact sum."""
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(x + 1))


@pytest.mark.parametrize(("x", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (3, 100), (99, 100), (0, 250), (17, 60)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_clopper_pearson_inverts_the_exact_tails(x, n, confidence):
    tail = (1 - confidence) / 2
    low = 0.0 if x == 0 else bisect(lambda p: tail - (1 - at_most(x - 1, n, p)), 0.0, 1.0)
    high = 1.0 if x == n else bisect(lambda p: at_most(x, n, p) - tail, 0.0, 1.0)
    found = clopper_pearson(x, n, confidence)
    assert found.low == pytest.approx(low, abs=1e-9)
    assert found.high == pytest.approx(high, abs=1e-9)
    assert (found.estimate, found.n, found.confidence) == (x / n, n, confidence)


def test_zero_events_have_an_upper_bound():
    assert clopper_pearson(0, 1000).high == pytest.approx(1 - 0.025 ** (1 / 1000), abs=1e-12)


@given(counts=COUNTS, confidence=CONFIDENCE)
def test_properties(counts, confidence):
    x, n = counts
    found = clopper_pearson(x, n, confidence)
    mirror = clopper_pearson(n - x, n, confidence)
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    assert found.low == pytest.approx(1 - mirror.high, abs=1e-9)
    assert found.high > 0
    assert found.low < 1
    wider = clopper_pearson(x, n, 0.995)
    assert wider.low <= found.low + 1e-12
    assert wider.high >= found.high - 1e-12
    if x < n:
        more = clopper_pearson(x + 1, n, confidence)
        assert more.low >= found.low
        assert more.high >= found.high
    larger = clopper_pearson(100 * x, 100 * n, confidence)
    assert larger.half_width < found.half_width


def test_one_trial_has_limits():
    assert clopper_pearson(0, 1).high == pytest.approx(0.975)
    assert clopper_pearson(1, 1).low == pytest.approx(0.025)


def test_no_trials():
    found = clopper_pearson(0, 0)
    assert (found.estimate, found.low, found.high, found.n) == (None, 0.0, 1.0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: clopper_pearson(3, 2),
        lambda: clopper_pearson(-1, 2),
        lambda: clopper_pearson(1, math.nan),
        lambda: clopper_pearson(1, 2, confidence=1.0),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError):
        call()


@pytest.mark.parametrize("n", [1, 5, 6, 17, 60, 301])
def test_limits_of_a_median_are_the_innermost_order_statistics_that_cover(n):
    """Between the k-th smallest and the k-th largest value lies the median unless fewer than k of n fair coins show one side."""
    values = np.random.default_rng(n).permutation(n).astype(float)
    interval = median_interval(values)
    missed = [2 * float(binom.cdf(k - 1, n, 0.5)) for k in range(1, n // 2 + 1)]
    k = sum(chance <= 0.05 for chance in missed)
    expected = (k - 1, n - k) if k else (-np.inf, np.inf)
    assert (interval.low, interval.high) == expected
    assert (interval.estimate, interval.n) == ((n - 1) / 2, n)
