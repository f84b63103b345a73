"""Stored trials beside golden: endings put together again, counts that add up, what predicts harm counted by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from unsilent.campaigns.spec import TrialId
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.replicas.noise_floor_records import NoiseFloors, ReplicaDifferences
from unsilent.replicas.noise_floors import NoiseFloorTest
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.judging import (
    TrainingJudge,
    backward_against_forward,
    flip_flop_rates,
    groups_by_attribute,
    make_trial_group,
)
from unsilent.studies.training.necessary_conditions import (
    ANY,
    DETECTION_STEPS,
    FACTORS,
    SIZES,
    condition_points,
    guard_result,
    necessary_condition_tables,
    relative_injected_size,
)
from unsilent.studies.training.records import JudgedTrial
from unsilent.studies.training.spec import END_REASONS, InjectionPoint, TrainingBaseline, TrainingRow, TrainingTarget
from unsilent.studies.training.study import cost, has_not_converged

STEPS = 40
CONFIDENCE = 0.95
LOSSES = tuple(1 - i / 100 for i in range(STEPS))
METRIC = tuple(0.5 + i / 100 for i in range(STEPS))
FOUND = TrainingBaseline(
    campaign="c", fingerprint={}, name="by hand", targets=(TrainingTarget("random"),), operation_phases=(), models=(("RD", 1.0),),
    steps=STEPS, epochs=(0,) * STEPS, losses=LOSSES, metric=METRIC,
    history_magnitudes=tuple((0.5 + i / STEPS, 0.01, None) for i in range(STEPS)), test_accuracy=0.8, test_loss=0.6, samples=100,
    golden_seconds=2.0, optimizers=("AdamW", "SGD", "AdamW"), parameters=10, info={}, versions={},
)  # fmt: skip
FLOOR = ReplicaDifferences(
    "within",
    tuple(0.001 * (i - 10) for i in range(20)),
    tuple(0.002 * (i - 9) for i in range(20)),
    (0.01,) * 20,
    (False,) * 20,
    10,
    (0.1,) * 4,
)
SEEDS = replace(
    FLOOR,
    switches="init+order+augment+dropout",
    accuracy=tuple(0.005 * (i - 10) for i in range(20)),
    loss=tuple(0.01 * (i - 9) for i in range(20)),
)
"""Five times as wide as implementation noise."""
FLOORS = NoiseFloors(FLOOR, SEEDS)
NONE = np.empty(0)


def row(k=0, step=10, reason="end", ran=None, metric=None, losses=None, test=0.8, test_loss=0.6, **more):
    """A trial; where nothing is said it does what golden does."""
    count = {"same-bits": 1, "horizon": 5, "end": STEPS - step}.get(reason, 1) if ran is None else ran
    if reason not in ("end", "same-bits", "horizon", "not-finite"):
        count = 0
    part = slice(step, step + count)
    given = {
        "trial": TrialId("random", None, k),
        "injection": InjectionPoint(step, "op:fc#addmm.0/fwd/out", "fwd", "fc", "RD"),
        "faults": "[]",
        "injected_max": 5.0,
        "reference_max": 2.0,
        "end_reason": reason,
        "steps_run": count,
        "losses": np.array(LOSSES[part] if losses is None else losses),
        "metric": np.array(METRIC[part] if metric is None else metric),
        "history_magnitudes": np.full((min(count, 3), 3), np.nan),
        "test_accuracy": test,
        "test_loss": test_loss,
        "churn": 0.0,
        "bit_identical": reason == "same-bits",
        "seconds": 1.0,
    }
    return TrainingRow(**{**given, **more})


@pytest.fixture(scope="module")
def judge():
    return TrainingJudge(FOUND, FLOORS, Thresholds())


def low(step, drop=0.4):
    return np.array(METRIC[step:]) - drop


# -- endings and classes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 10, STEPS - 1])
def test_goldens_tail_follows_where_a_run_was_not_followed(judge, step):
    for reason in ("same-bits", "horizon"):
        one = row(step=step, reason=reason, ran=min(5, STEPS - step))
        changed = replace(one, losses=one.losses + 1, metric=one.metric / 2)
        ending = judge.completed_curves(changed)
        assert ending.losses.tolist() == [*changed.losses, *LOSSES[step + one.steps_run :]]
        assert ending.metric.tolist() == [*changed.metric, *METRIC[step + one.steps_run :]]
        assert len(ending.losses) == STEPS - step
        assert ending.same_bits == (reason == "same-bits")
    died = row(step=step, reason="not-finite", ran=1, losses=[math.nan], test=math.nan)
    assert len(judge.completed_curves(died).losses) == 1
    assert judge.golden_curves(step).losses.tolist() == list(LOSSES[step:])


LOST = {"test": math.nan, "test_loss": math.nan}
BETWEEN = {"test": 0.77, "test_loss": 0.63}
"""Held-out samples answered worse than by any run with golden's seeds, and as by some with others."""


