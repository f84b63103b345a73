"""Scores each rule on recordings, with its default features and with each feature alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from unsilent.campaigns.code import code_hash
from unsilent.detectors.rule import ALARM, WARNING, Rule
from unsilent.detectors.rules import RULES, make_rule
from unsilent.detectors.series import (
    GRADIENT,
    L2,
    LARGEST,
    LOSS,
    NORM_INPUT_GRADIENT,
    NUMBER,
    UPDATE,
    Bools,
    Floats,
    Recording,
    Series,
)

Ints = NDArray[np.int64]
ON_FEATURES = (
    (GRADIENT, L2), (GRADIENT, LARGEST), (NORM_INPUT_GRADIENT, L2), (NORM_INPUT_GRADIENT, LARGEST),
    (UPDATE, L2), (UPDATE, LARGEST), (LOSS, NUMBER),
)  # fmt: skip
"""Features and statistics on which each rule is also tested alone."""
SCORE_EDGES = 10.0 ** np.linspace(-12, 6, 451)
BINS = len(SCORE_EDGES) + 2
"""Number of bins: for steps without a score, below the first edge, between adjacent edges, and from the last edge on."""


class Sampling(NamedTuple):
    """How many steps a monitor takes to read all gradients, all values and all updates once."""

    gradients: int = 1
    values: int = 1
    updates: int = 1

    def is_read(self, series: Sequence[Series], steps: Ints) -> Bools:
        """Which series are read in which steps, bool[steps, series]."""
        turns = dict[str, dict[str, int]]()
        for entry in series:
            tensors = turns.setdefault(entry.feature, {})
            tensors.setdefault(entry.tensor, len(tensors))
        turn = np.array([turns[entry.feature][entry.tensor] for entry in series], np.int64)
        intervals = {LOSS: 1, GRADIENT: self.gradients, UPDATE: self.updates}
        interval = np.array(
            [intervals.get(entry.feature, self.values) for entry in series],
            np.int64,
        )
        return np.asarray((turn + steps[:, None]) % interval == 0, np.bool_)


class Detector(NamedTuple):
    """A rule applied to some of the series.

    Attributes:
        rule: Name of the rule.
        on: Feature and statistic that the rule reads, like ``gradient l2``; empty for its default features.
    """

    rule: str
    on: str

    def __str__(self) -> str:
        return f"{self.rule} on {self.on}" if self.on else self.rule


class Application:
    """A rule that runs over series step by step, and is scored as one or several detectors.

    Attributes:
        detectors: Detectors that the rule is scored as.
        state: State of the rule, which can be saved and restored.

    Args:
        rule: The rule.
        series: All recorded series.
        parts: Detectors, each with a function that selects its series.
        reads: Function that selects the series that the rule reads; ``None`` for the rule's own choice.
    """

    def __init__(
        self,
        rule: Rule,
        series: Sequence[Series],
        parts: Mapping[Detector, Callable[[Series], bool]],
        reads: Callable[[Series], bool] | None = None,
    ) -> None:
        self._rule, reads = rule, reads or rule.reads
        self._columns = np.flatnonzero([reads(entry) for entry in series])
        read_series = [series[column] for column in self._columns.tolist()]
        self.state: Any = rule.initial_state(read_series)
        self.detectors = tuple(parts)
        self._parts = [np.flatnonzero([is_part(entry) for entry in read_series]) for is_part in parts.values()]

    def judge(self, values: Floats, seen: Bools, step: int) -> Floats:
        """Judge the next step: the highest level and largest score of each detector, float64[n, 2].

        The score is NaN if nothing was judged.
        """
        columns = self._columns
        self.state, judgement = self._rule.judge(self.state, values[columns], seen[columns], float(step))
        levels, scores = judgement.levels, np.where(np.isnan(judgement.scores), -np.inf, judgement.scores)
        result = [(levels[part].max(initial=0), scores[part].max(initial=-np.inf)) for part in self._parts]
        largest = np.array(result, np.float64).reshape(-1, 2)
        return np.where(largest == -np.inf, np.nan, largest)


def applications(rules: Mapping[str, Rule], series: Sequence[Series]) -> list[Application]:
    """Applications of all rules, with their default features and with each recorded feature alone."""
    features = [feature for feature in ON_FEATURES if any(_is_feature(feature)(entry) for entry in series)]
    parts = {_feature_text(*feature): _is_feature(feature) for feature in features}
    result = [Application(rule, series, {Detector(name, ""): lambda entry: True}) for name, rule in rules.items()]
    for name, rule in rules.items():
        detectors = {Detector(name, text): is_part for text, is_part in parts.items()}
        result.append(Application(rule, series, detectors, reads=_is_of_features))
    return result


def _is_of_features(series: Series) -> bool:
    """Whether a series belongs to the features that rules are tried on alone."""
    return (series.feature, series.statistic) in ON_FEATURES


def _feature_text(feature: str, statistic: str) -> str:
    return feature if statistic == NUMBER else f"{feature} {statistic}"


def _is_feature(wanted: tuple[str, str]) -> Callable[[Series], bool]:
    return lambda series: (series.feature, series.statistic) == wanted


def rules_digest(rules: Mapping[str, Rule], code: str) -> str:
    """A digest of 8 hex digits over the rules, their thresholds and their code."""
    text = json.dumps([[name, repr(rule)] for name, rule in rules.items()] + [code])
    return xxhash.xxh3_64_hexdigest(text.encode())[:8]


class FalseAlarmCounter:
    """Counts the alarms and scores of one application in a fault-free run.

    Attributes:
        events: Number of series of consecutive steps with an alarm, and with an alarm or a warning, for each detector,
            int64[n, 2].
        scores: Number of steps by bin of the score, int64[n, BINS].
    """

    def __init__(self, application: Application) -> None:
        self.application, count = application, len(application.detectors)
        self.events, self.scores = np.zeros((count, 2), np.int64), np.zeros((count, BINS), np.int64)
        self._flagged = np.zeros((count, 2), np.bool_)

    def count_step(self, values: Floats, seen: Bools, step: int) -> None:
        """Judge the next step and count its alarms and scores."""
        judged = self.application.judge(values, seen, step)
        flagged = np.asarray(judged[:, :1] >= np.array([ALARM, WARNING]), np.bool_)
        self.events += flagged & ~self._flagged
        self._flagged = flagged
        self.scores[np.arange(len(judged)), score_bins(judged[:, 1])] += 1


def score_bins(scores: Floats) -> Ints:
    """The histogram bin of each score; 0 for a missing score."""
    bins = 1 + np.searchsorted(SCORE_EDGES, scores, side="right")
    return np.where(np.isnan(scores), 0, bins).astype(np.int64)


def threshold_at_rate(scores: Ints, rate: float) -> float:
    """The lowest threshold that is reached in at most the share ``rate`` of all steps; infinity if there is none.

    ``scores`` are counts by bin, int64[BINS].
    """
    reached = np.cumsum(scores[::-1])[::-1][2:]  # from each edge on
    fitting = np.flatnonzero(reached <= rate * scores.sum())
    return float(SCORE_EDGES[fitting[0]]) if len(fitting) else np.inf


class FaultRecording(NamedTuple):
    """Values recorded from the step of a fault on, as arrays [steps, series]."""

    step: int
    values: Floats
    seen: Bools


@dataclass(frozen=True, eq=False)
class DetectorScores:
    """Scores of one detector for each fault, and for the golden run in the same steps.

    The arrays begin with the step of the fault and have k steps.

    Attributes:
        levels, golden_levels: Level in each step, float64[n, k]; 0 after the end of a recording.
        scores, golden_scores: Score in each step, float64[n, k]; NaN if nothing was judged.
    """

    levels: Floats
    scores: Floats
    golden_levels: Floats
    golden_scores: Floats

    def detected_after(self, level: int) -> Ints:
        """Steps from each fault to its detection at a level, int64[n]; -1 if it is not detected.

        A step counts only if the golden run does not reach the level in it.
        """
        flags = (self.levels >= level) & (self.golden_levels < level)
        return np.where(flags.any(1), flags.argmax(1), -1).astype(np.int64)

    def detected_at(self, threshold: float) -> Bools:
        """Which faults reach a threshold in a step in which the golden run does not reach it, bool[n]."""
        flags = (self.scores >= threshold) & ~(self.golden_scores >= threshold)
        return np.asarray(flags.any(1), np.bool_)


def join_scores(parts: Sequence[DetectorScores]) -> DetectorScores:
    """The scores of several campaigns, concatenated and cut to the smallest number of steps."""
    steps = min(part.levels.shape[1] for part in parts)
    names = [entry.name for entry in fields(DetectorScores)]
    return DetectorScores(*(np.concatenate([getattr(part, name)[:, :steps] for part in parts]) for name in names))


def score_faults(
    application: Application, golden: Recording, faults: Sequence[FaultRecording], follow: int
) -> tuple[dict[Detector, DetectorScores], float]:
    """Scores of all detectors of an application on each fault, and the seconds that a step takes."""
    wanted, states, count = {fault.step for fault in faults}, {}, len(application.detectors)
    usual, result = _nothing(len(golden.values) + follow, count), _nothing(len(faults), follow, count)
    begun = time.perf_counter()
    for step, (values, seen) in enumerate(zip(golden.values, golden.seen, strict=True)):
        if step in wanted:
            states[step] = application.state
        usual[step] = application.judge(values, seen, step)
    seconds = (time.perf_counter() - begun) / max(len(golden.values), 1)
    for number, fault in enumerate(faults):
        application.state = states[fault.step]
        for after, (values, seen) in enumerate(zip(fault.values[:follow], fault.seen[:follow], strict=True)):
            result[number, after] = application.judge(values, seen, fault.step + after)
    gold = np.array([usual[fault.step : fault.step + follow] for fault in faults]).reshape(result.shape)
    return {
        detector: DetectorScores(result[:, :, n, 0], result[:, :, n, 1], gold[:, :, n, 0], gold[:, :, n, 1])
        for n, detector in enumerate(application.detectors)
    }, seconds


def _nothing(*shape: int) -> Floats:
    """An array of results with normal levels and no scores."""
    return np.stack([np.zeros(shape), np.full(shape, np.nan)], axis=-1)


def named_rules() -> Mapping[str, Rule]:
    """All registered rules by name, with their default thresholds."""
    return {name: make_rule(name) for name in RULES}


def current_digest(rules: Mapping[str, Rule]) -> str:
    """The digest of rules, with the current code of their modules."""
    return rules_digest(rules, code_hash(*sorted({type(rule).__module__ for rule in rules.values()})))
