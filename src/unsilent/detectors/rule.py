"""Interface of rules: pure functions of a state and the values of many series in one step.

A rule is a frozen dataclass whose fields are its thresholds. `Rule.judge` takes the state and one step of n series, and returns
the next state and a `Judgement`. It changes neither its arguments nor itself, so the same rule runs live, on a recording, and
again from an earlier state after a training went back. Rules need only numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.series import Bools, Floats, Recording, Series

NORMAL, WARNING, ALARM = 0, 1, 2
"""Levels of a judgement. ASD calls an alarm level 1 and a warning level 2."""


class Judgement(NamedTuple):
    """Result of a rule for one step.

    Attributes:
        levels: int8[n], `NORMAL`, `WARNING` or `ALARM`; `NORMAL` for a series that was not seen.
        scores: float64[n], how unusual each value is; at least 1 for an alarm, so that thresholds can be scaled. NaN: not judged.
        baselines: float64[n], expected values (the mean, the median, the limit …); NaN if no value is expected.
    """

    levels: NDArray[np.int8]
    scores: Floats
    baselines: Floats


def make_judgement(seen: Bools, alarms: Bools, warnings: Bools, scores: Floats, baselines: Floats) -> Judgement:
    """A judgement for the series with values; the others are `NORMAL`, with neither score nor baseline.

    Args:
        seen: bool[n], series with a value in this step.
        alarms: bool[n]; an alarm takes precedence over a warning.
        warnings: bool[n].
        scores: float64[n].
        baselines: float64[n].
    """
    levels = np.where(seen, np.where(alarms, ALARM, np.where(warnings, WARNING, NORMAL)), NORMAL).astype(np.int8)
    return Judgement(levels, np.where(seen, scores, np.nan), np.where(seen, baselines, np.nan))


class Rule(Protocol):
    """A rule with its thresholds.

    Attributes:
        name: Name by which it is chosen.
    """

    name: ClassVar[str]

    def reads(self, series: Series) -> bool:
        """Whether the rule is applied to a series by default."""

    def initial_state(self, series: Sequence[Series]) -> Any:
        """The state before the first step, for the given series."""

    def judge(self, state: Any, values: Floats, seen: Bools, seconds: float) -> tuple[Any, Judgement]:
        """The next state and the judgement of one step.

        Args:
            state: State from `initial_state` or from the previous step.
            values: float64[n]; any number, NaN and infinity included.
            seen: bool[n], which series have a value in this step.
            seconds: Seconds since the first step, for rules that count minutes.
        """


@dataclass
class RuleStream:
    """Applies a rule to the series of one training, step by step.

    Attributes:
        state: State of the rule, which can be kept and restored.
        columns: Numbers of the series that the rule reads.
    """

    rule: Rule
    series: Sequence[Series]

    def __post_init__(self) -> None:
        self.columns = np.array([n for n, entry in enumerate(self.series) if self.rule.reads(entry)], dtype=np.int64)
        self.state = self.rule.initial_state([self.series[n] for n in self.columns])

    def judge(self, values: Floats, seen: Bools, seconds: float) -> Judgement:
        """Judge the next step from the values of all series; the result is for ``columns``, in their order."""
        self.state, judgement = self.rule.judge(self.state, values[self.columns], seen[self.columns], seconds)
        return judgement


def judge_recording(rule: Rule, recording: Recording) -> tuple[tuple[Series, ...], Judgement]:
    """The series that a rule reads, and its judgements for a whole recording, as arrays [steps, n]."""
    columns = recording.columns(rule.reads)
    state = rule.initial_state(columns.series)
    shape = columns.values.shape
    levels, scores, baselines = np.zeros(shape, np.int8), np.full(shape, np.nan), np.full(shape, np.nan)
    for step in range(shape[0]):
        state, judgement = rule.judge(state, columns.values[step], columns.seen[step], float(columns.seconds[step]))
        levels[step], scores[step], baselines[step] = judgement
    return columns.series, Judgement(levels, scores, baselines)