@pytest.mark.parametrize(
    ("one", "outcome"),
    [
        (row(reason="same-bits"), "masked-bitwise"),
        (row(reason="horizon"), "masked-benign"),
        (row(), "masked-benign"),
        (row(reason="not-finite", losses=[math.nan], **LOST), "immediate-nan"),
        (row(reason="not-finite", ran=4, losses=[1, 1, 1, math.inf], **LOST), "short-term-nan"),
        (row(metric=low(10), test=0.3, test_loss=2.0), "sharp-degrade"),
        (row(metric=low(10), test=0.8, test_loss=0.6), "masked-benign"),  # replicas differ as much in the end
        (row(test=0.5, test_loss=0.9), "low-test"),
        (row(test=0.95, test_loss=0.2), "improved"),
        (row(**LOST), "low-test"),
        (row(test=0.8, test_loss=math.inf), "masked-benign"),
        (row(test=0.785, test_loss=0.9), "masked-benign"),  # beyond both floors, and by no threshold
        *((row(reason=reason, **LOST), "crashed") for reason in ("crash", "hang", "raised")),
    ],
)
def test_a_run_within_or_beyond_both_floors_has_one_class(judge, one, outcome):
    found = judge.judge(one)
    assert (found.outcome, found.by_implementation) == (outcome, outcome)
    assert found.is_harmful == (outcome not in ("masked-bitwise", "masked-benign", "improved"))
    assert found.is_different == (outcome not in ("masked-bitwise", "masked-benign"))
    assert len(found.row.losses) == len(found.row.metric) == 0
    assert found.row.trial == one.trial


@pytest.mark.parametrize(
    ("one", "alone"),
    [
        (row(**BETWEEN), "low-test"),
        (row(metric=low(10), **BETWEEN), "sharp-degrade"),
        (row(test=0.83, test_loss=0.57), "improved"),
    ],
)
def test_a_run_between_the_floors_is_different_and_not_harmful(judge, one, alone):
    found = judge.judge(one)
    assert (found.outcome, found.by_implementation) == ("masked-benign", alone)
    assert found.is_different
    assert not found.is_harmful


def test_a_run_that_is_lost_is_harmful_whatever_the_floors(judge):
    wide = replace(FLOOR, accuracy=tuple(range(-10, 10)), loss=tuple(range(-10, 10)))
    blind = TrainingJudge(FOUND, NoiseFloors(wide, wide), Thresholds())
    assert not blind.judge(row(test=0.5, test_loss=0.9)).is_different
    for one in (row(reason="not-finite", losses=[math.nan], **LOST), row(reason="crash", **LOST)):
        assert blind.judge(one).is_different
        assert blind.judge(one).is_harmful


def test_a_curve_is_averaged_as_the_thresholds_say(judge):
    one = row(metric=low(10), losses=[math.nan, *LOSSES[11:]], test=math.nan)
    curve = judge.example_curve(one, judge.judge(one))
    assert len(curve.metric) == len(curve.golden) == STEPS - 10 - 9
    assert curve.metric[0] == pytest.approx(low(10)[:10].mean(), abs=1e-5)
    assert curve.golden[-1] == pytest.approx(np.mean(METRIC[-10:]), abs=1e-5)
    assert curve.losses[0] is None
    assert curve.losses[1:] == LOSSES[11:]
    assert curve.test_accuracy is None


# -- the floor ----------------------------------------------------------------------------------------------------------


SILENT = replace(FLOOR, accuracy=(0.0,) * 20, loss=(0.0,) * 20, churn=(0.0,) * 20, identical_to_twin=(True,) * 20)
"""Replicas that all end in the twin's bits leave no difference to chance."""


