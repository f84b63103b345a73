"""Measures of replicas against slow, obvious loops; intervals against simulation; the three defects of the published script."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from scipy import stats

from unsilent.basics.errors import UsageError
from unsilent.statistics.distances import distance, weight_distances
from unsilent.statistics.groups import class_error_rates, group_spread
from unsilent.statistics.replica_spread import (
    churn,
    first_differing_index,
    max_possible_sd,
    mean_over_pairs,
    median_first_differing_step,
    spread,
)


def pairs_of(count):
    return list(itertools.combinations(range(count), 2))


def test_spread_is_the_sample_deviation():
    x = np.random.default_rng(0).normal(0.7, 0.02, 12)
    found = spread(x, max_difference=1.0)
    assert found.sd.estimate == pytest.approx(np.std(x, ddof=1))
    assert found.range == x.max() - x.min()
    assert found.sd.low < found.sd.estimate < found.sd.high <= 1.0


def test_a_spread_of_two_heaps_has_a_width():
    """The jackknife alone has none. Oracle: chi-square quantiles of 9 degrees of freedom from a table."""
    values = [0.7] * 5 + [0.9] * 5
    found = spread(values, max_difference=1.0).sd
    assert found.estimate == pytest.approx(math.sqrt(0.1 / 9))
    assert found.low == pytest.approx(found.estimate * math.sqrt(9 / 19.0228), rel=1e-4)
    assert found.high == pytest.approx(found.estimate * math.sqrt(9 / 2.70039), rel=1e-4)
    assert "chi-square" in found.method
    rng = np.random.default_rng(4)
    for count in (4, 6, 10, 20):
        hits = [
            (lambda sd: sd.low <= 0.1 <= sd.high)(spread(rng.choice([0.7, 0.9], count), max_difference=1.0).sd)
            for _ in range(400)
        ]
        assert np.mean(hits) > 0.93, count


def test_a_spread_is_no_greater_than_there_can_be():
    """Half at 0 and half at 1 is the greatest; limits stay below it, whatever the scale."""
    rng = np.random.default_rng(5)
    for count in range(3, 9):
        for _ in range(50):
            found = spread(rng.integers(0, 2, count), max_difference=1.0).sd
            assert found.estimate <= found.high <= max_possible_sd(count)
    assert spread([0, 1, 0, 1], max_difference=1.0).sd.estimate == pytest.approx(max_possible_sd(4))
    x = rng.exponential(size=8)
    one, scaled = spread(x).sd, spread(x * 1e200).sd
    assert scaled.low == pytest.approx(one.low * 1e200)
    assert scaled.high == pytest.approx(one.high * 1e200)
    assert spread([1e308, -1e308, 0.0]).sd.estimate == pytest.approx(1e308)


def test_a_limit_far_off_is_none():
    pairs = np.ones((3, 3))
    pairs[0, 1] = pairs[1, 0] = 1e-7
    pairs[0, 2] = pairs[2, 0] = 1e-7
    assert (mean_over_pairs(pairs).low, mean_over_pairs(pairs).high) == (0.0, math.inf)
    assert (mean_over_pairs(pairs, max_difference=2.0).low, mean_over_pairs(pairs, max_difference=2.0).high) == (
        0.0,
        2.0,
    )


def test_defect_the_deviation_of_the_published_script_is_too_low():
    """It divides by n; of ten replicas that is five per cent low."""
    x = np.random.default_rng(1).normal(size=10)
    assert spread(x).sd.estimate / np.std(x) == pytest.approx(math.sqrt(10 / 9))


def test_defect_churn_counts_what_differs():
    """The published script returns the share that is equal."""
    predictions = np.array([[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 1, 1]])
    assert churn(predictions).estimate == pytest.approx(1 / 6)  # a quarter in two of three pairs


def test_defect_fnr_is_a_share_of_the_positives():
    """The published script divides by the negatives."""
    truth = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    predictions = np.array([[1, 0, 0, 0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]])
    found = class_error_rates(predictions, truth, positive=1)
    assert found.fnr.tolist() == [3 / 4, 0]
    assert found.recall.tolist() == [1 / 4, 1]
    assert found.fpr.tolist() == [1 / 6, 0]


def test_rates_of_many_classes_count_others_as_negative():
    truth, predictions = np.array([0, 1, 2, 2]), np.array([[2, 1, 2, 0]])
    found = class_error_rates(predictions, truth, positive=2)
    assert (found.recall[0], found.fpr[0]) == (1 / 2, 1 / 2)
    with pytest.raises(UsageError, match="class 7 has 0 of 4 samples"):
        class_error_rates(predictions, truth, positive=7)


def test_the_jackknife_leaves_out_replicas():
    """Oracle: the estimate of every set without one replica, by loops over pairs."""
    predictions = np.random.default_rng(2).integers(0, 3, (6, 40))
    each = {(i, j): float(np.mean(predictions[i] != predictions[j])) for i, j in pairs_of(6)}
    without = [np.mean([d for pair, d in each.items() if r not in pair]) for r in range(6)]
    logs = np.log(without)
    half = 2.5705818366147 * math.sqrt(5 / 6 * np.sum((logs - logs.mean()) ** 2))  # t of 5 degrees of freedom
    found = churn(predictions)
    mean = np.mean(list(each.values()))
    assert found.estimate == pytest.approx(mean)
    assert found.low == pytest.approx(mean * math.exp(-half))
    assert found.high == pytest.approx(mean * math.exp(half))
    assert found.n == 6


def test_the_jackknife_of_a_kernel_with_a_sign_has_the_width_of_the_loops():
    pairs = np.array([[0, 1, -2, 3], [1, 0, 4, -1], [-2, 4, 0, 2], [3, -1, 2, 0]], dtype=float)

    def mean(rows):
        return np.mean([pairs[i, j] for i in rows for j in rows if i != j])

    without = np.array([mean([r for r in range(4) if r != left]) for left in range(4)])
    half = stats.t.ppf(0.975, 3) * np.sqrt(3 / 4 * ((without - without.mean()) ** 2).sum())
    found = mean_over_pairs(pairs)
    assert (found.estimate, found.low, found.high) == pytest.approx(
        (mean(range(4)), mean(range(4)) - half, mean(range(4)) + half)
    )


@pytest.mark.parametrize("draw", ["spread", "churn", "distance"])
def test_intervals_cover_when_replicas_are_resampled(draw):
    """Five and twenty replicas; docs/evidence/noise.md has more. Taking pairs as independent covers far less."""
    rng = np.random.default_rng(3)

    def kernel(count):
        if draw == "spread":
            x = rng.normal(size=count)
            return (x[:, None] - x) ** 2 / 2
        if draw == "churn":  # each replica has its own rate of odd predictions
            odd = rng.random((count, 200)) < rng.beta(1, 9, (count, 1))
            return (odd[:, None] != odd).mean(axis=2)
        x = rng.normal(size=(count, 20)) * np.exp(0.5 * rng.normal(size=(count, 1)))
        return np.linalg.norm(x[:, None] - x, axis=2)

    truth = np.mean([mean_over_pairs(kernel(60)).estimate for _ in range(300)])
    for count in (5, 20):
        found = [mean_over_pairs(kernel(count)) for _ in range(600)]
        covered = np.mean([i.low <= truth <= i.high for i in found])
        assert covered > 0.90, (count, covered)
    naive = []
    for _ in range(600):
        values = kernel(20)[np.triu_indices(20, 1)]
        half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
        naive.append(abs(values.mean() - truth) <= half)
    assert np.mean(naive) < 0.85


def test_equal_replicas_still_have_an_upper_limit():
    found = churn(np.ones((20, 50), dtype=int))
    assert (found.estimate, found.low, found.n) == (0.0, 0.0, 20)
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 10))
    assert spread([0.5] * 5).sd.high == math.inf
    assert spread([0.5] * 5, max_difference=1.0).sd.high < 1


def test_one_odd_replica_makes_all_of_the_churn():
    predictions = np.zeros((8, 10), dtype=int)
    predictions[3, :4] = 1
    found = churn(predictions)
    assert found.estimate == pytest.approx(0.4 * 2 / 8)
    assert found.low == 0.0
    assert found.estimate < found.high <= 1.0


@pytest.mark.parametrize("call", [lambda: spread([1.0, 2.0]), lambda: churn(np.zeros((2, 5), dtype=int))])
def test_too_few_replicas(call):
    with pytest.raises(UsageError, match="2 replicas are too few.*at least 3 are needed.*make 1 more"):
        call()


def test_bad_replicas_are_named():
    with pytest.raises(UsageError, match="clean replica 2 is not finite"):
        spread([1.0, 2.0, math.nan])
    with pytest.raises(UsageError, match="give the argmax"):
        churn(np.zeros((3, 4)))
    with pytest.raises(ValueError, match="must be symmetric"):
        mean_over_pairs(np.array([[0, 1, 2], [3, 0, 1], [2, 1, 0.0]]))


def test_few_replicas_are_said_to_be_few():
    assert "few (5)" in spread([1.0, 2, 3, 4, 6]).sd.method
    assert "few" not in spread(list(range(10))).sd.method


def test_distances_against_loops():
    weights = np.random.default_rng(4).normal(size=(5, 30)).astype(np.float32)
    loads = []
    found = weight_distances(lambda r: loads.append(r) or weights[r], 5)
    for i, j in pairs_of(5):
        a, b = weights[i].astype(np.float64), weights[j].astype(np.float64)
        assert found.raw[i, j] == found.raw[j, i] == pytest.approx(math.sqrt(sum((a - b) ** 2)))
        unit = math.sqrt(sum((a / np.linalg.norm(a) - b / np.linalg.norm(b)) ** 2))
        assert found.normalised[i, j] == pytest.approx(unit)
    assert len(loads) == 4 + 10
    assert 0 < found.mean_unit().low < found.mean_unit().estimate < found.mean_unit().high <= 2
    assert found.mean_raw().estimate == pytest.approx(np.mean([found.raw[p] for p in pairs_of(5)]))


def test_distances_of_close_and_extreme_weights():
    """A Gram matrix would show rounding between equal vectors, lose small distances, and overflow."""
    a = np.random.default_rng(5).normal(size=1000)
    assert distance(a, a.copy()) == (0.0, 0.0)
    b = a.copy()
    b[7] += 1e-12
    raw, unit = distance(a, b)
    assert raw == pytest.approx(abs(b[7] - a[7]))
    assert unit == pytest.approx(raw / np.linalg.norm(a), rel=0.02)
    assert distance(a, 3 * a)[1] == pytest.approx(0, abs=1e-7)
    assert distance(np.array([1e300, 0]), np.array([0, 1e300])) == pytest.approx((math.sqrt(2) * 1e300, math.sqrt(2)))
    assert distance(a, -a)[1] == pytest.approx(2)
    assert distance(a, np.where(np.arange(1000) == 3, np.nan, a)) == (math.inf, math.inf)
    assert distance(np.zeros(3), np.zeros(3)) == (0.0, 0.0)
    with pytest.raises(UsageError, match="3 and 4 elements"):
        distance(np.zeros(3), np.zeros(4))


def flips(rng, replicas, samples, common=0.0):
    """Wrong or not: a probability of each sample's own, moved together by one number of each replica."""
    hardness = rng.beta(0.5, 2, samples)
    moved = hardness + common * rng.choice([-1.0, 1.0], (replicas, 1))
    return rng.random((replicas, samples)) < np.clip(moved, 0, 1)


