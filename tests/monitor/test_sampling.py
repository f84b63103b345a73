"""Sampling as a pure function: the budget is kept by the model of cost that it is computed from."""

from __future__ import annotations

import itertools
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.basics.errors import UsageError
from unsilent.monitor.sampling import (
    AIM,
    FIRST_STEPS,
    GRADIENT_SHARE,
    LONGEST,
    MOST_ROWS,
    READING_SHARE,
    READING_UNSEEN,
    CostMeter,
    Costs,
    SampleIntervals,
    SamplingControl,
    fitting_intervals,
    fitting_rows,
    is_look,
    share_at_longest,
)
from unsilent.monitor.settings import MonitorSettings
from unsilent.monitor.signals.trained_parameters import in_turn, part_in_turn

NEVER_LONGER = SampleIntervals(LONGEST, LONGEST, LONGEST)
seconds = st.floats(0, 0.5)
intervals = st.builds(SampleIntervals, *3 * [st.integers(1, LONGEST)])
costs = st.builds(
    lambda bare, *parts: Costs(50, 50, bare + sum(parts), *parts),
    st.floats(1e-3, 1000), seconds, seconds, seconds, seconds,
)  # fmt: skip
budgets = st.floats(0.01, 2)


def cost_with(now, costs, then):
    """The costs with other intervals: reading costs in proportion to how much is read."""
    parts = ("gradients", "values", "state")
    after = {part: getattr(costs, part) * getattr(now, part) / getattr(then, part) for part in parts}
    return costs._replace(**after, step=costs.step - costs.monitor_seconds + sum(after.values()) + costs.fixed)


@given(intervals, costs, budgets)
def test_the_budget_is_kept_wherever_that_is_possible(now, costs, budget):
    then = fitting_intervals(now, costs, budget)
    assert all(1 <= one <= LONGEST for one in (then.gradients, then.values, then.state))
    if then != NEVER_LONGER:
        allowed = (costs.step - costs.monitor_seconds) * AIM * budget / 100
        assert cost_with(now, costs, then).monitor_seconds <= allowed * (1 + 1e-9)


@given(intervals, costs, budgets)
def test_gradients_come_first_and_take_no_more_than_their_share(now, costs, budget):
    then = fitting_intervals(now, costs, budget)
    room = (costs.step - costs.monitor_seconds) * AIM * budget / 100 - costs.fixed
    if room > 0 and then.gradients < LONGEST:
        assert costs.gradients * now.gradients / then.gradients <= GRADIENT_SHARE * room * (1 + 1e-9)


@given(intervals, costs, budgets)
def test_what_fits_stays(now, costs, budget):
    then = fitting_intervals(now, costs, budget)
    again = fitting_intervals(then, cost_with(now, costs, then), budget)
    # What comes later may use what gradients left free by rounding up.
    if then.longest < LONGEST:
        assert again.gradients == then.gradients
        assert again.values <= then.values


@given(intervals, costs, budgets, st.floats(1, 2))
def test_a_larger_budget_reads_no_less(now, costs, budget, factor):
    # By the part that an interval may be longer than needed, so that it does not change all the time.
    small, large = (fitting_intervals(now, costs, b) for b in (budget, min(2.0, budget * factor)))
    assert large.gradients <= max(small.gradients, now.gradients)


def test_nothing_fits_into_no_room():
    assert fitting_intervals(SampleIntervals(1, 2, 4), Costs(10, 10, 1.0, 0.1, 0.1, 0.1, 0.1), 0.5) == NEVER_LONGER
    longest = Costs(10, 10, 0.4 + 0.1 + 0.2 / LONGEST, 0.1 / LONGEST, 0.0, 0.1 / LONGEST, 0.1)
    assert share_at_longest(SampleIntervals(1, 2, 1), Costs(10, 10, 0.7, 0.1, 0.0, 0.1, 0.1)) == pytest.approx(
        longest.share
    )


def test_costs_are_looked_at_often_in_the_beginning():
    assert [step for step in range(210) if is_look(step)] == [4, 10, 20, 40, 50, 100, 150, 200]


@given(st.integers(1, 200), st.integers(0, 10_000), st.integers(1, 70))
def test_every_tensor_has_its_turn_once_in_an_interval(count, step, interval):
    for turns in (in_turn, part_in_turn):
        seen = [n for s in range(step, step + interval) for n in turns(range(count), s, interval)]
        assert sorted(seen) == list(range(count))
    assert in_turn(range(count), step, interval) == [n for n in range(count) if (n + step) % interval == 0]


def test_parts_of_the_state_are_a_quarter_at_least():
    assert [len(part_in_turn(range(64), step, 16)) for step in range(16)] == [16, 0, 0, 0] * 4
    assert [len(part_in_turn(range(64), step, 4)) for step in range(4)] == [16] * 4


@pytest.mark.parametrize("text", ["fixed:0", "fixed:", "fixed:-1", "fixed:5000", "always", "fixed:1.5", "fixed:²"])
def test_malformed_sampling_is_refused(text):
    with pytest.raises(UsageError, match="sampling|R of"):
        MonitorSettings(sampling=text)


