"""The generations of ASD: what the documents say, and what follows from it for any values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oracles import rules_oracle
from unsilent.basics.errors import UsageError
from unsilent.detectors.asd_combined import AsdCombined
from unsilent.detectors.asd_v1 import AsdV1
from unsilent.detectors.asd_v2 import AsdV2
from unsilent.detectors.asd_v3 import AsdV3, AverageState, corrected_average
from unsilent.detectors.rule import ALARM, NORMAL, WARNING
from unsilent.detectors.series import Series

SEEN = np.array([True])


def run(rule, values, minutes=1.0, state=None):
    """Levels of one series, and the last state."""
    state = rule.initial_state([Series("gradient", "w", "max", 9, 2)]) if state is None else state
    result = []
    for step, value in enumerate(values):
        state, judgement = rule.judge(state, np.array([value]), SEEN, 60 * minutes * step)
        result.append(int(judgement.levels[0]))
    return result, state


def test_the_log_of_the_third_generation():
    """MindSpore's tutorial prints value 3.35e-8 and average 9.88e-10 at step 4: a scale of 2.5e-8, so nothing is wrong."""
    state = AverageState(np.array([9.88e-10]), np.array([4]))
    assert corrected_average(*state, 0.99)[0] == pytest.approx(2.507e-8, rel=1e-3)
    following, judgement = AsdV3().judge(state, np.sqrt([3.35e-8]), SEEN, 0.0)
    assert judgement.levels[0] == NORMAL
    assert judgement.scores[0] == pytest.approx(3.35e-8 / 2.507e-8 / 1e6, rel=1e-3)
    assert judgement.baselines[0] == pytest.approx(np.sqrt(2.507e-8), rel=1e-3)
    assert following.average[0] == pytest.approx(0.99 * 9.88e-10 + 0.01 * 3.35e-8)
    assert following.steps[0] == 5
    # With the divisor as it is printed on the page of the operator the limit would be beyond any value.
    assert 9.88e-10 / (1 - 0.99) ** 4 > 1e6 * 3.35e-8


@given(value=st.floats(1e-100, 1e100), steps=st.integers(1, 3000), decay=st.floats(0.5, 0.999))
def test_the_correction_gives_a_constant_back_after_any_number_of_steps(value, steps, decay):
    average = value * (1 - decay**steps)
    assert corrected_average(np.array([average]), np.array([steps]), decay)[0] == pytest.approx(value)


@given(st.floats(1e-10, 1e10))
def test_the_third_generation_judges_squares(usual):
    for factor, level in ((90.0, NORMAL), (110.0, WARNING), (990.0, WARNING), (1010.0, ALARM)):
        assert run(AsdV3(), [*[usual] * 30, factor * usual])[0][-1] == level
        assert run(AsdV3(), [usual, factor * usual])[0][-1] == level  # from the second value on


def test_the_third_generation_takes_the_first_value_above_zero_for_an_alarm():
    assert run(AsdV3(), [0.0, 0.0, 1e-9])[0] == [NORMAL, NORMAL, ALARM]


@given(factor=st.floats(1.0, 1e12), step=st.integers(0, 150))
def test_only_the_limit_of_the_value_holds_before_jumps_are_judged(factor, step):
    for rule in (AsdV1(), AsdV2()):
        values = [*[1.0] * step, factor]
        expected = ALARM if factor > 1e6 else WARNING if factor > 1e4 else NORMAL
        jump = ALARM if factor - 1 > 1e5 else WARNING if factor - 1 > 5e3 else NORMAL
        level = run(rule, values)[0][-1]
        assert level == (max(expected, jump) if step >= rule.c_min_steps else expected)


def test_a_jump_is_measured_in_ranges_so_far():
    usual = [1e-6, *[2e-6] * 9]
    assert run(AsdV1(), [*usual, 0.0099])[0][-1] == NORMAL
    assert run(AsdV1(), [*usual, 0.011])[0][-1] == WARNING
    assert run(AsdV1(), [*usual, 0.21])[0][-1] == ALARM
    # One large value early on hides every jump of the run: a weakness of the rule.
    assert run(AsdV1(), [1.0, *usual, 0.21])[0][-1] == NORMAL


@pytest.mark.parametrize("make", [AsdV1, AsdV2, AsdV3])
def test_an_alarm_is_learnt_only_where_the_training_goes_on(make):
    values = [*[1.0] * 120, 1e7]
    for learns in (True, False):
        rule = make(learns_alarms=learns)
        _, before = run(rule, values[:-1])
        levels, after = run(rule, values[-1:], state=before)
        assert levels == [ALARM]
        changed = any(not np.array_equal(one, other) for one, other in zip(before, after, strict=True))
        assert changed == learns
        _, warned = run(rule, [150.0 if make is AsdV3 else 2e4], state=before)
        assert any(not np.array_equal(one, other) for one, other in zip(before, warned, strict=True))


