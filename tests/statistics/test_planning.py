"""Sizes: Leveugle's published figures, allocations that reach what they promise, looks that keep the level, comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import poisson

from unsilent.statistics import Interval, Stratum, bounded_mean, clopper_pearson
from unsilent.statistics.comparing import difference, holm, joint_differences, p_value, paired, ratio
from unsilent.statistics.interim import confidence_at, error_share, size_at
from unsilent.statistics.planning import allocate, expected_half_width, sample_size


@pytest.mark.parametrize(
    ("half_width", "confidence", "published"), [(0.05, 0.95, 385), (0.01, 0.95, 9594), (0.01, 0.99, 16558)]
)
def test_sample_size_of_a_finite_population(half_width, confidence, published):
    """8.63 M single-bit faults (Leveugle's formula, worst case p = 0.5)."""
    assert sample_size(half_width, confidence, population=8_630_000) == pytest.approx(published, rel=2e-4)


def test_sample_size_falls_with_the_share_and_never_exceeds_the_population():
    assert sample_size(0.001, share=0.01) < sample_size(0.001, share=0.5)
    assert sample_size(1e-6, population=1000) == 1000
    assert sample_size(0.01, share=0.0) == 1
    for bad in ((0.0, 0.5), (0.1, 1.5)):
        with pytest.raises(ValueError):
            sample_size(bad[0], share=bad[1])


@pytest.mark.parametrize("events", [0, 1, 4, 30])
def test_expected_half_width_is_that_of_a_poisson_count(events):
    n = 10_000
    exact = clopper_pearson(events, n)
    assert expected_half_width(events / n**2, 1 / n, 0.95) == pytest.approx(exact.half_width, rel=0.01)
    assert poisson.cdf(events, n * exact.high) == pytest.approx(0.025, abs=1e-3)


def pilot(*rows):
    return [Stratum(w, np.array([0.0, 1.0]), np.array([n - k, float(k)]), k / n) for w, n, k in rows]


@given(
    rates=st.lists(st.sampled_from([0, 0, 1, 5, 20]), min_size=2, max_size=6),
    half_width=st.sampled_from([0.002, 0.01, 0.05]),
)
def test_allocation_reaches_what_it_promises(rates, half_width):
    """Outcomes exactly as the pilot's give at most that half-width, up to whole numbers of events."""
    strata = pilot(*((1 / len(rates), 40, k) for k in rates))
    sizes = allocate(strata, half_width)
    assert min(sizes) >= 10
    values, weights = np.array([0.0, 1.0]), [s.weight for s in strata]
    variance = sum(w**2 * s.variance / n for w, s, n in zip(weights, strata, sizes, strict=True))
    coarsest = max(w / n for w, n in zip(weights, sizes, strict=True))
    assert expected_half_width(variance, coarsest, 0.95) <= half_width * 1.0001
    assert values.size == 2


def test_allocation_is_neymans_where_everything_varies():
    strata = pilot((0.5, 1000, 500), (0.5, 1000, 10))
    a, b = allocate(strata, 0.0003)
    assert a / b == pytest.approx(strata[0].variance ** 0.5 / strata[1].variance ** 0.5, rel=0.02)


def test_a_stratum_without_events_is_looked_at_in_proportion_to_its_weight():
    a, b, c = allocate(pilot((0.6, 100, 0), (0.3, 100, 0), (0.1, 100, 40)), 0.002)
    assert a / b == pytest.approx(2, rel=0.01)
    assert c > 0.1 / 0.3 * b
    even = sample_size(0.002, share=0.04)
    assert a + b + c < 0.35 * even


def test_a_pilot_without_trials_is_refused():
    with pytest.raises(ValueError, match="at least one pilot trial in each stratum"):
        allocate([Stratum.of([])], 0.1)


def test_looks_spend_no_more_than_there_is():
    assert math.fsum(error_share(i) for i in range(100_000)) == pytest.approx(1, abs=1e-4)
    assert [size_at(i, 100) for i in range(4)] == [100, 150, 225, 338]
    assert confidence_at(0, 0.95) == pytest.approx(0.975)


def test_stopping_at_any_look_keeps_the_level():
    """Stop as soon as the interval leaves the truth out, the worst there is: it must not come to more than alpha."""
    rng, p, missed = np.random.default_rng(4), 0.05, 0
    naive = 0
    for _ in range(600):
        x = rng.random(size_at(5, 200)) < p
        for look in range(6):
            seen = x[: size_at(look, 200)]
            found = bounded_mean(seen, confidence_at(look, 0.95))
            if not found.low <= p <= found.high:
                missed += 1
                break
        naive += any(
            not (i := clopper_pearson(x[: size_at(k, 200)].sum(), size_at(k, 200))).low <= p <= i.high for k in range(6)
        )
    assert missed / 600 <= 0.05
    assert naive > missed


def score_limits(events, n):
    """Wilson's limits, by SciPy."""
    limits = stats.binomtest(events, n).proportion_ci(method="wilson")
    return Interval(events / n, limits.low, limits.high, 0.95, n, "")


def test_newcombes_example():
    """56/70 against 48/80 (Newcombe 1998, method 10, from score limits of both): 0.0524 to 0.3339."""
    found = difference(score_limits(56, 70), score_limits(48, 80))
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert found.estimate == pytest.approx(0.2)


def test_ratio_and_difference_agree_on_what_is_certain():
    one, other = clopper_pearson(80, 100), clopper_pearson(20, 100)
    found = ratio(one, other)
    assert found.estimate == pytest.approx(4)
    assert 1 < found.low < 4 < found.high
    back = ratio(other, one)
    assert back.low == pytest.approx(1 / found.high)
    assert back.high == pytest.approx(1 / found.low)
    none = ratio(one, clopper_pearson(0, 100))
    assert (none.estimate, none.high) == (None, math.inf)
    assert none.low > 1
    with pytest.raises(ValueError, match="cannot be compared"):
        difference(one, clopper_pearson(1, 2, 0.9))


@pytest.mark.parametrize(("p", "q"), [(0.02, 0.02), (0.3, 0.1), (0.01, 0.001)])
def test_coverage_of_difference_and_ratio(p, q):
    rng, missed = np.random.default_rng(1), [0, 0]
    for _ in range(500):
        one, other = (clopper_pearson(int(rng.binomial(300, r)), 300) for r in (p, q))
        d, r = difference(one, other), ratio(one, other)
        missed[0] += not d.low <= p - q <= d.high
        missed[1] += not r.low <= p / q <= r.high
    assert max(missed) <= 36  # of 500 at 95 %: more has probability below 0.02


def test_pairs_say_more_than_two_campaigns():
    rng = np.random.default_rng(2)
    one = (rng.random(2000) < 0.2).astype(float)
    other = np.where(rng.random(2000) < 0.02, 0.0, one)
    found, apart = paired(other - one), difference(bounded_mean(other), bounded_mean(one))
    assert found.estimate == pytest.approx(other.mean() - one.mean())
    assert found.half_width < 0.5 * apart.half_width
    assert paired([0.0] * 50).estimate == 0


def test_p_values_and_holm():
    far, near = clopper_pearson(50, 100), clopper_pearson(48, 100)

    def apart(other):
        return lambda c: difference(clopper_pearson(50, 100, c), clopper_pearson(other, 100, c))

    assert far.n == near.n
    assert p_value(apart(48)) > 0.5
    small = p_value(apart(20))
    assert small < 0.001
    found = apart(33)
    p = p_value(found)
    assert not found(1 - 1.01 * p).low <= 0 <= found(1 - 1.01 * p).high
    assert found(1 - 0.99 * p).low <= 0 <= found(1 - 0.99 * p).high
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def _by_hand(one: tuple[int, int], other: tuple[int, int], level: float) -> tuple[float, float]:
    """Zou and Donner's limits of a difference from Clopper and Pearson's, at an error level."""
    ends = []
    for k, n in (one, other):
        low = 0.0 if k == 0 else float(stats.beta.ppf(level / 2, k, n - k + 1))
        high = 1.0 if k == n else float(stats.beta.ppf(1 - level / 2, k + 1, n - k))
        ends.append((k / n, low, high))
    (p, p_low, p_high), (q, q_low, q_high) = ends
    return p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)


