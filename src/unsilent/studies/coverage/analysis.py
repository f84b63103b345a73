"""Analyses a coverage campaign: detection, latency, false alarms, comparisons between rules, and costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.campaigns.campaign_result import StoreResult, facts_of_stores
from unsilent.detectors.rule import ALARM, WARNING, Rule
from unsilent.detectors.series import Bools, Floats, Recording, Series
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.coverage.paired_tests import paired_differences
from unsilent.studies.coverage.scoring import (
    SCORE_EDGES,
    Detector,
    DetectorScores,
    FaultRecording,
    Ints,
    Sampling,
    applications,
    current_digest,
    join_scores,
    named_rules,
    score_faults,
    threshold_at_rate,
)
from unsilent.studies.coverage.spec import (
    CHANGES,
    CLEAN,
    FOLLOWED,
    GOLDEN,
    JUDGED,
    NONFINITE,
    OPERATION,
    CoverageAnalysisOptions,
    CoverageBaseline,
    CoverageRow,
    CoverageSpec,
    parse_clean_target,
)

if TYPE_CHECKING:
    from unsilent.studies.coverage.kind import CoverageStore

ALARMS, WARNINGS, MATCHED = "alarm", "alarm or warning", "scaled threshold"
"""Types of detection: an alarm (ASD's level 1), an alarm or warning (its level 2), or a score above the threshold at which
fault-free runs have the requested rate of false alarms."""
REFERENCE = "robust-z"
"""Name of the rule that all others are compared with."""
LARGE_FINITE = tuple(f"{OPERATION}:{name}" for name in ("1e-2..1", "1..100", "100..inf"))
"""Targets of finite faults that change the gradients by 1 % or more."""
ALL_FINITE = "finite"


@dataclass(frozen=True, slots=True)
class Detection:
    """How many faults of one class a detector found.

    Attributes:
        rule: Name of the rule.
        on: Feature and statistic that the rule reads; empty for its default features.
        level: `ALARMS`, `WARNINGS` or `MATCHED`.
        target: Place and class of severity of the faults.
        share: Share of faults that were detected.
        detected: Number of faults that were detected.
        after: Number of faults detected 0, 1, … steps after the step of the fault; empty for a scaled threshold.
    """

    rule: str
    on: str
    level: str
    target: str
    share: Interval
    detected: int
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The comparison of the reference rule with another detector on the same faults, by McNemar's test.

    Attributes:
        rule, level: Rule and level of the other detector.
        target: Place and class of severity of the faults, or `ALL_FINITE`.
        difference: Share detected by the reference minus the share detected by the other detector.
        only_reference, only_other: Number of faults that only one of the two detected.
        p_value: P value adjusted by Holm over all comparisons.
    """

    rule: str
    level: str
    target: str
    difference: Interval
    only_reference: int
    only_other: int
    p_value: float


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    """False alarms of a detector on fault-free runs.

    Attributes:
        rule: Name of the rule.
        on: Feature and statistic that the rule reads; empty for its default features.
        level: `ALARMS` or `WARNINGS`.
        events: Number of events, which are series of consecutive steps with a false alarm.
        per_step, per_run: Share of steps in which an event begins, and of runs with an event; the upper limit is
            one-sided.
        threshold: Threshold at which scores have the requested rate of false alarms; infinity if none has.
        after_changes: Largest number of events in a run after each planted change, by name of the change.
    """

    rule: str
    on: str
    level: str
    events: int
    per_step: Interval
    per_run: Interval
    threshold: float
    after_changes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RocPoint:
    """A point of a ROC curve: the shares of fault-free steps and of faults that reach a threshold."""

    false_alarms: float
    detected: float


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class CoverageResult(StoreResult[CoverageSpec, CoverageBaseline, CoverageAnalysisOptions]):
    """The result of a coverage campaign.

    Attributes:
        severities: Severities of the faults of each target.
        tried: Number of faults that were drawn and number that were kept, for each target.
        changes: Changes that were planted in some fault-free runs.
        seconds_per_step: Duration of a step of each rule in seconds, by name.
    """

    KIND: ClassVar[str] = "unsilent.studies.coverage.kind:COVERAGE"
    faults: int
    severities: Mapping[str, Floats]
    tried: Mapping[str, tuple[int, int]]
    ends: Mapping[str, int]
    clean_runs: int
    clean_steps: int
    changes: tuple[str, ...]
    detections: tuple[Detection, ...]
    tests: tuple[PairedTest, ...]
    false_alarms: tuple[FalseAlarms, ...]
    roc: Mapping[str, tuple[RocPoint, ...]]
    seconds_per_step: Mapping[str, float]


def analyse(
    store: CoverageStore, options: CoverageAnalysisOptions, rules: Mapping[str, Rule] | None = None
) -> CoverageResult:
    """Apply all rules, or the given ones, to the recordings in a store.

    Raises ``UsageError`` if the golden run is missing.
    """
    return analyse_together([store], options, rules)


def analyse_together(
    stores: Sequence[CoverageStore], options: CoverageAnalysisOptions, rules: Mapping[str, Rule] | None = None
) -> CoverageResult:
    """The joint result of several trainings, on the features that they share."""
    rules = named_rules() if rules is None else rules
    clean, parts = CleanRuns(), [_score(store, options, rules) for store in stores]
    for part in parts:
        clean.add(part.rows, (*options.intervals, current_digest(rules)), tuple(part.scored))
    common = [detector for detector in parts[0].scored if all(detector in part.scored for part in parts)]
    scored = {detector: join_scores([part.scored[detector] for part in parts]) for detector in common}
    rows, faults = [row for part in parts for row in part.rows], [row for part in parts for row in part.faults]
    names = list(dict.fromkeys(target.name for store in stores for target in store.baseline.targets))
    targets = {name: np.array([row.trial.target == name for row in faults], np.bool_) for name in names}
    changes = [change for change in CHANGES if clean.runs[change]]
    return CoverageResult(
        **facts_of_stores(stores, options),
        faults=len(faults),
        severities={name: np.array([row.severity for row in faults])[mask] for name, mask in targets.items()},
        tried={name: _tried_and_followed(rows, name) for name in targets},
        ends={end: sum(row.end == end for row in rows) for end in sorted({row.end for row in rows})},
        clean_runs=len(clean.runs[CLEAN]),
        clean_steps=clean.steps,
        changes=tuple(changes),
        detections=tuple(_detections(scored, clean, targets, options)),
        tests=tuple(_tests(scored, clean, targets, options)),
        false_alarms=tuple(_false_alarms(scored, clean, changes, options)),
        roc=_rocs(scored, clean, _any(targets, LARGE_FINITE)),
        seconds_per_step={name: float(np.mean([part.cost[name] for part in parts])) for name in rules},
    )


class ScoredCampaign(NamedTuple):
    """The scores of all detectors on the faults of one store.

    Attributes:
        rows: All rows except the golden one.
        faults: Rows with a fault, in the order of the scores.
        cost: Duration of a step in seconds, by rule.
    """

    rows: Sequence[CoverageRow]
    faults: Sequence[CoverageRow]
    scored: Mapping[Detector, DetectorScores]
    cost: Mapping[str, float]


def _score(store: CoverageStore, options: CoverageAnalysisOptions, rules: Mapping[str, Rule]) -> ScoredCampaign:
    golden_row = store.find_row(GOLDEN)
    if golden_row is None or golden_row.steps != store.baseline.steps:
        why = f" ({golden_row.error or golden_row.end})" if golden_row else ""
        raise UsageError(
            f"{store.path} has no recording of the fault-free run{why}; run again the command that made it, with another --store "
            "if the recording failed"
        )
    series = tuple(Series(*entry) for entry in store.baseline.series)
    sampling = Sampling(*options.intervals)

    def seen(row: CoverageRow) -> Bools:
        read = sampling.is_read(series, row.injection.step + np.arange(row.steps))
        return np.asarray((row.seen == 1) & read, np.bool_)

    rows = [row for row in store.rows() if row.trial != GOLDEN]
    faults = [row for row in rows if row.end == FOLLOWED]
    recordings = [FaultRecording(row.injection.step, row.signals, seen(row)) for row in faults]
    golden = Recording(series, golden_row.signals, seen(golden_row), np.arange(float(golden_row.steps)))
    scored, cost = dict[Detector, DetectorScores](), dict[str, float]()
    for application in applications(rules, series):
        by_detector, seconds = score_faults(application, golden, recordings, store.spec.follow)
        scored |= by_detector
        cost |= {detector.rule: seconds for detector in by_detector if not detector.on}
    return ScoredCampaign(rows, faults, scored, cost)


class CleanRuns:
    """Fault-free runs that were judged with the current rules.

    Attributes:
        runs: Row of each run and positions of the detectors in it, by kind of run: `CLEAN` or one of `CHANGES`.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[CoverageRow, Mapping[Detector, int]]]] = {
            kind: [] for kind in (CLEAN, *CHANGES)
        }

    def add(self, rows: Sequence[CoverageRow], how: tuple[int, int, int, str], detectors: Sequence[Detector]) -> None:
        """Add the fault-free runs of a store that were judged with the given sampling, rules and detectors.

        ``how`` is the sampling of gradients, of values and of updates, and the digest of the rules.
        """
        names, places = [str(d) for d in detectors], {d: n for n, d in enumerate(detectors)}
        for row in rows:
            target = parse_clean_target(row.trial.target)
            if target is not None and target[2:] == how and row.end == JUDGED and json.loads(row.rules) == names:
                self.runs[target.kind].append((row, places))

    @property
    def steps(self) -> int:
        """The number of steps of all runs without a planted change."""
        return sum(int(row.scores[0].sum()) for row, _ in self.runs[CLEAN])

    def events(self, kind: str, detector: Detector) -> Ints:
        """Alarm counts of a detector in each run of one kind, int64[runs, 4]; see `CoverageRow`."""
        return np.array([row.events[places[detector]] for row, places in self.runs[kind]], np.int64).reshape(-1, 4)

    def scores(self, detector: Detector) -> Ints:
        """Histogram of the scores of a detector over all steps of runs without a planted change."""
        rows = [row.scores[places[detector]] for row, places in self.runs[CLEAN]]
        return np.asarray(np.sum(rows, axis=0), np.int64)

    def threshold(self, detector: Detector, rate: float) -> float:
        """The threshold at which a detector has a given rate of false alarms; infinity without a run."""
        return threshold_at_rate(self.scores(detector), rate) if self.steps else np.inf


def _tried_and_followed(rows: Sequence[CoverageRow], target: str) -> tuple[int, int]:
    drawn = [row for row in rows if row.trial.target == target]
    return sum(row.tried for row in drawn), sum(row.end == FOLLOWED for row in drawn)


def _any(targets: Mapping[str, Bools], names: Sequence[str]) -> Bools:
    """Mask of the faults that belong to any of the named targets."""
    count = len(next(iter(targets.values())))
    flags = [targets.get(name, np.zeros(count, np.bool_)) for name in names]
    return np.asarray(np.any(flags, axis=0), np.bool_)


Scored = Mapping[Detector, DetectorScores]


def _levels(scores: DetectorScores) -> Iterator[tuple[str, int]]:
    """The alarm levels of a detector; warnings are included only if the detector ever gave one."""
    yield ALARMS, ALARM
    if WARNING in scores.levels or WARNING in scores.golden_levels:
        yield WARNINGS, WARNING


def _detections(
    scored: Scored, clean: CleanRuns, targets: Mapping[str, Bools], options: CoverageAnalysisOptions
) -> Iterator[Detection]:
    for detector, scores in scored.items():
        after = {level: scores.detected_after(number) for level, number in _levels(scores)}
        detected = {level: steps >= 0 for level, steps in after.items()}
        if clean.steps:
            detected[MATCHED] = scores.detected_at(clean.threshold(detector, options.rate))
        for level, flags in detected.items():
            for target, mask in targets.items():
                count, n = int(flags[mask].sum()), int(mask.sum())
                steps = after[level][mask] if level in after else np.zeros(0, np.int64)
                late = np.bincount(steps[steps >= 0], minlength=scores.levels.shape[1]) if len(steps) else ()
                share = clopper_pearson(count, n, options.confidence)
                yield Detection(detector.rule, detector.on, level, target, share, count, tuple(map(int, late)))


def _tests(
    scored: Scored, clean: CleanRuns, targets: Mapping[str, Bools], options: CoverageAnalysisOptions
) -> list[PairedTest]:
    """Compare the reference rule with all other rules, each on its default features."""
    by_default = {detector: scores for detector, scores in scored.items() if not detector.on}
    reference = next((detector for detector in by_default if detector.rule == REFERENCE), None)
    if reference is None:
        return []

    def matched(detector: Detector) -> Bools:
        return by_default[detector].detected_at(clean.threshold(detector, options.rate))

    groups = {ALL_FINITE: _any(targets, LARGE_FINITE)}
    groups |= {name: targets[name] for name in (*LARGE_FINITE, f"{OPERATION}:{NONFINITE}") if name in targets}
    usual = by_default[reference].detected_after(ALARM) >= 0
    pairs = [
        (detector.rule, level, usual, by_default[detector].detected_after(number) >= 0)
        for detector in by_default
        if detector != reference
        for level, number in _levels(by_default[detector])
    ]
    if clean.steps:
        pairs += [(d.rule, MATCHED, matched(reference), matched(d)) for d in by_default if d != reference]
    tests = [
        (rule, level, group, first[mask].astype(int) - second[mask])
        for rule, level, first, second in pairs
        for group, mask in groups.items()
        if mask.any()
    ]
    differences = paired_differences([gaps for *_, gaps in tests], options.confidence)
    return [
        PairedTest(rule, level, group, result.difference, result.only_one, result.only_other, result.p_value)
        for (rule, level, group, _), result in zip(tests, differences, strict=True)
    ]


def _false_alarms(
    scored: Scored, clean: CleanRuns, changes: Sequence[str], options: CoverageAnalysisOptions
) -> Iterator[FalseAlarms]:
    """The false alarms of every detector, with one-sided upper limits."""
    confidence = max(2 * options.confidence - 1, 0.01)
    for detector, scores in scored.items() if clean.steps else ():
        threshold = clean.threshold(detector, options.rate)
        events = {kind: clean.events(kind, detector) for kind in (CLEAN, *changes)}
        for column, (level, _) in enumerate(_levels(scores)):
            by_run = events[CLEAN][:, [column, column + 2]].sum(1)
            count, runs = int(by_run.sum()), int((by_run > 0).sum())
            yield FalseAlarms(
                detector.rule,
                detector.on,
                level,
                count,
                clopper_pearson(count, clean.steps, confidence),
                clopper_pearson(runs, len(by_run), confidence),
                threshold,
                {kind: int(events[kind][:, column + 2].max()) for kind in changes if len(events[kind])},
            )


def _rocs(scored: Scored, clean: CleanRuns, faults: Bools) -> dict[str, tuple[RocPoint, ...]]:
    """ROC points of all rules on their default features, by name."""
    plain = {detector: scores for detector, scores in scored.items() if not detector.on and clean.steps}
    return {detector.rule: _roc(scores, clean.scores(detector), faults) for detector, scores in plain.items()}


def _roc(scores: DetectorScores, clean: Ints, faults: Bools) -> tuple[RocPoint, ...]:
    """ROC points of one detector, from the lowest threshold to the highest."""
    points = [
        RocPoint(float(clean[2 + number :].sum() / clean.sum()), float(scores.detected_at(edge)[faults].mean()))
        for number, edge in enumerate(SCORE_EDGES)
    ]
    return tuple(dict.fromkeys(points)) if faults.any() else ()