def test_without_noise_of_seeds_implementation_noise_alone_decides():
    found = TrainingJudge(FOUND, NoiseFloors(FLOOR, SILENT), Thresholds())
    for one in (row(**BETWEEN), row(), row(reason="same-bits"), row(test=0.5, test_loss=0.9)):
        assert found.judge(one).is_harmful == found.judge(one).is_different
    assert found.judge(row(**BETWEEN)).outcome == "low-test"


def test_without_implementation_noise_seeds_alone_decide_what_is_harmful():
    found = TrainingJudge(FOUND, NoiseFloors(SILENT, SEEDS), Thresholds())
    between = found.judge(row(**BETWEEN))
    assert (between.is_different, between.is_harmful) == (True, False)
    assert found.judge(row(metric=low(10), test=0.3, test_loss=2.0)).outcome == "sharp-degrade"
    assert not found.judge(row(reason="same-bits")).is_different


@given(st.integers(0, 2**32 - 1))
def test_replicas_themselves_are_seldom_beyond(seed):
    """Each of 21 against the other 20: at most the level, whatever the law of the noise."""
    rng = np.random.default_rng(seed)
    accuracy, loss = rng.choice([rng.normal, rng.standard_cauchy])(size=(2, 21))
    beyond = 0
    for out in range(21):
        rest = [i for i in range(21) if i != out]
        floor = replace(FLOOR, accuracy=tuple(accuracy[rest]), loss=tuple(loss[rest]))
        golden = TrainingJudge(FOUND, FLOORS, Thresholds()).golden_curves(0)
        ending = replace(golden, test_accuracy=golden.test_accuracy + accuracy[out], same_bits=False)
        beyond += NoiseFloorTest(floor, Thresholds().test_gap).is_beyond_noise(golden, ending, float(loss[out]))
    assert beyond <= 1  # of 21 exchangeable ones one is the furthest out


# -- groups -------------------------------------------------------------------------------------------------------------

OUTCOMES = list(TrainingOutcome)


@st.composite
def trials(draw, least=0, most=25):
    found = []
    for k in range(draw(st.integers(least, most))):
        corrupted = InjectionPoint(
            draw(st.integers(0, STEPS - 1)),
            "op:x/fwd/out",
            draw(st.sampled_from(["fwd", "grad_in", "grad_wt"])),
            draw(st.sampled_from(["conv", "fc"])),
            draw(st.sampled_from(["RD", "WT", "ZERO"])),
        )
        outcome = draw(st.sampled_from(OUTCOMES))
        reals = st.floats(0, 1e38) | st.sampled_from([0.0, 1.0, 2.0, 100.0, 1e4, 1e8, math.inf, math.nan])
        one = replace(
            row(k),
            injection=corrupted,
            injected_max=draw(reals),
            reference_max=draw(reals),
            history_magnitudes=draw(watched()),
        )
        alone = draw(st.sampled_from(OUTCOMES)) if outcome == "masked-benign" else outcome
        found.append(JudgedTrial(one, outcome, alone))
    return found


@st.composite
def watched(draw):
    value = st.sampled_from([0.1, 1.0, 9.9, 20.0, 300.0, 1e6, math.inf])
    count = draw(st.integers(0, 3))
    there = [True, draw(st.booleans()), draw(st.booleans())]
    return np.array([[draw(value) if t else math.nan for t in there] for _ in range(count)]).reshape(count, 3)


def check_interval(found, events, n):
    """Against scipy's own beta quantiles."""
    assert found.n == n
    if not n:
        assert (found.estimate, found.low, found.high) == (None, 0.0, 1.0)
        return
    tail = (1 - CONFIDENCE) / 2
    assert found.estimate == events / n
    assert found.low == pytest.approx(beta.ppf(tail, events, n - events + 1) if events else 0.0, abs=1e-9)
    assert found.high == pytest.approx(beta.ppf(1 - tail, events + 1, n - events) if events < n else 1.0, abs=1e-9)


@given(trials(least=1))
def test_counts_of_groups_add_up(found):
    whole = make_trial_group("all", found, CONFIDENCE)
    harmful = sum(one.outcome.harmful for one in found)
    latent = sum(one.outcome.latent for one in found)
    check_interval(whole.different, sum(not one.by_implementation.startswith("masked") for one in found), len(found))
    check_interval(whole.harmful, harmful, len(found))
    check_interval(whole.latent, latent, len(found))
    for name, groups in groups_by_attribute(found, FOUND, CONFIDENCE).items():
        assert sum(g.n for g in groups) == whole.n, name
        assert sum((Counter(g.counts) for g in groups), Counter()) == Counter(whole.counts)
        assert [g.n for g in groups] == sorted((g.n for g in groups), reverse=True)
        for g in groups:
            assert sum(g.counts.values()) == g.n
    (optimizer,) = groups_by_attribute(found, FOUND, CONFIDENCE)["optimizer"]
    assert optimizer.name == "AdamW and SGD"