def test_equal_groups_of_unequal_size_show_no_excess():
    """Groups drawn at random: raw sd grows as groups shrink, corrected sd does not, and p is uniform."""
    rng = np.random.default_rng(6)
    cuts = {"tiny": slice(0, 10), "small": slice(10, 40), "large": slice(40, 400)}
    raw, common, binomial, p = ({name: [] for name in cuts} for _ in range(4))
    for _ in range(150):
        wrong = flips(rng, 15, 400)
        groups = {name: np.isin(np.arange(400), np.arange(400)[cut]) for name, cut in cuts.items()}
        for g in group_spread(wrong, groups, draws=39, seed=int(rng.integers(2**31))):
            raw[g.name].append(g.sd.estimate**2)
            x = wrong[:, groups[g.name]]
            n = x.shape[1]
            single = x.var(axis=0, ddof=1).sum() / n**2
            common[g.name].append((x.mean(axis=1).var(ddof=1) - single) * n / (n - 1))
            binomial[g.name].append(g.error * (1 - g.error) / n)
            p[g.name].append(g.p)
    assert np.mean(raw["tiny"]) > 15 * np.mean(raw["large"])
    for name in cuts:
        error = np.std(common[name]) / math.sqrt(150)
        assert abs(np.mean(common[name])) < 4 * error, name  # nothing in common: none is found, whatever the size
        assert np.mean(raw[name]) < 0.85 * np.mean(binomial[name])  # binomial sampling would take away too much
        assert np.mean(np.array(p[name]) <= 0.1) == pytest.approx(0.1, abs=0.075)


