"""Contract tests for rules that monitor a training."""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.basics.name_and_parameters import build_named
from unsilent.detectors.rule import ALARM, NORMAL, Judgement, Rule, RuleStream, judge_recording
from unsilent.detectors.rules import check_rule, format_rule, rule_thresholds
from unsilent.detectors.series import FEATURES, STATISTICS, Bools, Floats, Recording, Series

STEPS, N = 260, 6


def series_of(rule: Rule, n: int = N) -> list[Series]:
    """Some series that the rule reads."""
    read = [(f, s) for f in FEATURES for s in STATISTICS if rule.reads(Series(f, "w", s, 100, 2))]
    assert read, "a rule that reads nothing"
    return [Series(read[i % len(read)][0], f"w{i}", read[i % len(read)][1], 100, 2) for i in range(n)]


def noisy(seed: int = 0, n: int = N) -> tuple[Floats, Bools]:
    """Values with spikes, drops and gaps, and a mask of the values that were observed: [steps, n] each."""
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(size=(STEPS, n)) * 0.3 + rng.normal(size=n) * 4)
    for factor in (1e9, 30.0, 1e-6, 0.0, np.nan, np.inf):
        values[rng.integers(0, STEPS, 3), rng.integers(0, n, 3)] *= factor
    return np.where(np.isnan(values), np.nan, values), rng.random((STEPS, n)) < 0.8


def run(rule: Rule, values: Floats, seen: Bools, state: Any = None) -> tuple[Any, list[Judgement]]:
    """Judge some steps with a rule, and return its last state and the judgements."""
    state = rule.initial_state(series_of(rule, values.shape[1])) if state is None else state
    judged = []
    for step in range(len(values)):
        state, judgement = rule.judge(state, values[step], seen[step], float(step))
        judged.append(judgement)
    return state, judged


def frozen_arrays(state: Any) -> Any:
    """The state after making its arrays read-only."""
    for array in state if isinstance(state, tuple) else (state,):
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return state


def _parts(judgement: Judgement, places: Any) -> Judgement:
    return Judgement(*(part[places] for part in judgement))


def assert_same(first: Iterable[Judgement], second: Iterable[Judgement]) -> None:
    """Assert that all numbers in two lists of judgements are equal, where NaN equals NaN."""
    for left, right in zip(first, second, strict=True):
        np.testing.assert_equal(tuple(left), tuple(right))


def assert_equivalent(first: Iterable[Judgement], second: Iterable[Judgement]) -> None:
    """Assert that two lists of judgements are equal up to rounding in sums."""
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left[0], right[0])
        np.testing.assert_allclose(left[1:], right[1:], rtol=1e-9)