def test_parts_of_the_run_are_quarters():
    found = [
        JudgedTrial(row(k, step=k), TrainingOutcome.MASKED_BENIGN, TrainingOutcome.MASKED_BENIGN) for k in range(STEPS)
    ]
    parts = groups_by_attribute(found, FOUND, CONFIDENCE)["part of the run"]
    assert {(g.name, g.n) for g in parts} == {
        (f"steps {first} to {first + 9}", 10) for first in (0, 10, 20, 30)
    }  # fmt: skip
    odd = replace(FOUND, steps=7)
    names = {g.name for g in groups_by_attribute(found[:7], odd, CONFIDENCE)["part of the run"]}
    assert names == {"steps 0 to 1", "steps 2 to 3", "steps 4 to 5", "steps 6 to 6"}


@given(trials())
def test_backward_is_held_against_forward_by_the_fault_models_of_both(found):
    contrasts = {c.name: c for c in backward_against_forward(found, CONFIDENCE)}
    sides = {
        side: [one for one in found if (one.row.injection.phase == "fwd") == (side == "fwd")]
        for side in ("fwd", "back")
    }
    both = {one.row.injection.model for one in sides["fwd"]} & {one.row.injection.model for one in sides["back"]}
    if not both:
        assert contrasts == {}
        return
    assert list(contrasts) == ["different", "harmful", "latent"]
    for name, told in (
        ("different", lambda one: one.is_different),
        ("harmful", lambda one: one.outcome.harmful),
        ("latent", lambda one: one.outcome.latent),
    ):
        for side, interval in (("back", contrasts[name].one), ("fwd", contrasts[name].other)):
            own = [one for one in sides[side] if one.row.injection.model in both]
            check_interval(interval, sum(map(told, own)), len(own))
        difference = contrasts[name].difference
        assert difference.estimate == pytest.approx(contrasts[name].one.estimate - contrasts[name].other.estimate)
        assert difference.low <= difference.estimate <= difference.high
        assert "joint over 3" in difference.method


# -- which values precede harm -----------------------------------------------------------------------------------------


def judged(k, outcome, *seen, alone=None):
    one = row(k, history_magnitudes=np.array(seen, dtype=float).reshape(-1, 3))
    return JudgedTrial(one, TrainingOutcome(outcome), TrainingOutcome(alone or outcome))


def test_conditions_by_hand():
    """Golden's largest first moment is 0.5 + 39/40, its second 0.01; moving statistics there are none."""
    most = 0.5 + 39 / 40
    found = [
        judged(0, "slow-degrade", [11 * most, 0.01, math.nan], [most, 0.01, math.nan]),
        judged(1, "low-test", [most, 2.0, math.nan]),
        judged(2, "sharp-degrade", [math.inf, math.inf, math.nan]),
        judged(3, "sharp-slow-degrade", [most, 0.01, math.nan]),  # nothing foretold it
        judged(
            4, "masked-benign", [most, 0.02, math.nan], [1, 1, math.nan], [20 * most, 1, math.nan], alone="low-test"
        ),
        judged(5, "masked-bitwise", [most, 0.01, math.nan]),
        judged(6, "immediate-nan", [math.inf, 0.01, math.nan]),  # harm with an error or a loss that is not finite
        judged(7, "crashed"),  # left out
    ]
    where = condition_points(found, FOUND)
    assert where[0].ratios == pytest.approx((11, 1, None))
    assert where[2].ratios == (math.inf, math.inf, None)
    assert where[4].ratios == pytest.approx((20, 100, None))
    assert where[7].ratios == (None, None, None)
    table = {
        (c.kind, c.factor): (c.true_positives, c.false_negatives, c.false_positives, c.true_negatives)
        for c in necessary_condition_tables(found, where, CONFIDENCE)
    }
    assert table == {
        ("first", 10.0): (2, 2, 1, 1),
        ("first", 100.0): (1, 3, 0, 2),
        ("first", 1e4): (1, 3, 0, 2),
        ("second", 10.0): (2, 2, 1, 1),
        ("second", 100.0): (2, 2, 0, 2),
        ("second", 1e4): (1, 3, 0, 2),
        ("any", 10.0): (3, 1, 1, 1),
        ("any", 100.0): (2, 2, 0, 2),
        ("any", 1e4): (1, 3, 0, 2),
    }
    loud = {
        (c.kind, c.factor): (c.visible_harm_with, c.visible_harm_without)
        for c in necessary_condition_tables(found, where, CONFIDENCE)
    }
    assert {kind: {loud[kind, factor] for factor in FACTORS} for kind in ("first", "second", ANY)} == {
        "first": {(1, 0)},
        "second": {(0, 1)},
        ANY: {(1, 0)},
    }
    different = {(c.kind, c.factor): c.different.estimate for c in necessary_condition_tables(found, where, CONFIDENCE)}
    assert different["any", 10.0] == 4 / 5  # with the trial that is latent harm by implementation noise alone
    assert different["any", 100.0] == 2 / 5
    for c in necessary_condition_tables(found, where, CONFIDENCE):
        check_interval(c.sensitivity, c.true_positives, c.true_positives + c.false_negatives)
        check_interval(c.specificity, c.true_negatives, c.true_negatives + c.false_positives)