def test_what_samples_have_in_common_is_found_without_bias():
    """Truth: the variance over replicas of a group's error on unlimited data, the same for every size."""
    rng = np.random.default_rng(7)
    found = {8: [], 60: []}
    for _ in range(400):
        rate = rng.choice([0.3, 0.5], (12, 1))
        wrong = rng.random((12, 68)) < rate
        groups = {"8": np.arange(68) < 8, "60": np.arange(68) >= 8}
        for g in group_spread(wrong, groups, draws=1):
            x = wrong[:, groups[g.name]]
            n = x.shape[1]
            c = (x.mean(axis=1).var(ddof=1) - x.var(axis=0, ddof=1).sum() / n**2) * n / (n - 1)
            assert g.common_sd.estimate == pytest.approx(math.sqrt(max(c, 0)), abs=1e-7)
            found[n].append(c)
    for n, values in found.items():
        assert np.mean(values) == pytest.approx(0.01, abs=4 * np.std(values) / 20), n


def test_size_alone_is_what_random_groups_have():
    rng = np.random.default_rng(8)
    wrong = flips(rng, 10, 120, common=0.1)
    (found,) = group_spread(wrong, {"g": np.arange(120) < 15}, draws=1)
    drawn = [wrong[:, rng.permutation(120)[:15]].mean(axis=1).var(ddof=1) for _ in range(4000)]
    assert found.sd_by_size**2 == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / math.sqrt(4000))


