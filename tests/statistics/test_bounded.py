"""Means of outcomes between 0 and 1: against exact intervals, against random Dirichlet weights, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.statistics import (
    Stratum,
    bounded_mean,
    clopper_pearson,
    ratio_of_means,
    stratified,
)
from unsilent.statistics.dirichlet import dirichlet_mean_quantile, probability_above

SHARES = st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=1, max_size=40)


def beta_above(one, other, t):
    """P(Beta(one, other) > t) for whole numbers, as a binomial sum."""
    n = one + other - 1
    return math.fsum(math.comb(n, k) * t**k * (1 - t) ** (n - k) for k in range(one))


@pytest.mark.parametrize(("one", "other"), [(1, 1), (1, 5), (3, 2), (1, 60), (12, 40), (30, 1)])
def test_two_values_are_the_beta_distribution(one, other):
    values, counts = np.array([0.0, 1.0]), np.array([other, one], dtype=float)
    for t in (0.001, 0.02, 0.3, 0.5, 0.9, 0.999):
        assert probability_above(values, counts, t) == pytest.approx(beta_above(one, other, t), rel=2e-6, abs=1e-12)


def test_the_uniform_mean_of_two_is_uniform():
    assert probability_above(np.array([2.0, 4.0]), np.array([1.0, 1.0]), 2.5) == pytest.approx(0.75, abs=1e-9)


@pytest.mark.parametrize("q", [0.005, 0.025, 0.3, 0.5, 0.975, 0.995])
def test_quantiles_against_random_weights(q):
    values, counts = np.array([0.0, 0.1, 0.35, 0.8, 1.0]), np.array([60.0, 7.0, 3.0, 2.0, 1.0])
    draws = np.random.default_rng(3).dirichlet(counts, 200_000) @ values
    found = dirichlet_mean_quantile(values, counts, q)
    assert (draws <= found).mean() == pytest.approx(q, abs=5 * math.sqrt(q * (1 - q) / draws.size))
    assert probability_above(values, counts, found) == pytest.approx(1 - q, abs=1e-7)


@pytest.mark.parametrize("values", [[0.0, 3e-100, 6e-92], [0.0, 1e-200, 1.0], [0.0, 0.5, 1.0], [-1.0, 0.0, 1e-250]])
@pytest.mark.parametrize("scale", [1e-200, 1e-60, 1.0])
@pytest.mark.parametrize("q", [0.025, 0.5, 0.975])
def test_values_may_be_of_any_size(values, scale, q):
    """As random weights tell, in units of the greatest value: powers of small numbers are 0, and of their inverses infinite."""
    values, counts = np.array(values) * scale, np.array([3.0, 1.0, 2.0])
    span = values.max() - values.min()
    draws = np.random.default_rng(3).dirichlet(counts, 100_000) @ ((values - values.min()) / span)
    found = (dirichlet_mean_quantile(values, counts, q) - values.min()) / span
    assert (draws <= found).mean() == pytest.approx(q, abs=5 * math.sqrt(q * (1 - q) / draws.size))


@given(counts=st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_right_or_wrong_is_clopper_pearson(counts):
    events, n = counts
    found, exact = bounded_mean([1.0] * events + [0.0] * (n - events)), clopper_pearson(events, n)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-9)
    assert (found.estimate, found.n, found.method) == (exact.estimate, n, "Gaffke (Clopper-Pearson)")


@given(shares=SHARES)
def test_properties(shares):
    found, mirror = bounded_mean(shares), bounded_mean([1 - s for s in shares])
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    assert found.estimate == pytest.approx(np.mean(shares))
    assert found.low == pytest.approx(1 - mirror.high, abs=1e-7)
    assert found.high >= bounded_mean([0.0] * len(shares)).high - 1e-9
    wider = bounded_mean(shares, 0.995)
    assert wider.low <= found.low + 1e-9
    assert wider.high >= found.high - 1e-9
    assert bounded_mean(shares[::-1]) == found
    more = bounded_mean([*shares, 1.0])
    assert more.high >= found.high - 1e-9


def test_samples_of_one_fault_are_not_counted_as_trials():
    """A tenth of the faults makes every sample wrong: 64 samples each say no more than one would."""
    assert bounded_mean([0.0] * 90 + [1.0] * 10).half_width == pytest.approx(clopper_pearson(10, 100).half_width)
    spread = bounded_mean([0.1] * 100)
    assert spread.half_width < 0.5 * clopper_pearson(10, 100).half_width


def parts(*given):
    return [Stratum.of(outcomes, weight, centre) for weight, outcomes, centre in given]


def test_equal_rates_pool_to_one_sample():
    """Strata in proportion to their weights say what their trials say together."""
    a, b = [0.0] * 30, [0.0] * 8 + [1.0] * 2
    found, whole = stratified(parts((0.75, a, 0), (0.25, b, 0))), bounded_mean(a + b)
    assert (found.low, found.high) == pytest.approx((whole.low, whole.high), abs=1e-9)
    assert found.estimate == whole.estimate


def test_a_stratum_that_always_fails_is_no_doubt_with_its_own_centre():
    failing, fine = [1.0] * 100, [0.0] * 1000
    plain = stratified(parts((0.1, failing, 0), (0.9, fine, 0)))
    centred = stratified(parts((0.1, failing, 1.0), (0.9, fine, 0)))
    assert plain.estimate == centred.estimate == pytest.approx(0.1)
    assert centred.half_width < 0.5 * plain.half_width
    assert centred.high == pytest.approx(0.1 + 0.9 * clopper_pearson(0, 1100).high * 1.1, rel=0.02)


def test_without_events_the_coarsest_stratum_says_what_can_be():
    """All of p may lie in the stratum that was looked at least: its weight times the limit of 0 events."""
    found = stratified(parts((0.9, [0.0] * 3000, 0), (0.1, [0.0] * 20, 0)))
    assert found.estimate == 0
    assert found.low == 0
    assert found.high == pytest.approx(0.1 * clopper_pearson(0, 20).high, rel=0.12)


@given(groups=st.lists(st.tuples(SHARES, st.integers(1, 20), st.sampled_from([0.0, 0.1, 0.5])), min_size=1, max_size=4))
def test_stratified_properties(groups):
    total = sum(w for _, w, _ in groups)
    found = stratified(parts(*((w / total, shares, centre) for shares, w, centre in groups)))
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    assert found.estimate == pytest.approx(sum(w * np.mean(s) for s, w, _ in groups) / total)
    assert found.n == sum(len(s) for s, _, _ in groups)


def test_an_unseen_stratum_may_be_anything():
    found = stratified(parts((0.3, [], 0), (0.7, [0.0] * 100, 0)))
    assert found.estimate is None
    assert found.low == 0
    assert found.high == pytest.approx(0.3 + 0.7 * clopper_pearson(0, 100).high)
    assert stratified(parts((1.0, [], 0))).high == 1
    assert stratified(parts((0.0, [], 0), (1.0, [0, 1], 0))).estimate == 0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounded_mean([1.5]),
        lambda: bounded_mean([math.nan]),
        lambda: bounded_mean([-0.1, 0.5]),
        lambda: bounded_mean([0.5], confidence=1.0),
        lambda: stratified(parts((0.5, [0.0], 0))),
        lambda: stratified(parts((1.5, [0.0], 0), (-0.5, [0.0], 0))),
        lambda: stratified([]),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError):
        call()


def catastrophic(rng, trials):
    """Half a fault in a campaign is expected to make most samples wrong, the others none."""
    return np.where(rng.random(trials) < 0.5 / trials, rng.integers(20, 65, trials) / 64, 0.0), 0.5 / trials * 42 / 64


def both(rng, trials):
    """The same, and a fifth of the faults makes one sample of 64 wrong."""
    worst, truth = catastrophic(rng, trials)
    mild = rng.random(trials) < 0.2
    return np.where(worst > 0, worst, mild / 64), truth + (1 - 0.5 / trials) * 0.2 / 64


def wide(rng, trials):
    """A tenth of the faults makes a widely varying share wrong."""
    return np.where(rng.random(trials) < 0.1, np.round(rng.beta(0.5, 1.5, trials) * 64) / 64, 0.0), None


@pytest.mark.parametrize("draw", [catastrophic, both, wide])
@pytest.mark.parametrize("trials", [50, 200])
@pytest.mark.slow
def test_coverage_of_clusters(draw, trials):
    """Few of 400 repeats may miss: more than 31 of them has probability below 0.01 at 95 %."""
    rng = np.random.default_rng(12)
    truth = draw(rng, trials)[1] or draw(rng, 1_000_000)[0].mean()
    missed = 0
    for _ in range(400):
        found = bounded_mean(draw(rng, trials)[0])
        missed += not found.low <= truth <= found.high
    assert missed <= 31


@pytest.mark.parametrize("expected", [0.1, 1.0, 5.0])
@pytest.mark.slow
def test_coverage_of_strata_of_unequal_rates(expected):
    rng = np.random.default_rng(5)
    weights, sizes = np.array([0.6, 0.3, 0.1]), np.array([200, 100, 300])
    rates = np.array([expected / 400, expected / 200, 0.3])
    truth, missed = float(weights @ rates), 0
    for _ in range(400):
        events = rng.binomial(sizes, rates)
        strata = [
            Stratum(w, np.array([0.0, 1.0]), np.array([n - k, k], dtype=float), c)
            for w, n, k, c in zip(weights, sizes, events, (0.0, 0.0, 0.25), strict=True)
        ]
        found = stratified(strata)
        missed += not found.low <= truth <= found.high
    assert missed <= 31


@pytest.mark.parametrize("n", [5, 100, 10**4, 10**6])
@pytest.mark.parametrize("q", [0.025, 0.5, 0.975, 0.999])
def test_one_event_among_many_trials_is_told_exactly(n, q):
    """Three values, two of them almost one: so nearly a beta distribution that it must agree with it."""
    from scipy.stats import beta

    from unsilent.statistics.dirichlet import dirichlet_mean_quantile

    found = dirichlet_mean_quantile(np.array([0.0, 1e-15, 1.0]), np.array([n - 1.0, 1.0, 1.0]), q)
    assert found == pytest.approx(beta.ppf(q, 1, n), abs=1e-6 * beta.std(1, n))


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 8)).map(lambda pair: (min(pair), pair[1])), min_size=1, max_size=20
    )
)
def test_ratios_of_equal_clusters_are_means(clusters):
    parts, wholes = np.array(clusters, float).T
    found = ratio_of_means(parts, wholes, 8)
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    assert found.estimate == pytest.approx(parts.sum() / wholes.sum())
    assert found.n == len(clusters)
    equal, mean = ratio_of_means(parts, np.full(len(parts), 8.0), 8), bounded_mean(parts / 8)
    assert (equal.low, equal.high) == pytest.approx((mean.low, mean.high), abs=1e-4)


def test_impossible_ratios_are_refused():
    assert ratio_of_means([], [], 4).estimate is None
    for parts, wholes in (([1], [0]), ([2], [1]), ([-1], [1]), ([1], [5]), ([1, 1], [1])):
        with pytest.raises(ValueError, match="expected parts"):
            ratio_of_means(parts, wholes, 4)


@pytest.mark.slow
def test_coverage_of_ratios_of_clusters_of_very_different_sizes():
    """Large clusters are nearly always detected, small ones seldom: few of 400 repeats may miss."""
    rng, sizes, chances = np.random.default_rng(8), np.array([1, 2, 64]), np.array([0.3, 0.5, 0.98])
    shares = np.array([0.7, 0.2, 0.1])
    truth, missed = float((shares * sizes * chances).sum() / (shares * sizes).sum()), 0
    for _ in range(400):
        kind = rng.choice(3, 100, p=shares)
        found = ratio_of_means(rng.binomial(sizes[kind], chances[kind]), sizes[kind], 64)
        missed += not found.low <= truth <= found.high
    assert missed <= 31