@given(trials())
def test_contingency_tables_have_every_trial_that_was_watched(found):
    where = condition_points(found, FOUND)
    lived = [one for one in found if len(one.row.history_magnitudes)]
    for c in necessary_condition_tables(found, where, CONFIDENCE):
        assert c.true_positives + c.false_negatives == sum(one.outcome.latent for one in lived)
        assert c.false_positives + c.true_negatives == sum(not one.outcome.harmful for one in lived)
        assert c.visible_harm_with + c.visible_harm_without == sum(
            one.is_harmful and not one.outcome.latent for one in lived
        )
    tables = {(c.kind, c.factor): c for c in necessary_condition_tables(found, where, CONFIDENCE)}
    for factor in FACTORS:
        assert tables[ANY, factor].true_positives >= max(
            (t.true_positives for (_, f), t in tables.items() if f == factor), default=0
        )


def test_a_largest_value_of_zero_has_no_multiples():
    still = replace(FOUND, history_magnitudes=((0.0, None, 3.0),) * STEPS)
    (point,) = condition_points([judged(0, "low-test", [5.0, 5.0, 6.0])], still)
    assert point.ratios == (None, None, 2.0)


# -- the guard ----------------------------------------------------------------------------------------------------------


@given(trials(), st.data())
@pytest.mark.slow
def test_every_harmful_trial_that_met_the_guard_has_one_size(found, data):
    reasons = st.sampled_from(["recovered", "missed", "stopped", "raised", "crash"])
    again = {
        one.row.trial: replace(
            row(reason=data.draw(reasons)),
            trial=one.row.trial._replace(target="guarded:random"),
            detected_after=data.draw(st.none() | st.integers(-1, 5)),
            bit_identical=data.draw(st.booleans()),
            error="step 3: first moment of fc.weight/exp_avg (max) is 3, baseline 1 (calibrated)",
        )
        for one in found
        if data.draw(st.integers(0, 5))
    }
    result = guard_result(found, again, CONFIDENCE)
    different = [again[one.row.trial] for one in found if one.is_different and one.row.trial in again]
    if not different:
        assert result is None
        return
    pairs = [(one, again[one.row.trial]) for one in found if one.outcome.harmful and one.row.trial in again]
    assert result.all_harmful.n == len(pairs)
    assert sum(part.n for part in result.sizes) == len(pairs)
    assert len(result.sizes) == len(SIZES) + 1

    def caught(rows):
        own = [
            r
            for r in rows
            if r.detected_after is not None and r.detected_after <= DETECTION_STEPS and r.end_reason != "stopped"
        ]
        return len(rows), len(own), sum(r.bit_identical for r in own)

    assert (result.different.n, result.different.detected_in_time, result.different.recovered_identical) == caught(
        different
    )
    assert (
        result.all_harmful.n,
        result.all_harmful.detected_in_time,
        result.all_harmful.recovered_identical,
    ) == caught([r for _, r in pairs])
    assert sum(part.detected_in_time for part in result.sizes) == result.all_harmful.detected_in_time
    assert sum(part.recovered_identical for part in result.sizes) == result.all_harmful.recovered_identical
    large = [r for one, r in pairs if relative_injected_size(one.row) > 1e4]
    assert (
        result.large_harmful.n,
        result.large_harmful.detected_in_time,
        result.large_harmful.recovered_identical,
    ) == caught(large)
    assert result.large_harmful.n == sum(part.n for part in result.sizes[3:])
    assert result.late_alarms == sum(
        r.detected_after is not None and r.detected_after > DETECTION_STEPS for _, r in pairs
    )
    assert result.stopped == sum(r.end_reason == "stopped" for _, r in pairs)
    told = sum(r.detected_after is not None for _, r in pairs)
    assert result.alarms == ({"first moment": told} if told else {})
    for part in (*result.sizes, result.different, result.all_harmful, result.large_harmful):
        assert part.share == clopper_pearson(part.detected_in_time, part.n, CONFIDENCE)


