"""Rules against references that go value by value: the ASD generations and the robust z."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles import rules_oracle
from unsilent.detectors.rules import make_rule
from unsilent.detectors.series import Series

RULES = {
    "asd-v1": lambda values: rules_oracle.absolute_and_jump(values, 7),
    "asd-v2": lambda values: rules_oracle.absolute_and_jump(values, 100),
    "asd-v1:jump_alarm=4,jump_warning=0.5,upper_alarm=1e4,upper_warning=50": lambda values: (
        rules_oracle.absolute_and_jump(values, 7, 1e4, 50, 4, 0.5)
    ),
    "asd-v3": rules_oracle.moving_average,
    "asd-v3:alarm_ratio=50,warning_ratio=3,decay=0.9": lambda values: rules_oracle.moving_average(values, 50, 3, 0.9),
    "asd-combined:grad_sample_interval=1": rules_oracle.combined,
    "asd-combined:grad_sample_interval=1,upper_thresh1=30,upper_thresh2=4,decay=0.9": lambda values: (
        rules_oracle.combined(values, 30, 4, 0.9)
    ),
    "robust-z": rules_oracle.robust_z,
}
SERIES = [Series("gradient", "w", "max", 100, 2)]


def levels(text, columns):
    """Levels of several columns, float64[steps, n], judged together."""
    rule, result = make_rule(text), []
    state = rule.initial_state(SERIES * columns.shape[1])
    for step, row in enumerate(columns):
        state, judgement = rule.judge(state, row, np.ones(len(row), bool), float(step))
        result.append(judgement.levels)
    return np.array(result).reshape(columns.shape)


@pytest.mark.parametrize("text", RULES)
def test_noise_with_faults_of_all_sizes(text):
    rng = np.random.default_rng(7)
    steps, n = 500, 40
    values = np.exp(
        rng.normal(size=(steps, n)) * rng.uniform(0.01, 0.8, n) + np.cumsum(rng.normal(size=(steps, n)), 0) * 0.02
    )
    faulty = rng.random((steps, n)) < 0.02
    values = np.where(faulty, values * np.exp(rng.normal(size=(steps, n)) * 6), values)
    values[rng.random((steps, n)) < 0.003] = 0
    values[rng.random((steps, n)) < 0.003] = np.nan
    values[300:, :5] *= 40  # a new regime
    values[350:, 5:8] = 0
    result = levels(text, values)
    assert set(np.unique(result)) == {0, 1, 2}
    for column in range(n):
        assert result[:, column].tolist() == RULES[text](values[:, column].tolist()), column


VALUES = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 1.5, 30.0, 1e3, 1e-5, float("nan"), float("inf")]), st.floats(1e-8, 1e8)),
    max_size=60,
)


@pytest.mark.parametrize("text", RULES)
@given(start=st.integers(0, 120), values=VALUES)
def test_any_values_after_usual_ones(text, start, values):
    usual = [1 + 0.3 * np.sin(17 * k) for k in range(start)]
    column = np.array([*usual, *values])
    assert levels(text, column[:, None])[:, 0].tolist() == RULES[text](column.tolist())
