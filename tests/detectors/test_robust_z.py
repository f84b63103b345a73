"""The robust z: beginning, zeros, new regimes, and what it never learns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.detectors.robust_z import RobustZ, median_and_deviation
from unsilent.detectors.rule import ALARM, NORMAL, WARNING
from unsilent.detectors.series import Series

RULE = RobustZ()


def run(values, rule=RULE, elements=100, state=None):
    """Levels and scores of one series, and the last state."""
    state = rule.initial_state([Series("gradient", "w", "max", elements, 2)]) if state is None else state
    levels, scores = [], []
    for value in values:
        state, judgement = rule.judge(state, np.array([value]), np.array([True]), 0.0)
        levels.append(int(judgement.levels[0]))
        scores.append(float(judgement.scores[0]))
    return levels, scores, state


def usual(steps, seed=0, spread=0.1, level=1.0):
    return list(level * np.exp(np.random.default_rng(seed).normal(size=steps) * spread))


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=12), min_size=1, max_size=5))
def test_median_and_deviation_of_any_columns(columns):
    window = 12
    ordered = np.array([sorted(one) + [np.inf] * (window - len(one)) for one in columns]).T
    median, deviation = median_and_deviation(ordered, np.array([len(one) for one in columns]))
    for one, middle, spread in zip(columns, median, deviation, strict=True):
        if not one:
            assert np.isnan([middle, spread]).all()
            continue
        assert middle == sorted(one)[len(one) // 2]
        assert spread == sorted(abs(x - middle) for x in one)[len(one) // 2]


@pytest.mark.parametrize("factor", [0.0, 1e-9, 30.0, 1e9, np.nan, np.inf])
def test_one_faulty_value_is_one_alarm_and_is_not_learnt(factor):
    before = run(usual(300))[2]
    levels, scores, after = run([factor], state=before)
    assert levels == [ALARM]
    assert scores[0] >= 1
    assert after.zeros == (factor == 0)
    for name in ("latest", "ordered", "learnt", "reach"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert run(usual(50, 1), state=after)[0] == [NORMAL] * 50


@given(st.floats(1e-6, 1e6), st.integers(0, 5))
def test_units_do_not_matter(level, seed):
    values = [*usual(150, seed), 4.0, 0.0, 200.0, *usual(5, 9)]
    plain = run(values)
    scaled = run([level * one for one in values])
    assert plain[0] == scaled[0]
    finite = [k for k, value in enumerate(values) if value]  # the score of 0 depends on the smallest number there is
    np.testing.assert_allclose(np.array(plain[1])[finite], np.array(scaled[1])[finite], rtol=1e-6)


def test_nothing_finite_is_judged_in_the_warm_up_and_limits_are_wide_at_first():
    levels, scores, _ = run([*usual(19), 1e9])
    assert levels == [NORMAL] * 20
    assert np.isnan(scores).all()
    assert run([*usual(30), 9000.0])[0][-1] != ALARM
    assert run([*usual(30), 12000.0])[0][-1] == ALARM
    assert run([*usual(200), 20.0])[0][-1] == ALARM


def test_a_large_clean_value_widens_the_limit_for_a_while():
    first = usual(200, spread=0.3)
    _, scores, state = run([*first, 8.0], RULE)
    assert 0.5 < scores[-1] < 1
    assert run([150.0], state=state)[0] != [ALARM]
    state = run(usual(2000, 3, spread=0.3), state=state)[2]
    assert run([150.0], state=state)[0] == [ALARM]


def test_zeros():
    assert run([0.0] * 300)[0] == [NORMAL] * 300  # always zero
    assert run([0.0, *usual(200), 0.0])[0] == [NORMAL] * 202  # zero was usual at the start
    assert run([*[0.0] * 200, *usual(200)])[0] == [NORMAL] * 400  # comes alive
    levels, _, state = run([*usual(200), *[0.0] * 8])
    assert levels[200:] == [ALARM, *[WARNING] * 7]  # dies: one alarm, then usual
    assert run([0.0] * 20, state=state)[0] == [NORMAL] * 20
    levels = run([*usual(200), *[0.0, 1.0] * 10])[0]
    assert levels[200:] == [ALARM, NORMAL] * 8 + [NORMAL] * 4  # comes and goes: each time, until it is usual


@pytest.mark.parametrize("factor", [1e-4, 50.0, 1e6])
def test_a_new_regime_is_one_alarm_and_is_learnt(factor):
    levels, _, state = run([*usual(300), *usual(200, 2, level=factor)])
    assert levels[300:308] == [ALARM, *[WARNING] * 7]
    assert levels[308:] == [NORMAL] * 192
    # What is usual now is judged as before.
    assert run([factor * 50], state=state)[0] == [ALARM]
    assert run([1.0 if factor > 1 else factor * 50], state=state)[0] == [ALARM]


def test_values_that_do_not_agree_are_alarms_each():
    assert run([*usual(300), 1e3, 1e6, 1e9, 1e12])[0][300:] == [ALARM] * 4


def test_a_single_element_may_come_close_to_zero():
    values = [*usual(300, spread=1.0), 3e-5]
    assert run(values, elements=100)[0][-1] == ALARM
    assert run(values, elements=1)[0][-1] != ALARM


def test_the_state_does_not_grow():
    assert run(usual(10))[2].latest.shape == run(usual(1000))[2].latest.shape
