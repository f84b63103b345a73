"""What is scored: each rule on what it reads by default and on each feature alone; alarms and scores of recordings. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from unsilent.detectors.rule import ALARM, WARNING, Judgement, Rule, RuleStream
from unsilent.detectors.series import GRADIENT, L2, LARGEST, LOSS, NORM_INPUT_GRADIENT, NUMBER, UPDATE
from unsilent.detectors.series import Bools, Floats, Recording, Series

Ints = NDArray[np.int64]
ON_FEATURES = (
    (GRADIENT, L2), (GRADIENT, LARGEST), (NORM_INPUT_GRADIENT, L2), (NORM_INPUT_GRADIENT, LARGEST),
    (UPDATE, L2), (UPDATE, LARGEST), (LOSS, NUMBER),
)  # fmt: skip
"""Feature and statistic that a rule is also tried on alone."""
SCORE_EDGES = 10.0 ** np.linspace(-3, 6, 451)
BINS = len(SCORE_EDGES) + 2
"""Steps without a score, those below the first edge, between two edges, and from the last edge on."""


class Detector(NamedTuple):
    """A rule on some series.

    Attributes:
        name: Of the rule.
        on: Feature and statistic, like ``gradient l2``; empty: what the rule reads by default.
        rule: Applied to these series.
    """

    name: str
    on: str
    rule: Rule

    @property
    def text(self) -> str:
        """How it is called in a store."""
        return f"{self.name} on {self.on}" if self.on else self.name


@dataclass(frozen=True)
class OnFeature:
    """A rule that reads one statistic of one feature in place of its own choice."""

    rule: Rule
    feature: str
    statistic: str

    @property
    def name(self) -> str:
        """As the rule's."""
        return self.rule.name

    def reads(self, series: Series) -> bool:
        """Whether it is that statistic of that feature."""
        return (series.feature, series.statistic) == (self.feature, self.statistic)

    def initial_state(self, series: Sequence[Series]) -> Any:
        """The rule's."""
        return self.rule.initial_state(series)

    def judge(self, state: Any, values: Floats, seen: Bools, seconds: float) -> tuple[Any, Judgement]:
        """The rule's."""
        return self.rule.judge(state, values, seen, seconds)


def make_detectors(rules: Mapping[str, Rule], series: Sequence[Series]) -> tuple[Detector, ...]:
    """All rules on what they read, and on each feature that these series have."""
    features = [one for one in ON_FEATURES if any((s.feature, s.statistic) == one for s in series)]
    own = [Detector(name, "", rule) for name, rule in rules.items()]
    alone: list[Any] = [
        Detector(name, f"{feature} {statistic}" if statistic != NUMBER else feature, _on(rule, feature, statistic))
        for feature, statistic in features
        for name, rule in rules.items()
    ]
    return (*own, *alone)


def _on(rule: Rule, feature: str, statistic: str) -> Any:
    return OnFeature(rule, feature, statistic)


def rules_digest(rules: Mapping[str, Rule], code: str) -> str:
    """8 hex digits that differ where a rule, one of its thresholds or its code does."""
    text = json.dumps([[name, repr(rule)] for name, rule in rules.items()] + [code])
    return xxhash.xxh3_64_hexdigest(text.encode())[:8]


class StepScore(NamedTuple):
    """What a rule says of one step: the highest level and the largest score of any series; NaN: nothing was judged."""

    level: int
    score: float


def step_score(judgement: Judgement) -> StepScore:
    """Of a judgement of n series."""
    judged = judgement.scores[~np.isnan(judgement.scores)]
    return StepScore(int(judgement.levels.max(initial=0)), float(judged.max()) if len(judged) else np.nan)


@dataclass
class FalseAlarmCounter:
    """Alarms and scores of one detector on a fault-free run.

    Attributes:
        events: int64[2], runs of consecutive steps with an alarm, and with an alarm or a warning.
        scores: int64[BINS], steps by their score.
    """

    detector: Detector
    series: Sequence[Series]
    events: Ints = field(default_factory=lambda: np.zeros(2, np.int64))
    scores: Ints = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def __post_init__(self) -> None:
        self._stream, self._flagged = RuleStream(self.detector.rule, self.series), np.zeros(2, np.bool_)

    def count_step(self, values: Floats, seen: Bools, seconds: float) -> None:
        """Judge the next step."""
        level, score = step_score(self._stream.judge(values, seen, seconds))
        flagged = np.array([level >= ALARM, level >= WARNING])
        self.events += flagged & ~self._flagged
        self._flagged = flagged
        self.scores[score_bin(score)] += 1


