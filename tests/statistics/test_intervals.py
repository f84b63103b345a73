"""Intervals against independent oracles: exact binomial sums, the score equation by bisection, simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unsilent.statistics import Interval, clopper_pearson, clustered, combine, wilson

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


@pytest.mark.parametrize(("x", "n"), [(0, 10), (1, 10), (5, 10), (10, 10), (3, 100), (99, 100), (0, 1000), (2.5, 33.7)])
@pytest.mark.parametrize(("confidence", "z"), [(0.9, 1.6448536270), (0.95, 1.9599639845), (0.99, 2.5758293035)])
def test_wilson_solves_the_score_equation(x, n, confidence, z):
    p = x / n

    def inside(q):
        return z * z * q * (1 - q) / n - (p - q) ** 2

    found = wilson(x, n, confidence)
    low = 0.0 if x == 0 else bisect(inside, 0.0, p)
    high = 1.0 if x == n else bisect(inside, p + 1e-12, 1.0)
    assert found.low == pytest.approx(low, abs=1e-8)
    assert found.high == pytest.approx(high, abs=1e-8)


def test_zero_events_have_an_upper_bound():
    assert wilson(0, 1000).high == pytest.approx(0.003827, abs=1e-6)
    assert clopper_pearson(0, 1000).high == pytest.approx(1 - 0.025 ** (1 / 1000), abs=1e-12)
    assert clustered(np.zeros(1000), np.full(1000, 64)).high == wilson(0, 1000).high


@pytest.mark.parametrize("make", [wilson, clopper_pearson])
@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, confidence=CONFIDENCE)
def test_properties(make, counts, confidence):
    x, n = counts
    found = make(x, n, confidence)
    mirror = make(n - x, n, confidence)
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    assert found.low == pytest.approx(1 - mirror.high, abs=1e-9)
    assert found.high > 0
    assert found.low < 1
    wider = make(x, n, 0.995)
    assert wider.low <= found.low + 1e-12
    assert wider.high >= found.high - 1e-12
    if x < n:
        more = make(x + 1, n, confidence)
        assert more.low >= found.low
        assert more.high >= found.high
    larger = make(100 * x, 100 * n, confidence)
    assert larger.half_width < found.half_width


@settings(max_examples=60, deadline=None)
@given(
    trials=st.lists(
        st.integers(1, 50).flatmap(lambda m: st.tuples(st.integers(0, m), st.just(m))),
        min_size=1,
        max_size=40,
    ),
    method=st.sampled_from(["wilson", "clopper-pearson"]),
)
def test_clustered_properties(trials, method):
    x, m = np.array(trials).T
    found = clustered(x, m, method=method)
    mirror = clustered(m - x, m, method=method)
    assert found.estimate == pytest.approx(x.sum() / m.sum())
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    assert found.n == len(trials)
    assert found.low == pytest.approx(1 - mirror.high, abs=1e-9)
    assert found.high >= clustered(np.zeros_like(m), m, method=method).high - 1e-12
    shuffled = clustered(x[::-1], m[::-1], method=method)
    assert (found.low, found.high) == pytest.approx((shuffled.low, shuffled.high), abs=1e-9)


def test_clustered_by_hand():
    # p = 2/8; residuals x - m/4 = (-.5, -.5, .5, .5); var = 4/3 * 1 / 64 = 1/48; p (1 - p) / var = 9.
    x, m = np.array([0, 0, 1, 1]), np.array([2, 2, 2, 2])
    t7, t3 = 2.3646242516, 3.1824463053
    n_eff = 9 * (t7 / t3) ** 2
    found = clustered(x, m)
    expected, none = wilson(0.25 * n_eff, n_eff), wilson(0, 4).high
    assert found.high == pytest.approx(max(expected.high, 0.25 + 0.75 * none), abs=1e-9)
    assert found.low == pytest.approx(expected.low, abs=1e-9)
    assert found.n == 4


def test_faults_that_hit_every_sample_count_once():
    """With all-or-nothing trials the samples add nothing: the interval is that of the faults."""
    x = np.zeros(2000)
    x[:40] = 500
    found, faults = clustered(x, np.full(2000, 500)), wilson(40, 2000)
    assert found.low == pytest.approx(faults.low, rel=0.01)
    assert found.high == pytest.approx(faults.high, rel=0.01)


def test_independent_samples_count_each():
    rng = np.random.default_rng(3)
    x = rng.binomial(50, 0.3, 4000)
    found, pooled = clustered(x, np.full(4000, 50)), wilson(x.sum(), 200_000)
    assert found.low == pytest.approx(pooled.low, abs=0.0005)
    assert found.high == pytest.approx(pooled.high, abs=0.0005)


@pytest.mark.parametrize(
    ("x", "m", "n_eff"),
    [([7], [7], 1), ([3], [9], 1), ([0, 0, 0], [9, 9, 9], 3), ([5, 5, 5], [5, 5, 5], 3), ([2, 2], [6, 6], 2)],
)
def test_without_variance_trials_count_once(x, m, n_eff):
    p = sum(x) / sum(m)
    found, expected = clustered(np.array(x), np.array(m)), wilson(p * n_eff, n_eff)
    none = wilson(0, n_eff).high
    assert found.high == pytest.approx(max(expected.high, p + (1 - p) * none), abs=1e-9)
    assert found.low == pytest.approx(min(expected.low, p * (1 - none)), abs=1e-9)


def test_no_trials():
    for found in (
        wilson(0, 0),
        clopper_pearson(0, 0),
        clustered(np.array([]), np.array([])),
        clustered([0], [0]),
    ):
        assert (found.estimate, found.low, found.high, found.n) == (None, 0.0, 1.0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wilson(3, 2),
        lambda: wilson(-1, 2),
        lambda: wilson(1, math.nan),
        lambda: clopper_pearson(1, 2, confidence=1.0),
        lambda: clustered(np.array([3]), np.array([2])),
        lambda: clustered(np.array([1.0, math.nan]), np.array([2, 2])),
        lambda: clustered(np.ones((2, 2)), np.ones((2, 2))),
        lambda: clustered(np.ones(2), np.ones(3)),
        lambda: clustered(np.ones(2), np.ones(2), method="wald"),
        lambda: combine([0.5], [wilson(1, 2)]),
        lambda: combine([1.5, -0.5], [wilson(1, 2), wilson(1, 2)]),
        lambda: combine([1.0], [wilson(1, 2), wilson(1, 2)]),
        lambda: combine([1.0], [wilson(1, 2, 0.9)]),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError):
        call()


def mixed(rng, trials, samples):
    """0.5 % of faults make 90 % of samples wrong, 5 % make 1.5 % wrong, the rest nothing: p = 0.00525."""
    kind = rng.random(trials)
    return rng.binomial(samples, np.where(kind < 0.005, 0.9, np.where(kind < 0.055, 0.015, 0.0))), 0.00525


def rare(rng, trials, samples):
    """0.1 % of faults make 90 % of samples wrong, half make 1 % wrong, the rest nothing: p = 0.0059."""
    kind = rng.random(trials)
    return rng.binomial(samples, np.where(kind < 0.001, 0.9, np.where(kind < 0.501, 0.01, 0.0))), 0.0059


def all_or_nothing(rng, trials, samples):
    """2 % of faults make about 80 % of samples wrong: p = 0.016."""
    hit = rng.random(trials) < 0.02
    return rng.binomial(samples, np.where(hit, rng.beta(8, 2, trials), 0.0)), 0.016


def spread(rng, trials, samples):
    """10 % of faults make a widely varying share wrong: p = 0.02."""
    hit = rng.random(trials) < 0.1
    return rng.binomial(samples, np.where(hit, rng.beta(0.3, 1.2, trials), 0.0)), 0.02


@pytest.mark.parametrize("draw", [mixed, rare, all_or_nothing, spread])
@pytest.mark.parametrize("trials", [200, 500, 1000])
@pytest.mark.parametrize("method", ["wilson", "clopper-pearson"])
def test_coverage_on_correlated_outcomes(draw, trials, method):
    """Reached here: 0.94 to 1.00 (95 % asked), naive pooling 0.01 to 0.33. No guarantee: 0.92 asserted."""
    rng = np.random.default_rng(12)
    covered = naive = 0
    for _ in range(400):
        x, truth = draw(rng, trials, 200)
        found, pooled = clustered(x, np.full(trials, 200), method=method), wilson(x.sum(), 200 * trials)
        covered += found.low <= truth <= found.high
        naive += pooled.low <= truth <= pooled.high
    assert covered / 400 >= 0.92
    assert naive / 400 < 0.5


def test_combine_one_stratum_is_itself():
    one = wilson(3, 70)
    both = combine([1.0, 0.0], [one, wilson(0, 0)])
    assert (both.estimate, both.low, both.high) == pytest.approx((one.estimate, one.low, one.high))
    assert both.n == 70


def test_combine_by_hand():
    a = Interval(0.2, 0.1, 0.35, 0.95, 100, "")
    b = Interval(0.0, 0.0, 0.04, 0.95, 90, "")
    found = combine([0.25, 0.75], [a, b])
    assert found.estimate == pytest.approx(0.05)
    assert found.low == pytest.approx(0.05 - 0.025)
    assert found.high == pytest.approx(0.05 + math.hypot(0.25 * 0.15, 0.75 * 0.04))
    assert found.n == 190


def test_combine_with_an_unseen_stratum():
    found = combine([0.9, 0.1], [wilson(0, 1000), wilson(0, 0)])
    assert found.estimate is None
    assert found.low == 0
    assert found.high == pytest.approx(0.9 * wilson(0, 1000).high + 0.1)


def test_combine_zero_events_keeps_a_bound_and_covers():
    """A rare stratum holds all the probability: 95 % asked, the strata sampled equally."""
    rng = np.random.default_rng(5)
    weights, truth = [0.02, 0.48, 0.5], [0.3, 0.0, 0.001]
    p = sum(w * t for w, t in zip(weights, truth, strict=True))
    covered = 0
    for _ in range(500):
        found = combine(weights, [wilson(rng.binomial(300, t), 300) for t in truth])
        covered += found.low <= p <= found.high
    assert covered / 500 >= 0.93
    assert combine(weights, [wilson(0, 300)] * 3).high > 0.5 * wilson(0, 300).high