def test_fixed_intervals_never_change(monkeypatch):
    meter = CostMeter(nothing())
    control = SamplingControl(MonitorSettings(sampling="fixed:7"), meter)
    for step in range(100):
        control.look(step)
        assert control.agree(control.wanted, step) is None
    assert control.intervals == SampleIntervals(7, 7, 7)


def nothing():
    """Seconds of functions of the monitor, none so far."""
    return {"gradients": 0.0, "values": 0.0, "state": 0.0, "checks": 0.0}


def test_the_meter_counts_what_the_time_of_functions_does_not_show():
    seconds = nothing()
    meter = CostMeter(seconds)
    seconds.update(gradients=1.0, values=2.0, state=4.0, checks=8.0)
    meter.fixed = 16.0
    costs = meter.since_last_look(10, 1)
    assert costs[3:] == pytest.approx([READING_UNSEEN * one for one in (1, 2, 4, 16)] + [8])
    assert meter.seconds() == pytest.approx(costs.monitor_seconds)
    assert costs.monitor_seconds > sum(seconds.values()) + meter.fixed


def test_costs_are_a_share_of_the_time_since_the_beginning():
    meter = CostMeter(nothing())
    meter.fixed, now = 1.0, time.perf_counter()
    meter.begun = meter._looked = now - 100.0
    assert meter.share() == pytest.approx(READING_UNSEEN / 100, rel=1e-2)
    assert meter.since_last_look(10, 1).step == pytest.approx(100.0, rel=1e-2)


def controlled(meter, steps, cost, **options):
    """A control after so many steps of 100 s, each of which costs the monitor something if it is read."""
    control, step = SamplingControl(MonitorSettings(**options), meter), 0
    while step < steps:
        step += 1 if control.reads_all else control.intervals.rows
        meter._looked -= 100.0 * control.intervals.rows  # as if so much time had passed
        meter.fixed += cost
        control.look(step)
        control.agree(control.wanted, step)
    return control


def test_a_monitor_that_cannot_keep_its_budget_says_so_once(caplog):
    control = controlled(CostMeter(nothing()), 100, 10.0, mode="strict")
    assert control.intervals == NEVER_LONGER
    assert control.longest_wait == LONGEST
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert (
        f"only once in {LONGEST} steps; rules that learn from 20 values begin to judge after {20 * LONGEST} steps"
        in caplog.text
    )
    assert "--sampling fixed:1" in caplog.text


def test_where_reading_every_step_costs_too_much_some_steps_are_not_read(caplog):
    """10 s of every step that is read, of 100 s without: one in 23 is 0.43 %."""
    control = controlled(CostMeter(nothing()), 5000, 10.0 / READING_UNSEEN)
    assert control.intervals == SampleIntervals(1, 1, 1, 23)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "to stay within 0.5 % of the time, one step in 23 is read" in caplog.text
    assert "judge from about step" in caplog.text


def test_the_larger_budget_of_the_first_steps_pays_for_none_after_them():
    """10 s of every step that is read, of 100 s without: one in 7 is 1.4 %, one in 23 is 0.43 %."""
    meter = CostMeter(nothing())
    control, reads = SamplingControl(MonitorSettings(), meter), [0]
    while reads[-1] < 3 * FIRST_STEPS:
        reads.append(30 if len(reads) == 1 else reads[-1] + control.intervals.rows)
        meter._looked -= 100.0 * (reads[-1] - reads[-2])
        meter.fixed += 10.0 / READING_UNSEEN
        control.look(reads[-1])
        control.agree(control.wanted, reads[-1])
    waits = [(later, later - earlier) for earlier, later in itertools.pairwise(reads[1:])]
    assert {wait for step, wait in waits if step < FIRST_STEPS} == {7}
    assert {wait for step, wait in waits if step >= FIRST_STEPS} == {23}


def test_where_reading_every_step_fits_all_are_read(caplog):
    control = controlled(CostMeter(nothing()), 5000, 0.1)
    assert control.intervals.rows == 1
    assert caplog.records == []


@given(intervals, costs, budgets, st.integers(1, 50), st.floats(0, 1))
def test_steps_that_are_read_take_no_more_than_the_budget(now, costs, budget, rows, checks):
    costs = costs._replace(rows=rows, step=costs.step + checks, checks=checks)
    result = fitting_rows(now, costs, budget)
    room = costs.bare * AIM * budget / 100
    parts = (
        costs.gradients * now.gradients
        + costs.values * now.values
        + costs.state * now.state / (1 if now.rows > 16 else 4)
    )
    row = (parts + costs.fixed) / rows
    assert 1 <= result <= MOST_ROWS
    assert result == MOST_ROWS or row / result <= max(READING_SHARE * room, room - checks / costs.steps) * (1 + 1e-9)


def test_the_costs_of_a_training_that_went_back_are_not_looked_at():
    meter = CostMeter(nothing())
    control = SamplingControl(MonitorSettings(), meter)
    control.look(50)
    before = control.wanted
    meter.fixed += 100.0
    control.look(40)
    assert control.wanted == before != NEVER_LONGER