def test_a_sensitive_group_is_found_and_others_are_not():
    rng = np.random.default_rng(9)
    wrong = flips(rng, 20, 300)
    wrong[:, :40] = rng.random((20, 40)) < rng.choice([0.1, 0.6], (20, 1))  # these move together
    groups = {"together": np.arange(300) < 40, "rest": (np.arange(300) >= 40) & (np.arange(300) < 80)}
    found = {g.name: g for g in group_spread(wrong, groups, draws=499)}
    assert found["together"].corrected == 2 * found["together"].p == 2 / 500
    assert found["together"].common_sd.low > 0.1
    assert found["together"].sd.estimate > 2 * found["together"].sd_by_size
    assert found["rest"].p > 0.05


def test_groups_of_one_sample_are_refused():
    with pytest.raises(UsageError, match="group 'lonely' has 1 of 4 samples"):
        group_spread(np.zeros((3, 4), dtype=bool), {"lonely": np.arange(4) == 0})


def test_the_parting_point():
    assert first_differing_index([1, 2, 3], [1, 2, 4]) == 2
    assert first_differing_index([], []) is None
    assert first_differing_index([1], [1, 2]) == 1


def test_median_parting_covers_whatever_the_distribution():
    rng = np.random.default_rng(10)
    hits = 0
    for _ in range(500):
        steps = [int(s) if s < 500 else None for s in rng.geometric(0.003, 15)]
        found = median_first_differing_step(steps)
        hits += found.low <= 231 <= found.high  # median of the geometric law
    assert hits / 500 > 0.93
    assert (median_first_differing_step([1, 2, 3, None]).low, median_first_differing_step([1, 2, 3, None]).high) == (
        0.0,
        math.inf,
    )
    assert median_first_differing_step([5] * 10).estimate == 5
    assert median_first_differing_step([None] * 10).low == math.inf