class RuleContract(ABC):
    """Tests of a rule.

    A subclass defines `make_rule`.

    Attributes:
        ignores_nonfinite: Whether the rule is documented to raise no alarm on NaN and infinity.
    """

    ignores_nonfinite: ClassVar[bool] = False

    @abstractmethod
    def make_rule(self) -> Rule:
        """The rule to test."""

    def test_it_has_the_methods_of_a_rule(self) -> None:
        assert check_rule(self.make_rule()).name

    def test_arguments_are_not_changed_and_the_same_state_gives_the_same_answer(self) -> None:
        rule, (values, seen) = self.make_rule(), noisy()
        values.setflags(write=False)
        seen.setflags(write=False)
        state = frozen_arrays(rule.initial_state(series_of(rule)))
        for step in range(STEPS):
            before = pickle.dumps(state)
            following, judgement = rule.judge(state, values[step], seen[step], 60.0 * step)
            again, same = rule.judge(pickle.loads(before), values[step], seen[step], 60.0 * step)  # noqa: S301 - our own
            assert pickle.dumps(state) == before
            assert_same([judgement], [same])
            np.testing.assert_equal(following, again)
            assert judgement.levels.dtype == np.int8
            assert judgement.levels.shape == judgement.scores.shape == judgement.baselines.shape == (N,)
            assert (judgement.scores[judgement.levels == ALARM] >= 1).all()
            assert not (judgement.scores[judgement.levels != ALARM] > 1 + 1e-9).any()
            state = frozen_arrays(following)

    def test_what_was_not_seen_is_normal_and_changes_nothing(self) -> None:
        rule, (values, seen) = self.make_rule(), noisy(1)
        state, _ = run(rule, values, seen)
        for strange in (np.nan, np.inf, 1e300, 0.0):
            following, judgement = rule.judge(state, np.full(N, strange), np.zeros(N, bool), 1e6)
            np.testing.assert_equal(following, state)
            assert (judgement.levels == NORMAL).all()
            assert np.isnan(judgement.scores).all()
            assert np.isnan(judgement.baselines).all()

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_an_alarm_at_once_and_later(self, value: float) -> None:
        rule, (values, seen) = self.make_rule(), noisy(2)
        values = np.where(np.isfinite(values), values, 1.0)
        states = [rule.initial_state(series_of(rule)), run(rule, values, seen)[0]]
        for number, state in enumerate(states):
            following, judgement = rule.judge(state, np.full(N, value), np.ones(N, bool), 300.0)
            if self.ignores_nonfinite:
                assert (judgement.levels == NORMAL).all()
                continue
            assert (judgement.levels == ALARM).all()
            assert np.isposinf(judgement.scores).all()
            # The value must not hide later anomalies or cause false ones: usual values are still usual.
            usual = np.array([values[seen[:, i], i][-1] for i in range(N)])
            if number == 1:
                _, after = rule.judge(following, usual, np.ones(N, bool), 301.0)
                _, without = rule.judge(state, usual, np.ones(N, bool), 301.0)
                np.testing.assert_array_equal(after.levels, without.levels)

    @pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, 1e3])
    def test_a_constant_series_never_raises_an_alarm(self, value: float) -> None:
        values = np.full((STEPS, N), value)
        _, judged = run(self.make_rule(), values, np.ones_like(values, bool))
        assert not any(judgement.levels.any() for judgement in judged)

    def test_the_order_of_series_does_not_matter_and_they_are_independent(self) -> None:
        rule, (values, seen) = self.make_rule(), noisy(3)
        series, order = series_of(rule), np.array([3, 1, 5, 0, 4, 2])
        _, judged = run(rule, values, seen)
        state = rule.initial_state([series[i] for i in order])
        _, permuted = run(rule, values[:, order], seen[:, order], state)
        assert_equivalent([_parts(judgement, order) for judgement in judged], permuted)
        for i in range(N):
            _, alone = run(rule, values[:, [i]], seen[:, [i]], rule.initial_state([series[i]]))
            assert_equivalent([_parts(judgement, [i]) for judgement in judged], alone)

    def test_a_recording_is_judged_as_a_live_stream(self) -> None:
        rule, (values, seen) = self.make_rule(), noisy(4)
        others = [Series(f, "x", s) for f in FEATURES for s in STATISTICS if not rule.reads(Series(f, "x", s))]
        series: Sequence[Series] = (*others, *series_of(rule))
        values = np.concatenate([np.ones((STEPS, len(others))), values], axis=1)
        seen = np.concatenate([np.ones((STEPS, len(others)), bool), seen], axis=1)
        recording = Recording(tuple(series), values, seen, np.arange(STEPS, dtype=np.float64) * 60)
        read, whole = judge_recording(rule, recording)
        assert read == series[len(others) :]
        stream = RuleStream(rule, series)
        for step in range(STEPS):
            assert_same([stream.judge(values[step], seen[step], 60.0 * step)], [_parts(whole, step)])

    def test_a_state_can_be_kept_and_put_back(self) -> None:
        rule, (values, seen) = self.make_rule(), noisy(5)
        middle_state, _ = run(rule, values[:100], seen[:100])
        _, first = run(rule, values[100:], seen[100:], middle_state)
        _, second = run(rule, values[100:], seen[100:], pickle.loads(pickle.dumps(middle_state)))  # noqa: S301 - our own
        assert_same(first, second)

    def test_no_series_is_no_error(self) -> None:
        rule = self.make_rule()
        _, judgement = rule.judge(rule.initial_state([]), np.zeros(0), np.zeros(0, bool), 0.0)
        assert judgement.levels.shape == (0,)

    def test_text_and_json_make_the_same_rule(self) -> None:
        rule = self.make_rule()
        assert build_named("rule", format_rule(rule), {rule.name: type(rule)}) == rule
        assert type(rule)(**json.loads(json.dumps(rule_thresholds(rule)))) == rule

    def test_thresholds_that_make_no_sense_are_named(self) -> None:
        """Negative and non-finite thresholds must raise a ``UsageError`` that names rule and threshold."""
        rule = self.make_rule()
        for field, value in rule_thresholds(rule).items():
            if isinstance(value, (bool, str)):
                continue
            for wrong in ("-1", *(["nan", "inf"] if isinstance(value, float) else [])):
                said = ""
                try:
                    build_named("rule", f"{rule.name}:{field}={wrong}", {rule.name: type(rule)})
                except UsageError as error:
                    said = str(error)
                assert field in said.partition(f"rule {rule.name!r}: ")[2], (
                    f"rule {rule.name!r} with {field}={wrong} "
                    + (f"is refused with {said!r}" if said else "is made without an error")
                    + f"; check {field} in __post_init__, for example with check_at_least of unsilent.detectors.thresholds, "
                    f'so that a UsageError says "rule {rule.name!r}: {field} is ..."'
                )
