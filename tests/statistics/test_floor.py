"""The floor test: its level, what it refuses, and each of its words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.statistics import noise_p_values
from unsilent.statistics.comparing import benjamini_hochberg, holm
from unsilent.statistics.floor import noise_verdict, noise_verdicts, replicas_needed, step_down
from unsilent.statistics.null_distribution import Measure, NullDistribution, RunComparison

ACCURACY = Measure("accuracy", margin=0.02, worse_direction="less")
CHURN = Measure("churn", margin=0.05, is_distance=True)


def run(name, accuracy=0.0, churn=0.0, **more):
    return RunComparison(name, more.pop("other", "twin"), {"accuracy": accuracy, "churn": churn}, **more)


def clean(count=19, sd=0.001, seed=0):
    rng = np.random.default_rng(seed)
    return NullDistribution([run(f"r{i}", sd * rng.normal(), abs(0.002 * rng.normal()) + 0.001) for i in range(count)])


def word(null=None, measures=(ACCURACY, CHURN), **values):
    return noise_verdict(run("corrupted", **values), null or clean(), list(measures)).word


def test_each_word():
    assert word(accuracy=-0.05, churn=0.2) == "harmful"
    assert word(accuracy=-0.05, churn=0.002) == "harmful"
    assert word(accuracy=-0.01, churn=0.03) == "detectable"
    assert word(accuracy=0.05, churn=0.03) == "improved"
    assert word(accuracy=0.05, churn=0.3) == "harmful"  # by its margin on churn
    assert word(accuracy=0.0, churn=0.002) == "masked"
    wide = NullDistribution([run(f"r{i}", x, 0.02) for i, x in enumerate(np.linspace(-0.05, 0.05, 19))])
    assert word(wide, accuracy=0.01, churn=0.02) == "undecided"


def test_identical_bits_need_no_test_and_no_replicas():
    found = noise_verdict(run("corrupted", same_bits=True), clean(3), [ACCURACY, CHURN])
    assert (found.word, found.p, found.method) == ("identical", None, "bits")


def test_no_noise_means_that_any_difference_is_beyond_it():
    silent = NullDistribution([run(f"r{i}", same_bits=True) for i in range(2)])
    found = noise_verdict(run("corrupted", accuracy=-0.01), silent, [ACCURACY, CHURN])
    assert (found.word, found.p, found.n) == ("detectable", None, 2)
    assert "have equal bits" in found.sentence
    assert [f.beyond_noise for f in found.findings] == [True, False]
    assert word(silent, accuracy=-0.02) == "harmful"
    assert word(silent, accuracy=0.01) == "improved"
    bits = noise_verdict(run("corrupted"), silent, [ACCURACY, CHURN])
    assert (bits.word, "only the bits differ" in bits.sentence) == ("detectable", True)


def test_a_measure_without_spread_is_said_and_judged_by_rank():
    """Five replicas that happen to be equally accurate are not proven to be without noise."""
    flat = NullDistribution([run(f"r{i}", 0.0, 0.001 * (i + 1)) for i in range(19)])
    found = noise_verdict(run("corrupted", accuracy=-0.001, churn=0.001), flat, [ACCURACY, CHURN])
    assert found.p == 1 / 20
    assert "all clean comparisons have the same accuracy" in found.sentence
    assert noise_verdict(run("corrupted", accuracy=0.0, churn=0.002), flat, [ACCURACY, CHURN]).p > 0.5
    with pytest.raises(UsageError, match="4 clean replicas are too few"):
        noise_verdict(run("corrupted", accuracy=-1), NullDistribution(flat.clean_comparisons[:4]), [ACCURACY])


def test_too_few_replicas_say_how_many_are_needed():
    with pytest.raises(UsageError, match=r"10 clean replicas are too few for level 0.05 over 1 test.*at least 19"):
        noise_verdict(run("corrupted"), clean(10), [ACCURACY])
    with pytest.raises(
        UsageError, match=r"over 70 tests: the smallest possible p value is 1/20, above 0.00071 per test.*1399"
    ):
        noise_verdict(run("corrupted"), clean(19), [ACCURACY], tests=70)
    noise_verdict(run("corrupted"), clean(19), [ACCURACY])
    with pytest.raises(UsageError, match="18 clean"):
        noise_verdict(run("corrupted"), clean(18), [ACCURACY])


@pytest.mark.parametrize("level", [0.05, 0.01, 0.1, 0.001])
@pytest.mark.parametrize("tests", [1, 3, 7, 30, 70])
def test_the_needed_number_is_enough_and_the_least(level, tests):
    needed = replicas_needed(level, tests)
    assert tests / (needed + 1) <= level * (1 + 1e-9) < tests / needed
    assert noise_verdict(run("bad", accuracy=-1), clean(needed), [ACCURACY], level=level, tests=tests).word == "harmful"


def test_one_distance_is_the_plain_rank():
    null = np.arange(1.0, 20.0)[:, None]
    for x in (0.5, 3.0, 7.5, 18.0, 19.0, 30.0):
        assert noise_p_values.beyond_noise_p_values(np.array([x]), null, [CHURN])[0] == (1 + (null >= x).sum()) / 20


def test_what_is_not_finite_is_beyond_all():
    for value in (math.inf, math.nan):
        found = noise_verdict(run("corrupted", accuracy=0.0, churn=value), clean(), [ACCURACY, CHURN])
        assert (found.word, found.p, found.findings[1].effect) == ("harmful", 1 / 20, math.inf)
    assert word(accuracy=math.nan) == "harmful"
    assert word(accuracy=0.0, churn=1e300) == "harmful"
    with pytest.raises(UsageError, match="clean run 'r0' is inf"):
        NullDistribution([run("r0", math.inf)])


def test_combining_holds_its_level_with_dependent_skewed_measures():
    """Runs and replicas alike: p is at most uniform, together and for each measure. Centring on the twin alone would not do."""
    rng = np.random.default_rng(1)
    measures = [ACCURACY, CHURN, Measure("loss", 0.1), Measure("l2", 0.1, is_distance=True)]
    p = []
    for _ in range(3000):
        common = rng.normal(size=(20, 1))
        pool = np.column_stack(
            [rng.standard_t(2, 20), np.exp(common[:, 0]), common + 0.3 * rng.normal(size=(20, 1)), rng.poisson(1, 20)]
        )
        p.append(noise_p_values.beyond_noise_p_values(pool[0], pool[1:], measures))
    least = np.min(p, axis=1)
    for level in (0.05, 0.1, 0.2, 0.5):
        slack = 3 * math.sqrt(level * (1 - level) / 3000)
        assert np.mean(least <= level + 1e-9) <= level + slack
    assert np.mean(least <= 0.1 + 1e-9) > 0.08  # and it is not level by never calling


def test_standardising_treats_all_of_the_pool_alike():
    rng = np.random.default_rng(2)
    pool = rng.normal(size=(12, 2))
    order = rng.permutation(12)
    z = noise_p_values.standardised(pool, [ACCURACY, CHURN])
    np.testing.assert_allclose(noise_p_values.standardised(pool[order], [ACCURACY, CHURN]), z[order])
    oracle = (pool - pool.mean(axis=0)) / pool.std(axis=0)
    np.testing.assert_allclose(z, np.column_stack([abs(oracle[:, 0]), oracle[:, 1]]))


def test_an_unaffected_measure_is_rarely_blamed():
    """Churn is shifted in every run, accuracy in none: it may be called beyond noise at the level only."""
    rng = np.random.default_rng(3)
    blamed = []
    for _ in range(2000):
        pool = np.column_stack([rng.normal(size=20), np.abs(rng.normal(size=20))])
        pool[0, 1] += 10
        p = noise_p_values.beyond_noise_p_values(pool[0], pool[1:], [ACCURACY, CHURN])
        assert p[1] == 1 / 20
        blamed.append(p[0] <= 0.05)
    assert np.mean(blamed) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_masked_is_rarely_said_of_an_effect_as_large_as_the_margin():
    rng = np.random.default_rng(4)
    calls = {"at": 0, "none": 0}
    for _ in range(2000):
        x = rng.standard_t(3, 20)[:, None]
        for kind, shift in (("at", -8.0), ("none", 0.0)):
            p = noise_p_values.within_margin_p_value(x[0] + shift, x[1:], [Measure("loss", margin=8.0)])
            calls[kind] += p <= 0.05
    assert calls["at"] / 2000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert calls["none"] / 2000 > 0.5
    assert calls["at"] / 2000 > 0.02


def test_masked_needs_every_measure_and_both_sides():
    null = clean().values([ACCURACY, CHURN])
    inside = np.array([0.0, 0.002])
    assert noise_p_values.within_margin_p_value(inside, null, [ACCURACY, CHURN]) == 1 / 20
    for x in (np.array([0.03, 0.002]), np.array([-0.03, 0.002]), np.array([0.0, 0.06])):
        assert noise_p_values.within_margin_p_value(x, null, [ACCURACY, CHURN]) == 1.0


def test_masked_is_not_said_for_want_of_replicas():
    assert noise_verdict(run("corrupted", accuracy=-0.018), clean(sd=0.01), [ACCURACY]).word == "undecided"


def test_benjamini_hochberg_against_its_definition():
    rng = np.random.default_rng(5)
    for _ in range(50):
        p = rng.beta(0.4, 1, 12)
        adjusted = benjamini_hochberg(list(p))
        for level in (0.05, 0.2, 0.6):
            ordered = np.sort(p)
            below = [k for k in range(1, 13) if ordered[k - 1] <= level * k / 12]
            called = p <= (ordered[below[-1] - 1] if below else -1)
            assert (np.array(adjusted) <= level).tolist() == called.tolist()


def test_stepping_down_is_holm_for_one_measure():
    p = np.random.default_rng(6).beta(0.3, 1, 9)
    assert step_down(p[:, None], 9)[:, 0].tolist() == pytest.approx(holm(list(p)))
    assert step_down(p[:, None], 12)[:, 0].tolist() == pytest.approx(holm([*p, 1.0, 1.0, 1.0])[:9])


def test_a_run_counts_until_all_of_its_measures_are_called():
    p = np.array([[0.01, 0.04], [0.02, 0.5]])
    assert step_down(p, 2).tolist() == [[0.02, 0.08], [0.04, 0.5]]


def test_many_runs_are_corrected():
    null = clean(199)
    questions = [(run(f"s{i}", accuracy=-0.05 if i < 2 else 0.0), null) for i in range(10)]
    found = noise_verdicts(questions, [ACCURACY])
    assert [v.word for v in found[:2]] == ["harmful"] * 2
    assert found[0].p == 1 / 200
    assert found[0].corrected_p == pytest.approx(10 / 200)
    assert (found[0].tests, found[0].method) == (10, "rank, Holm")
    assert "after Holm over 10 tests" in found[0].sentence
    assert {v.word for v in found[2:]} == {"masked"}
    assert noise_verdicts(questions, [ACCURACY], correction="bh")[0].corrected_p == pytest.approx(10 / 200 / 2)
    # Few replicas can call something under Benjamini and Hochberg only where much is found at once.
    few = [(run(f"s{i}", accuracy=-0.05), clean(19)) for i in range(10)]
    assert {v.word for v in noise_verdicts(few, [ACCURACY], correction="bh")} == {"harmful"}
    with pytest.raises(UsageError, match="at least 199"):
        noise_verdicts(few, [ACCURACY])


def test_identical_runs_leave_the_family_only_where_no_clean_run_is_identical():
    null = clean(39)
    questions = [(run("s0", accuracy=-0.05), null), (run("s1"), null)]
    questions += [(run(f"s{i}", same_bits=True), null) for i in range(2, 12)]
    found = noise_verdicts(questions, [ACCURACY])
    assert [v.tests for v in found] == [2] * 12
    assert [v.word for v in found[1:]] == ["masked"] + ["identical"] * 10
    mixed = NullDistribution([*null.clean_comparisons, run("same", same_bits=True)])
    with pytest.raises(UsageError, match="over 12 tests"):
        noise_verdicts([(o, mixed) for o, _ in questions], [ACCURACY])


def test_fitted_goes_below_the_rank_and_says_so():
    found = noise_verdict(run("corrupted", accuracy=-0.05), clean(30), [ACCURACY], tests=100, fitted=True)
    assert found.word == "harmful"
    assert found.corrected_p < 0.001
    assert found.method.startswith("fitted (normal")
    normal = noise_verdict(run("corrupted", accuracy=0.0), clean(30), [ACCURACY], fitted=True)
    assert (normal.word, normal.equivalence < 0.001) == ("masked", True)


def test_fitted_p_is_uniform_where_the_law_holds():
    rng = np.random.default_rng(7)
    called = {"accuracy": 0, "churn": 0}
    tried = 0
    for _ in range(600):
        values = rng.normal(size=25)
        try:
            sides = {
                m.name: noise_p_values.FittedNull(
                    NullDistribution([RunComparison(f"{i}", "t", {m.name: f(x)}) for i, x in enumerate(values[1:])]),
                    [m],
                ).beyond_noise_p_values(np.array([f(values[0])]))[0]
                for m, f in ((ACCURACY, float), (CHURN, math.exp))
            }
        except UsageError:  # one in twenty is refuted by chance
            continue
        tried += 1
        for name, p in sides.items():
            called[name] += p <= 0.1
    assert tried > 500
    for count in called.values():
        assert count / tried == pytest.approx(0.1, abs=0.04)


def test_fitted_is_refused_where_it_does_not_fit():
    skewed = NullDistribution([run(f"r{i}", math.exp(3 * math.sin(i)), 0.0) for i in range(40)])
    with pytest.raises(UsageError, match="accuracy are not normal.*use ranks instead"):
        noise_verdict(run("corrupted"), skewed, [ACCURACY], fitted=True)
    with pytest.raises(UsageError, match="no log-normal distribution fits churn: its clean values are all equal"):
        noise_verdict(run("corrupted"), skewed, [CHURN], fitted=True)
    with pytest.raises(UsageError, match="at least 20"):
        noise_verdict(run("corrupted"), clean(10), [ACCURACY], fitted=True)


def test_all_pairs_are_refused_as_a_null():
    """R (R - 1) / 2 distances are not as many independent ones."""
    names = [f"r{i}" for i in range(7)]
    pairs = [run(a, other=b) for i, a in enumerate(names) for b in names[i + 1 :]]
    with pytest.raises(UsageError, match=r"not exchangeable.*R // 2 pairs"):
        NullDistribution(pairs)
    with pytest.raises(UsageError, match="'r1' is in 2 comparisons"):
        NullDistribution([run("r1"), run("r2"), run("r1")])
    with pytest.raises(UsageError, match="'twin' is in"):
        NullDistribution([run("r1"), run("twin", other="twin2"), run("r3")])


def test_separate_pairs_are_accepted():
    null = NullDistribution([run(f"a{i}", 0.001 * i, 0.001 * i, other=f"b{i}") for i in range(19)])
    assert (
        noise_verdict(run("corrupted", accuracy=-1, churn=1, other="its clean run"), null, [ACCURACY, CHURN]).p
        == 1 / 20
    )
    with pytest.raises(UsageError, match="'b3' is also in a clean pair"):
        noise_verdict(run("corrupted", other="b3"), null, [ACCURACY])


def test_what_is_not_exchangeable_is_refused():
    null = clean()
    with pytest.raises(UsageError, match="compared with 'another', but the clean runs with 'twin'"):
        noise_verdict(run("corrupted", other="another"), null, [ACCURACY])
    with pytest.raises(UsageError, match="'r3' is also one of the clean runs"):
        noise_verdict(run("r3"), null, [ACCURACY])
    with pytest.raises(UsageError, match="different noise sources, '' and 'IMPL'"):
        noise_verdict(run("corrupted", noise_source="IMPL"), null, [ACCURACY])
    with pytest.raises(UsageError, match="'recall' was not measured; known: accuracy, churn"):
        noise_verdict(run("corrupted"), null, [Measure("recall", 0.1)])
    with pytest.raises(UsageError, match="record equal measures for all runs"):
        NullDistribution([run("r1"), RunComparison("r2", "twin", {"accuracy": 0.0})])
    with pytest.raises(UsageError, match="'accuracy' has a value below 0, so it is not a distance"):
        noise_verdict(run("corrupted"), null, [Measure("accuracy", 0.1, is_distance=True)])
    with pytest.raises(UsageError, match="compared with itself"):
        NullDistribution([run("r1", other="r1")])
    with pytest.raises(UsageError, match="no clean comparison"):
        NullDistribution([])


def test_bad_questions():
    with pytest.raises(UsageError, match="margin of loss is -1"):
        Measure("loss", -1)
    with pytest.raises(UsageError, match="level between 0 and 1"):
        noise_verdict(run("corrupted"), clean(), [ACCURACY], level=5)
    with pytest.raises(UsageError, match="given twice"):
        noise_verdict(run("corrupted"), clean(), [ACCURACY, ACCURACY])
    assert noise_verdicts([], [ACCURACY]) == []