def test_joint_differences_by_hand():
    pairs = [((7, 40), (20, 60)), ((0, 40), (3, 60)), ((40, 40), (50, 60)), ((5, 9), (5, 9))]
    found = joint_differences(pairs, 0.9)
    for pair, interval in zip(pairs, found, strict=True):
        low, high = _by_hand(*pair, 0.1 / len(pairs))
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-9)
        assert interval.confidence == 0.9
        assert "joint over 4" in interval.method
    assert (
        joint_differences(pairs[:1], 0.9)[0].low
        == difference(clopper_pearson(7, 40, 0.9), clopper_pearson(20, 60, 0.9)).low
    )
    assert joint_differences([((0, 0), (1, 5))], 0.9)[0].estimate is None
    assert joint_differences([], 0.9) == []


def test_joint_differences_err_once_in_twenty_families():
    """Exact: all pairs of counts of two equal shares; limits of each row alone are wrong too often among eight rows."""
    n, rows = 30, 8
    mass = stats.binom.pmf(range(n + 1), n, 0.5)
    wrong = {"joint": 0.0, "alone": 0.0}
    for a in range(n + 1):
        for b in range(n + 1):
            for name, level in (("joint", 0.05 / rows), ("alone", 0.05)):
                low, high = _by_hand((a, n), (b, n), level)
                wrong[name] += float(mass[a] * mass[b]) * (low > 0 or high < 0)
    assert 1 - (1 - wrong["joint"]) ** rows <= 0.05
    assert 1 - (1 - wrong["alone"]) ** rows > 0.1
