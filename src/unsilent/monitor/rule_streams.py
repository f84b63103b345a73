"""Applies the rules of a monitor to each step, and sorts the findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.nonfinite import Nonfinite
from unsilent.detectors.rule import ALARM, NORMAL, Rule, RuleStream
from unsilent.detectors.series import Bools, Series
from unsilent.events.event_kinds import FINGERPRINT
from unsilent.monitor.signals.row import SignalValues

Levels = NDArray[np.int8]


class Finding(NamedTuple):
    """A finding of a rule in one step, about one series.

    The series is the one with the highest level and score; if some findings are new, the highest among those.

    Attributes:
        rule: Name of the rule.
        number: Number of the series; for a fingerprint, number of the tensor.
        level, score, value, baseline: Fields of the judgement.
        flagged, judged: Numbers of series in this step that the rule found something in, and that it judged.
        is_new: Whether the level of the series is higher than when it was judged last.
    """

    rule: str
    number: int
    series: Series
    level: int
    score: float
    value: float
    baseline: float
    flagged: int = 1
    judged: int = 1
    is_new: bool = True


class RuleStreams:
    """The rules, applied to the series of one rank; new series get new streams."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._streams: list[tuple[int, RuleStream]] = []
        self._levels: list[Levels] = []  # when each series was judged last
        self._is_read: Bools = np.zeros(0, np.bool_)
        self._was_judged: Bools = np.zeros(0, np.bool_)
        self._largest_score: float | None = None

    def judge(self, series: Sequence[Series], signals: SignalValues, seconds: float) -> list[Finding]:
        """Findings of the rules in a step, the worst first, at most one of each rule."""
        self._add(series)
        worst: dict[str, Finding] = {}
        counts = {rule.name: np.zeros(2, np.int64) for rule in self._rules}
        for (start, stream), before in zip(self._streams, self._levels, strict=True):
            end = start + len(stream.series)
            judgement = stream.judge(signals.values[start:end], signals.seen[start:end], seconds)
            was_judged = ~np.isnan(judgement.scores)
            scores = np.where(was_judged, judgement.scores, 0.0)
            largest, learns = float(scores.max()), self._learns(stream.rule)
            if largest or (learns and was_judged.any()):
                self._largest_score = max(self._largest_score or 0.0, largest)
            if learns:
                self._was_judged[start + stream.columns[was_judged]] = True
            counts[stream.rule.name] += np.count_nonzero(judgement.levels), np.count_nonzero(was_judged)
            is_new = judgement.levels > before
            before[:] = np.where(signals.seen[start:end][stream.columns], judgement.levels, before)
            if not judgement.levels.any():
                continue
            place = int(np.lexsort((scores, judgement.levels, is_new))[-1])
            number = start + int(stream.columns[place])
            name = stream.rule.name
            finding = Finding(
                name, number, series[number], int(judgement.levels[place]), float(scores[place]),
                float(signals.values[number]), float(judgement.baselines[place]), is_new=bool(is_new[place]),
            )  # fmt: skip
            if name not in worst or _rank(finding) > _rank(worst[name]):
                worst[name] = finding
        for name, (flagged, judged) in counts.items():
            if name in worst:
                worst[name] = worst[name]._replace(flagged=int(flagged), judged=int(judged))
        return sorted(worst.values(), key=lambda finding: (finding.level, finding.score), reverse=True)

    def take_largest_score(self) -> float | None:
        """The largest score since the last call, or None if no value was judged.

        Checks for finite numbers alone do not count.
        """
        result, self._largest_score = self._largest_score, None
        return result

    def unjudged(self, seen: Bools) -> int:
        """Number of the series that were seen but never judged.

        Only series that a rule reads are counted.

        Args:
            seen: bool[n], whether each series that `judge` knows was seen.
        """
        return int(np.count_nonzero(seen & self._is_read & ~self._was_judged))

    def _add(self, series: Sequence[Series]) -> None:
        """Create streams for series that are new."""
        known = len(self._is_read)
        if len(series) == known:
            return
        new = series[known:]
        streams = [stream for rule in self._rules if len((stream := RuleStream(rule, new)).columns)]
        self._streams += [(known, stream) for stream in streams]
        self._levels += [np.full(len(stream.columns), NORMAL, np.int8) for stream in streams]
        self._is_read, self._was_judged = (np.pad(mask, (0, len(new))) for mask in (self._is_read, self._was_judged))
        for stream in streams:
            if self._learns(stream.rule):
                self._is_read[known + stream.columns] = True

    def _learns(self, rule: Rule) -> bool:
        """Whether a rule judges more than finiteness; ``Nonfinite`` counts only if there is no other rule."""
        return rule.name != Nonfinite.name or all(other_rule.name == Nonfinite.name for other_rule in self._rules)

    @property
    def state(self) -> list[Any]:
        """State of all rules, which can be restored."""
        return [(stream.state, levels.copy()) for (_, stream), levels in zip(self._streams, self._levels, strict=True)]

    @state.setter
    def state(self, states: Sequence[Any]) -> None:
        for (_, stream), levels, (state, levels_then) in zip(self._streams, self._levels, states, strict=False):
            stream.state, levels[:] = state, levels_then
        for (_, stream), levels in zip(self._streams[len(states) :], self._levels[len(states) :], strict=True):
            stream.state = stream.rule.initial_state([stream.series[n] for n in stream.columns])
            levels[:] = NORMAL


def _rank(finding: Finding) -> tuple[bool, int, float]:
    """Sort key for choosing the worst finding of a rule."""
    return finding.is_new, finding.level, finding.score


def fingerprint_finding(changed: Sequence[str], names: Sequence[str], compared: int) -> list[Finding]:
    """A list with one finding: that the bits of tensors changed.

    Args:
        changed: Names of the tensors that changed, at least one.
        names: Names of all tensors that may be compared.
        compared: Number of tensors that were compared in this step.
    """
    number = names.index(changed[0]) if changed[0] in names else -1
    series = Series(FINGERPRINT, changed[0], "bits")
    return [Finding(FINGERPRINT, number, series, ALARM, float("inf"), float(len(changed)), 0.0, len(changed), compared)]