@pytest.mark.parametrize(
    ("written", "usual", "expected"),
    [
        (6.0, 2.0, 3.0),
        (0.0, 2.0, 0.0),
        (math.inf, 2.0, math.inf),
        (5.0, 0.0, math.inf),
        (0.0, 0.0, 0.0),
        (math.inf, math.inf, math.inf),
        (math.nan, 2.0, 0.0),
        (math.nan, math.nan, 0.0),
        (5.0, math.inf, 0.0),
    ],
)
def test_sizes(written, usual, expected):
    assert relative_injected_size(row(injected_max=written, reference_max=usual)) == expected


@pytest.mark.parametrize("edge", SIZES)
def test_a_size_at_a_limit_is_of_the_smaller_class(edge):
    one = JudgedTrial(row(injected_max=edge, reference_max=1.0), TrainingOutcome.LOW_TEST, TrainingOutcome.LOW_TEST)
    again = {one.row.trial: row(reason="missed")}
    result = guard_result([one], again, CONFIDENCE)
    assert [part.n for part in result.sizes].index(1) == SIZES.index(edge)


# -- cost and failures --------------------------------------------------------------------------------------------------


def test_cost_by_hand():
    rows = [
        row(step=10),
        row(step=30, reason="same-bits"),
        row(step=0, reason="horizon"),
        row(step=20, reason="raised"),
    ]
    found = cost([JudgedTrial(r, TrainingOutcome.MASKED_BENIGN, TrainingOutcome.MASKED_BENIGN) for r in rows], FOUND)
    assert found.steps == pytest.approx((30 + 1 + 5 + 0) / 4 / STEPS)
    assert found.steps_without_early_end == pytest.approx((30 + 10 + 40 + 20) / 4 / STEPS)
    assert found.seconds == 0.5
    assert found.per_hour == 3600
    assert found.end_reasons == {"end": 1, "same-bits": 1, "horizon": 1, "raised": 1}
    assert set(found.end_reasons) <= set(END_REASONS)


def test_failures_are_below_the_worst_replica_by_the_margin():
    least = 0.7
    for test, expected in ((0.7, False), (0.6999, True), (0.9, False), (math.nan, True), (-math.inf, True)):
        assert (
            has_not_converged(
                JudgedTrial(row(test=test), TrainingOutcome.MASKED_BENIGN, TrainingOutcome.MASKED_BENIGN), least
            )
            == expected
        )


def test_failure_rates_of_flip_flops_are_raw_rates_times_shares():
    def one(k, outcome, model):
        judged_one = judged(k, outcome)
        at = judged_one.row.injection._replace(model=model)
        return replace(judged_one, row=replace(judged_one.row, injection=at))

    found = [one(k, "low-test" if k < 3 else "masked-benign", f"neuron/{k % 2}") for k in range(12)]
    found += [one(20, "masked-benign", "weight/RD"), one(21, "masked-benign", "other")]
    baseline = SimpleNamespace(raw_fit={"neuron": 40.0, "weight": 8.0, "input": 3.0})
    rates = {rate.name: rate for rate in flip_flop_rates(found, baseline, 0.95)}
    assert set(rates) == {"neuron", "weight"}
    expected = clopper_pearson(3, 12, 0.95)
    neuron = rates["neuron"].harmful
    assert (neuron.estimate, neuron.low, neuron.high) == pytest.approx((10.0, 40 * expected.low, 40 * expected.high))
    assert rates["weight"].different.estimate == 0
    assert rates["weight"].raw == 8.0