def test_thresholds_out_of_order():
    for make, wrong in (
        (AsdV1, {"upper_alarm": 5.0, "upper_warning": 5.0}),
        (AsdV2, {"jump_alarm": 4.0}),
        (AsdV3, {"alarm_ratio": 100.0}),
        (AsdCombined, {"upper_thresh1": 10.0}),
    ):
        with pytest.raises(UsageError, match=f"rule '{make.name}': thresholds out of order: {next(iter(wrong))} is"):
            make(**wrong)


COMBINED = AsdCombined(grad_sample_interval=1)


@given(count=st.integers(0, 30), zeros=st.integers(0, 30), factor=st.floats(1.0, 1e10))
def test_the_combined_rule_is_armed_by_ten_values_above_zero(count, zeros, factor):
    levels, state = run(COMBINED, [*[1.0] * count, *[0.0] * zeros, factor])
    assume(all(abs(factor / limit - 1) > 1e-5 for limit in (10, 1000)))
    assert levels[-1] == (NORMAL if count < 10 or factor < 10 else WARNING if factor < 1000 else ALARM)
    assert state.learnt[0] == count + (levels[-1] == NORMAL)


@given(st.lists(st.sampled_from([0.0, 1e-200, 1e-170, 1e-154, 1.0, 3.0, 50.0, 1e5]), max_size=60))
def test_the_combined_rule_ignores_values_whose_square_is_zero(values):
    """The rule knows the square only: one that is 0 in float64 neither arms it nor lowers its average."""
    levels, state = run(COMBINED, [*[1.0] * 9, *values, 1e4])
    assert levels == rules_oracle.combined([*[1.0] * 9, *values, 1e4])
    without, other = run(COMBINED, [*[1.0] * 9, *(value for value in values if value * value), 1e4])
    assert levels[-1] == without[-1]
    assert (state.learnt, state.average, state.previous) == (other.learnt, other.average, other.previous)


def test_a_sustained_fault_is_one_strike_then_only_a_warning():
    """A weakness of the rule: the previous value follows every value, so the jump is gone at the second one."""
    levels, state = run(COMBINED, [*[1.0] * 20, *[1e5] * 50])
    assert levels[20] == ALARM
    assert set(levels[21:]) == {WARNING}
    assert len(state.strikes) == 1


@pytest.mark.parametrize(("keeps", "uncounted"), [(True, 2), (False, 0)])
def test_strikes_are_counted_after_the_cool_down_and_within_the_window(keeps, uncounted):
    rule = AsdCombined(grad_sample_interval=1, keeps_uncounted=keeps)
    state = run(rule, [1.0] * 20)[1]
    struck_out = []
    for minute in (100, 101, 104.9, 105, 300, 584, 700):
        state, judgement = rule.judge(state, np.array([np.nan]), SEEN, 60.0 * minute)
        assert judgement.levels[0] == ALARM
        struck_out.append(state.struck_out)
    # 100, 105 and 300 are three counted ones within 480 minutes; 584 with 105 and 300 as well; 700 with 300 and 584, too.
    assert struck_out == [False, False, False, False, True, True, True]
    assert state.strikes == (300 * 60, 584 * 60, 700 * 60)
    assert state.uncounted == uncounted
    state, _ = rule.judge(state, np.array([1.0]), SEEN, 60.0 * (300 + 480.1))
    assert not state.struck_out


def test_every_so_many_parameters_of_two_dimensions_are_sampled():
    rule = AsdCombined()
    series = [Series("gradient", f"w{k}", "max", 9, 2) for k in range(7)]
    state, judgement = rule.judge(rule.initial_state(series), np.full(7, np.inf), np.ones(7, bool), 0.0)
    assert judgement.levels.tolist() == [ALARM, 0, 0, ALARM, 0, 0, ALARM]
    assert len(state.strikes) == 1
    assert not rule.reads(Series("gradient", "bias", "max", 9, 1))


@pytest.mark.parametrize("rule", [AsdV3(), AsdCombined()], ids=str)
def test_a_square_that_is_too_large_counts_as_not_finite_and_is_not_learnt(rule):
    levels, _ = run(rule, [*[1.0] * 20, 1e200, 1.0, 1e5, 1.0])
    assert levels[20:] == [ALARM, NORMAL, ALARM, NORMAL]