def test_what_samples_have_in_common_has_an_honest_upper_limit():
    """Whatever the estimate; one sample that changes sides alone says nothing of two, and rounding is not an estimate."""
    everything = {"all": np.ones(49, dtype=bool)}
    one = np.zeros((20, 49))
    one[[3, 5, 11], 7] = 1
    (found,) = group_spread(one, everything, draws=1)
    assert (found.common_sd.estimate, found.common_sd.low) == (0.0, 0.0)
    assert found.common_sd.high == pytest.approx(found.sd.high * math.sqrt(49 / 48))
    assert "equal" not in found.common_sd.method
    (still,) = group_spread(np.zeros((20, 49)), everything, draws=1)
    assert "equal" in still.common_sd.method
    rng, hits = np.random.default_rng(12), 0
    for _ in range(300):
        chance = rng.uniform(0.03, 0.1, 49) + 0.03 * rng.choice([-1, 1], (20, 1))
        (found,) = group_spread(rng.random((20, 49)) < chance, everything, draws=1)
        hits += found.common_sd.low <= 0.03 <= found.common_sd.high
        assert found.common_sd.high > 0.005
    assert hits / 300 > 0.93


def test_random_groups_are_ranked_as_loops_rank_them():
    """Oracle: the chance of each group of two of six samples, by going through all of them."""
    rng = np.random.default_rng(13)
    wrong = rng.random((7, 6)) < 0.5
    mine = np.isin(np.arange(6), (0, 3))
    every = [wrong[:, list(pair)].mean(axis=1).var(ddof=1) for pair in pairs_of(6)]
    share = np.mean(np.array(every) >= wrong[:, mine].mean(axis=1).var(ddof=1) - 1e-12)
    (found,) = group_spread(wrong, {"g": mine})
    assert found.draws == 19_999
    error = math.sqrt(share * (1 - share) / found.draws)
    assert found.p == pytest.approx(share, abs=4 * error + 1e-4)
    assert found.p_standard_error == pytest.approx(error, rel=0.1)


@pytest.mark.claim
def test_large_tables_are_ranked_in_time():
    rng = np.random.default_rng(14)
    wrong = rng.random((20, 450)) < rng.beta(0.3, 4, 450)
    groups = {str(k): np.arange(450) % 11 == k for k in range(11)}
    began = time.process_time()
    found = group_spread(wrong, groups)
    assert time.process_time() - began < 2
    assert {g.draws for g in found} == {19_999}
    huge = np.tile(wrong, (1, 200))
    (found,) = group_spread(huge, {"one": np.arange(90_000) < 900})
    assert 999 <= found.draws < 19_999


def test_a_p_value_at_the_level_is_said_to_be_there():
    wrong = np.random.default_rng(15).random((20, 300)) < 0.2
    (found,) = group_spread(wrong, {"one": np.arange(300) < 30}, draws=999)
    assert found.p_standard_error == pytest.approx(math.sqrt(found.p * (1 - found.p) / 1000))
    assert found.is_near_level(found.corrected + 2.9 * found.p_standard_error)
    assert not found.is_near_level(found.corrected + 3.1 * found.p_standard_error)
