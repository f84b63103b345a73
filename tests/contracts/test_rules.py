"""What every rule must do, whatever it compares. A new rule joins by its row in `RULES`."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.detectors.rule import ALARM, NORMAL, RuleStream, judge_recording
from unsilent.detectors.rules import (
    PRESETS,
    RULES,
    format_rule,
    make_rule,
    rule_class,
    rule_thresholds,
    rules_of_preset,
)
from unsilent.detectors.series import FEATURES, STATISTICS, Recording, Series

STEPS, N = 260, 6
IGNORES_NONFINITE = ("megatron-large",)
"""Documented so."""
OTHER_THRESHOLDS = {
    "robust-z": "robust-z:threshold=9,warm_up=30",
    "asd-v1": "asd-v1:upper_alarm=2e6,learns_alarms=false",
    "asd-v2": "asd-v2:jump_warning=3,c_min_steps=50",
    "asd-v3": "asd-v3:decay=0.9",
    "asd-combined": "asd-combined:grad_sample_interval=10,keeps_uncounted=no",
    "megatron-large": "megatron-large:factor=20",
    "loss-spike": "loss-spike:window=20",
    "update-rms": "update-rms:deviations=6",
}

pytestmark = pytest.mark.parametrize("name", RULES)


def rule_of(name):
    """With every parameter judged, so that no rule depends on the place of a series."""
    return make_rule(name + (":grad_sample_interval=1" if name == "asd-combined" else ""))


def series_of(rule, n=N):
    """Series that the rule reads."""
    read = [(f, s) for f in FEATURES for s in STATISTICS if rule.reads(Series(f, "w", s, 100, 2))]
    assert read, "a rule that reads nothing"
    return [Series(read[i % len(read)][0], f"w{i}", read[i % len(read)][1], 100, 2) for i in range(n)]


def noisy(seed=0, n=N):
    """Values with spikes, drops and gaps: [steps, n] each."""
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(size=(STEPS, n)) * 0.3 + rng.normal(size=n) * 4)
    for factor in (1e9, 30.0, 1e-6, 0.0, np.nan, np.inf):
        values[rng.integers(0, STEPS, 3), rng.integers(0, n, 3)] *= factor
    return np.where(np.isnan(values), np.nan, values), rng.random((STEPS, n)) < 0.8


def run(rule, values, seen, state=None):
    state = rule.initial_state(series_of(rule, values.shape[1])) if state is None else state
    judged = []
    for step in range(len(values)):
        state, one = rule.judge(state, values[step], seen[step], float(step))
        judged.append(one)
    return state, judged


def frozen_arrays(state):
    for one in state or ():
        if isinstance(one, np.ndarray):
            one.setflags(write=False)
    return state


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_equal(tuple(one), tuple(other))


def assert_equivalent(first, second):
    """The same but for the order of sums, which depends on the shape."""
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_allclose(one[1:], other[1:], rtol=1e-9)


def test_arguments_are_not_changed_and_the_same_state_gives_the_same_answer(name):
    rule, (values, seen) = rule_of(name), noisy()
    values.setflags(write=False)
    seen.setflags(write=False)
    state = frozen_arrays(rule.initial_state(series_of(rule)))
    for step in range(STEPS):
        before = pickle.dumps(state)
        following, judgement = rule.judge(state, values[step], seen[step], 60.0 * step)
        again, same = rule.judge(pickle.loads(before), values[step], seen[step], 60.0 * step)
        assert pickle.dumps(state) == before
        assert_same([judgement], [same])
        np.testing.assert_equal(following, again)
        assert judgement.levels.dtype == np.int8
        assert judgement.levels.shape == judgement.scores.shape == judgement.baselines.shape == (N,)
        assert (judgement.scores[judgement.levels == ALARM] >= 1).all()
        assert not (judgement.scores[judgement.levels != ALARM] > 1 + 1e-9).any()
        state = frozen_arrays(following)


def test_what_was_not_seen_is_normal_and_changes_nothing(name):
    rule, (values, seen) = rule_of(name), noisy(1)
    state, _ = run(rule, values, seen)
    for strange in (np.nan, np.inf, 1e300, 0.0):
        following, judgement = rule.judge(state, np.full(N, strange), np.zeros(N, bool), 1e6)
        np.testing.assert_equal(following, state)
        assert (judgement.levels == NORMAL).all()
        assert np.isnan(judgement.scores).all()
        assert np.isnan(judgement.baselines).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_an_alarm_at_once_and_later(name, value):
    rule, (values, seen) = rule_of(name), noisy(2)
    values = np.where(np.isfinite(values), values, 1.0)
    states = [rule.initial_state(series_of(rule)), run(rule, values, seen)[0]]
    for state in states:
        following, judgement = rule.judge(state, np.full(N, value), np.ones(N, bool), 300.0)
        if name in IGNORES_NONFINITE:
            assert (judgement.levels == NORMAL).all()
            continue
        assert (judgement.levels == ALARM).all()
        assert np.isposinf(judgement.scores).all()
        # It leaves no mark that would hide or feign others: what is usual is still usual.
        usual = np.array([values[seen[:, i], i][-1] for i in range(N)])
        if state is states[1]:
            _, after = rule.judge(following, usual, np.ones(N, bool), 301.0)
            _, without = rule.judge(state, usual, np.ones(N, bool), 301.0)
            np.testing.assert_array_equal(after.levels, without.levels)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, 1e3])
def test_a_constant_series_never_raises_an_alarm(name, value):
    values = np.full((STEPS, N), value)
    _, judged = run(rule_of(name), values, np.ones_like(values, bool))
    assert not any(one.levels.any() for one in judged)


def test_the_order_of_series_does_not_matter_and_they_are_independent(name):
    rule, (values, seen) = rule_of(name), noisy(3)
    series, order = series_of(rule), np.array([3, 1, 5, 0, 4, 2])
    _, judged = run(rule, values, seen)
    state = rule.initial_state([series[i] for i in order])
    _, permuted = run(rule, values[:, order], seen[:, order], state)
    assert_equivalent([tuple(part[order] for part in one) for one in judged], permuted)
    for i in range(N):
        _, alone = run(rule, values[:, [i]], seen[:, [i]], rule.initial_state([series[i]]))
        assert_equivalent([tuple(part[[i]] for part in one) for one in judged], alone)


def test_a_recording_is_judged_as_a_live_stream(name):
    rule, (values, seen) = rule_of(name), noisy(4)
    others = [Series(f, "x", s) for f in FEATURES for s in STATISTICS if not rule.reads(Series(f, "x", s))]
    series = (*others, *series_of(rule))
    values = np.concatenate([np.ones((STEPS, len(others))), values], axis=1)
    seen = np.concatenate([np.ones((STEPS, len(others)), bool), seen], axis=1)
    read, whole = judge_recording(rule, Recording(series, values, seen, np.arange(STEPS) * 60.0))
    assert read == series[len(others) :]
    stream = RuleStream(rule, series)
    for step in range(STEPS):
        one = stream.judge(values[step], seen[step], 60.0 * step)
        assert_same([one], [tuple(part[step] for part in whole)])


def test_a_state_can_be_kept_and_put_back(name):
    rule, (values, seen) = rule_of(name), noisy(5)
    kept, _ = run(rule, values[:100], seen[:100])
    _, first = run(rule, values[100:], seen[100:], kept)
    _, second = run(rule, values[100:], seen[100:], pickle.loads(pickle.dumps(kept)))
    assert_same(first, second)


def test_no_series_is_no_error(name):
    rule = rule_of(name)
    _, judgement = rule.judge(rule.initial_state([]), np.zeros(0), np.zeros(0, bool), 0.0)
    assert judgement.levels.shape == (0,)


def test_text_and_json_make_the_same_rule(name):
    assert format_rule(make_rule(name)) == name
    assert rule_class(name).name == name
    for text in (name, OTHER_THRESHOLDS.get(name, name)):
        rule = make_rule(text)
        assert make_rule(format_rule(rule)) == rule
        assert type(rule)(**json.loads(json.dumps(rule_thresholds(rule)))) == rule
    assert (
        (make_rule(OTHER_THRESHOLDS[name]) != make_rule(name))
        if name in OTHER_THRESHOLDS
        else not rule_thresholds(rule)
    )


def test_thresholds_that_make_no_sense_are_named(name):
    for field, value in rule_thresholds(make_rule(name)).items():
        if isinstance(value, bool):
            continue
        for wrong in ("-1", *(["nan", "inf"] if isinstance(value, float) else [])):
            with pytest.raises(UsageError, match=f"rule '{name}': .*{field}"):
                make_rule(f"{name}:{field}={wrong}")


def test_every_rule_is_in_a_preset(name):
    assert any(one.name == name for one in rules_of_preset("all"))
    assert all(make_rule(text) for texts in PRESETS.values() for text in texts)