def score_bin(score: float) -> int:
    """The bin of a score: 0 without one."""
    return 0 if np.isnan(score) else 1 + int(np.searchsorted(SCORE_EDGES, score, side="right"))


def threshold_at_rate(scores: Ints, rate: float) -> float:
    """The lowest edge that at most this share of steps reaches, by counts int64[BINS]; infinity where none is."""
    reached = np.cumsum(scores[::-1])[::-1][2:]  # from each edge on
    fitting = np.flatnonzero(reached <= rate * scores.sum())
    return float(SCORE_EDGES[fitting[0]]) if len(fitting) else np.inf


class FaultRecording(NamedTuple):
    """What was recorded from the step of a fault on: values and seen are [steps, series]."""

    step: int
    values: Floats
    seen: Bools


@dataclass(frozen=True, eq=False)
class DetectorScores:
    """What one detector says of the golden run and of each fault.

    Attributes:
        levels, scores: int64[n, k] and float64[n, k], of each fault in the k steps from its own on; 0 and NaN behind the end.
        golden_levels, golden_scores: The same of the golden run in these steps.
        seconds: That it takes to judge a step.
    """

    levels: Ints
    scores: Floats
    golden_levels: Ints
    golden_scores: Floats
    seconds: float

    def detected_after(self, level: int) -> Ints:
        """Steps from each fault to the first that has this level or a higher one while golden has not, int64[n]; -1: none."""
        return first_true((self.levels >= level) & (self.golden_levels < level))

    def detected_at(self, threshold: float) -> Bools:
        """Which faults reach a score in a step in which golden does not."""
        with np.errstate(invalid="ignore"):
            detected: Bools = ((self.scores >= threshold) & ~(self.golden_scores >= threshold)).any(1)
        return detected


def first_true(flags: Bools) -> Ints:
    """The first place in each row that is true, int64[n]; -1: none."""
    return np.where(flags.any(1), flags.argmax(1), -1).astype(np.int64)


def score_faults(detector: Detector, golden: Recording, faults: Sequence[FaultRecording], follow: int) -> DetectorScores:
    """Judge the golden run, and each fault from the state that the rule has before its step."""
    stream, wanted = RuleStream(detector.rule, golden.series), {fault.step for fault in faults}
    states, usual = {}, np.zeros((len(golden.values) + follow, 2))
    usual[:, 1] = np.nan
    begun = time.perf_counter()
    for step, (values, seen) in enumerate(zip(golden.values, golden.seen, strict=True)):
        if step in wanted:
            states[step] = stream.state
        usual[step] = step_score(stream.judge(values, seen, float(step)))
    seconds = (time.perf_counter() - begun) / max(len(golden.values), 1)
    result = np.zeros((len(faults), follow, 2))
    result[:, :, 1] = np.nan
    for number, fault in enumerate(faults):
        stream.state = states[fault.step]
        for after, (values, seen) in enumerate(zip(fault.values, fault.seen, strict=True)):
            result[number, after] = step_score(stream.judge(values, seen, float(fault.step + after)))
    own = np.array([usual[fault.step : fault.step + follow] for fault in faults]).reshape(result.shape)
    return DetectorScores(
        result[..., 0].astype(np.int64), result[..., 1], own[..., 0].astype(np.int64), own[..., 1], seconds
    )


def named_rules() -> Mapping[str, Rule]:
    """All registered rules by name, with their default thresholds."""
    from unsilent.detectors.rules import RULES

    return {name: rule() for name, rule in RULES.items()}


def current_digest(rules: Mapping[str, Rule]) -> str:
    """The digest of these rules as they are now."""
    from unsilent.campaigns.code import code_hash

    return rules_digest(rules, code_hash(*sorted({type(rule).__module__ for rule in rules.values()})))


def join_counts(counts: Iterable[Ints]) -> Ints:
    """Sums of equal counts."""
    return np.sum(list(counts), axis=0, dtype=np.int64)
