"""Megatron's largest value, spikes of the loss, spikes of updates; names and texts of rules."""

from __future__ import annotations

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.detectors.rule import ALARM, NORMAL
from unsilent.detectors.rules import make_rule, rules_of_preset
from unsilent.detectors.series import Series


def levels(text, values):
    rule = make_rule(text)
    state, result = rule.initial_state([Series("loss", "", "number")]), []
    for value in values:
        state, judgement = rule.judge(state, np.array([value]), np.array([True]), 0.0)
        result.append(int(judgement.levels[0]))
    return result


def test_megatron_freezes_the_largest_of_the_first_hundred():
    first = [1.0] * 50 + [3.0] + [1.0] * 49
    assert levels("megatron-large", [*first, 29.9, 30.0, 1e9, 30.0])[100:] == [NORMAL, ALARM, ALARM, ALARM]
    # A value among the first ones is never an alarm, and NaN is not counted.
    assert levels("megatron-large", [*[1.0] * 98, np.nan, 1e9, 1.0, 1e9])[-4:] == [NORMAL] * 4
    assert levels("megatron-large:samples=1,factor=2", [1.0, 2.0]) == [NORMAL, ALARM]


def test_a_spike_of_the_loss_is_three_times_the_mean_and_rises():
    assert levels("loss-spike", [2.0, 2.0, 5.9, 2.0]) == [NORMAL] * 4
    assert levels("loss-spike", [2.0, 2.0, 6.0, 2.0, 6.0]) == [NORMAL, NORMAL, ALARM, NORMAL, ALARM]
    assert levels("loss-spike", [2.0, -9.0]) == [NORMAL, NORMAL]  # falls
    assert levels("loss-spike:warmup=3", [2.0, 20.0, 200.0])[-1] == NORMAL
    # The window: only the last ten count.
    assert levels("loss-spike", [*[100.0] * 5, *[1.0] * 10, 3.5])[-1] == ALARM


def test_a_new_level_of_the_loss_is_learnt_after_a_while():
    result = levels("loss-spike", [*[1.0] * 20, *[9.0] * 20])
    assert result[20:28] == [ALARM] * 8
    assert set(result[28:]) == {NORMAL}


def test_updates_are_compared_with_their_running_mean_and_spread():
    rng = np.random.default_rng(0)
    steady = list(np.exp(rng.normal(size=300) * 0.05))
    assert levels("update-rms", [*steady, 4.0])[-1] == NORMAL
    assert levels("update-rms", [*steady, 6.0])[-1] == ALARM
    wild = list(np.exp(rng.normal(size=300) * 0.8))
    assert levels("update-rms", [*wild, 6.0])[-1] == NORMAL  # its spread is as large
    assert levels("update-rms", [*steady[:49], 1e9])[-1] == NORMAL  # warm-up
    result = levels("update-rms", [*steady, *[50.0] * 60])
    assert result[300:308] == [ALARM] * 8
    assert set(result[308:]) == {NORMAL}


def test_names_that_do_not_exist():
    with pytest.raises(UsageError, match="unknown rule 'robust_z'; did you mean 'robust-z'"):
        make_rule("robust_z:threshold=3")
    with pytest.raises(UsageError, match="unknown parameter of rule 'robust-z': 'treshold'; did you mean 'threshold'"):
        make_rule("robust-z:treshold=3")
    with pytest.raises(UsageError, match="robust-z.*threshold is 'x'; expected a value of type float"):
        make_rule("robust-z:threshold=x")
    with pytest.raises(UsageError, match="unknown preset 'asd'"):
        rules_of_preset("asd")
