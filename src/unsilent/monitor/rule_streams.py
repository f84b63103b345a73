"""The rules of a monitor, applied to each step; what they found, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unsilent.detectors.rule import ALARM, Rule, RuleStream
from unsilent.detectors.series import Series
from unsilent.monitor.signals.row import SignalValues

FINGERPRINT = "fingerprint"
"""The rule, and the feature, of bits that changed between two steps."""


class Finding(NamedTuple):
    """What a rule found in one step, of the series with the highest level and score.

    Attributes:
        rule: Its name.
        number: Of the series; of a fingerprint, of the tensor.
        level, score, value, baseline: Of the judgement.
    """

    rule: str
    number: int
    series: Series
    level: int
    score: float
    value: float
    baseline: float


class RuleStreams:
    """Rules on the series of one rank; series that are new get streams of their own."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._streams: list[tuple[int, RuleStream]] = []
        self._count = 0
        self.largest_score = 0.0

    def judge(self, series: Sequence[Series], signals: SignalValues, seconds: float) -> list[Finding]:
        """What the rules find in a step, at most one finding of each rule; the worst first."""
        if len(series) > self._count:
            new = series[self._count :]
            self._streams += [
                (self._count, stream) for rule in self._rules if len((stream := RuleStream(rule, new)).columns)
            ]
            self._count = len(series)
        worst: dict[str, Finding] = {}
        for start, stream in self._streams:
            end = start + len(stream.series)
            judgement = stream.judge(signals.values[start:end], signals.seen[start:end], seconds)
            scores = np.where(np.isnan(judgement.scores), 0.0, judgement.scores)
            if not len(scores):
                continue
            self.largest_score = max(self.largest_score, float(scores.max()))
            if not judgement.levels.any():
                continue
            place = int(np.lexsort((scores, judgement.levels))[-1])
            number = start + int(stream.columns[place])
            name = stream.rule.name
            found = Finding(
                name, number, series[number], int(judgement.levels[place]), float(scores[place]),
                float(signals.values[number]), float(judgement.baselines[place]),
            )  # fmt: skip
            if name not in worst or (found.level, found.score) > (worst[name].level, worst[name].score):
                worst[name] = found
        return sorted(worst.values(), key=lambda one: (one.level, one.score), reverse=True)

    def take_largest_score(self) -> float:
        """The largest score since this was asked last."""
        result, self.largest_score = self.largest_score, 0.0
        return result

    @property
    def state(self) -> list[Any]:
        """Of all rules; may be put back."""
        return [stream.state for _, stream in self._streams]

    @state.setter
    def state(self, states: Sequence[Any]) -> None:
        for (_, stream), state in zip(self._streams, states, strict=False):
            stream.state = state
        for _, stream in self._streams[len(states) :]:
            stream.state = stream.rule.initial_state([stream.series[n] for n in stream.columns])


def fingerprint_finding(changed: Sequence[str], names: Sequence[str]) -> list[Finding]:
    """What a comparison of bits found.

    Args:
        changed: Names of the tensors that changed, at least one.
        names: Of all tensors that are compared.
    """
    number = names.index(changed[0]) if changed[0] in names else -1
    series = Series(FINGERPRINT, changed[0], "bits")
    return [Finding(FINGERPRINT, number, series, ALARM, float("inf"), float(len(changed)), 0.0)]
