"""Analyses inference coverage: detection of changed answers, false alarms, restored answers and costs.

A fault changes the answers of one or several samples of a batch. Two shares are estimated: the share of all changed answers, in
which a fault counts once for each answer, and the mean over faults of the share of their answers, in which each fault counts
once. Both intervals treat faults as independent, not samples. Intervals of false alarms treat originals as independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.campaigns.campaign_result import StoreResult, facts_of_stores
from unsilent.statistics.bounded import bounded_mean, ratio_of_means
from unsilent.statistics.conformal import exchanged_false_alarms
from unsilent.studies.coverage.inference.scoring import (
    Detected,
    Floats,
    ScoredStore,
    check_clean_samples,
    clean_samples_needed,
    score_store,
)
from unsilent.studies.coverage.inference.spec import (
    CALIBRATION,
    ERROR_MODELS,
    FOUND,
    RUNGS,
    SHIFTED,
    TEST,
    InferenceCoverageBaseline,
    InferenceCoverageOptions,
    InferenceCoverageSpec,
)
from unsilent.studies.coverage.paired_tests import PairedDifference, paired_differences

if TYPE_CHECKING:
    from unsilent.studies.coverage.inference.kind import InferenceCoverageStore

RATES = (0.001, 0.01, 0.05)
"""Rates of false alarms at which detection is reported in addition to the requested rate."""
ALL = "all"
"""Name for all error models together."""
LAYER, LADDER = "layer", "ladder"
ROC_POINTS = 60


@dataclass(frozen=True, slots=True)
class Detection:
    """The share of changed answers that one detector found.

    Attributes:
        errors: Error model, or `ALL`.
        rate: Rate of false alarms per sample.
        answers: Share of all changed answers.
        share: Mean over faults of the share of changed answers.
        layers, flops: Share of layers and of FLOPs that have run at the first alarm.
    """

    detector: str
    errors: str
    rate: float
    answers: Interval
    share: Interval
    layers: Interval
    flops: Interval


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    """False alarms on clean samples, with intervals by original sample.

    Attributes:
        share: Share of test samples with an alarm.
        count: Number of test samples with an alarm.
        expected: Limits for the count if the originals of calibration and test are exchangeable; ``None`` for several stores.
        shifted: Share of shifted samples with an alarm.
    """

    detector: str
    rate: float
    share: Interval
    count: int
    expected: tuple[int, int] | None
    shifted: Interval


@dataclass(frozen=True, slots=True)
class Restored:
    """Changed answers that a mitigation brought back to the golden answer.

    Attributes:
        rung: Name of the mitigation, or `LADDER`.
        answers: Share of all changed answers.
        share: Mean over faults of the share of changed answers.
        detected_answers, detected_share: Both shares for the changed answers that the reference detector finds.
        seconds: Median CPU time in seconds; ``None`` if the mitigation was not run.
    """

    rung: str
    errors: str
    answers: Interval
    share: Interval
    detected_answers: Interval
    detected_share: Interval
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of the reference detector with another one on the same faults."""

    detector: str
    errors: str
    paired: PairedDifference


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a detector.

    Attributes:
        ratios: Ratio of the CPU time of a pass with the detector to a pass without it, for batches of 1 and 32 samples; NaN if
            not measured.
        memory: Memory of the detector relative to the memory of the model.
    """

    detector: str
    ratios: tuple[float, ...]
    memory: float


@dataclass(frozen=True, slots=True)
class Tries:
    """Counts of the faults drawn for one error model, of their outcomes, and of the changed answers.

    Attributes:
        different_answers: Number of different samples with a changed answer.
        same_answer: Largest number of faults that each changed only the answer of the same sample.
    """

    errors: str
    drawn: int
    masked: int
    benign: int
    due: int
    found: int
    trials: int
    answers: int
    different_answers: int
    same_answer: int


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class InferenceCoverageResult(StoreResult[InferenceCoverageSpec, InferenceCoverageBaseline, InferenceCoverageOptions]):
    """The result of a campaign of inference coverage.

    Attributes:
        reference: Detector that others are compared with.
        clean, originals: Number of clean samples in each part, and number of their originals.
        has_equal_originals: Whether all originals for thresholds, except at most one, have equally many samples; only then is
            the false-alarm rate guaranteed for a new original.
        unreported: Rates with too few clean samples, and the number of samples that each needs.
        roc: False alarms and detected answers of all error models, for each detector.
    """

    KIND: ClassVar[str] = "unsilent.studies.coverage.inference.kind:INFERENCE_COVERAGE"
    reference: str
    clean: Mapping[str, int]
    originals: Mapping[str, int]
    has_equal_originals: bool
    rates: tuple[float, ...]
    unreported: Mapping[float, int]
    tries: tuple[Tries, ...]
    detections: tuple[Detection, ...]
    false_alarms: tuple[FalseAlarms, ...]
    restored: tuple[Restored, ...]
    comparisons: tuple[Comparison, ...]
    costs: tuple[Cost, ...]
    roc: Mapping[str, tuple[tuple[float, float], ...]]


def analyse(store: InferenceCoverageStore, options: InferenceCoverageOptions) -> InferenceCoverageResult:
    """The result of a store.

    Raises ``UsageError`` if clean samples are missing or too few for the rate of false alarms.
    """
    return analyse_together([store], options)


def analyse_together(
    stores: Sequence[InferenceCoverageStore], options: InferenceCoverageOptions
) -> InferenceCoverageResult:
    """The joint result of several workloads, each judged with its own thresholds."""
    parts = [score_store(store) for store in stores]
    for part in parts:
        check_clean_samples(part.store.spec.clean_samples, options.rate, part.least_clean)
    least = min(part.least_clean for part in parts)
    rates = sorted({*RATES, options.rate})
    reported = tuple(rate for rate in rates if least >= clean_samples_needed(rate))
    names = [name for name in parts[0].detectors if all(name in part.detectors for part in parts)]
    if not names:
        raise UsageError("the stores have no detector in common; give stores of campaigns with the same --detector")
    hits = {
        (name, rate): _joined_detections([part.detected(name, rate) for part in parts])
        for name in names
        for rate in reported
    }
    targets = np.array([row.trial.target for part in parts for row in part.faults])
    groups = {name: targets == name for name in ERROR_MODELS if (targets == name).any()} | {ALL: targets != ""}
    return InferenceCoverageResult(
        **facts_of_stores(stores, options),
        reference=names[0],
        clean={
            part: sum(len(next(iter(scored.clean[part].values()))) for scored in parts) for part in (CALIBRATION, TEST, SHIFTED)
        },
        has_equal_originals=all(_has_equal_groups(scored.originals[CALIBRATION]) for scored in parts),
        originals={
            part: sum(len(np.unique(scored.originals[part])) for scored in parts) for part in (CALIBRATION, TEST, SHIFTED)
        },
        rates=reported,
        unreported={rate: clean_samples_needed(rate) for rate in rates if rate not in reported},
        tries=tuple(_tries(parts)),
        detections=tuple(_detections(hits, groups, most_answers(parts), options.confidence)),
        false_alarms=tuple(_false_alarms(parts, names, reported, options.confidence)),
        restored=tuple(_restored_shares(parts, hits[names[0], options.rate], groups, options.confidence)),
        comparisons=tuple(_comparisons(hits, names, groups, options)),
        costs=tuple(_costs(parts, names)),
        roc={name: _roc(parts, name) for name in names} if len(targets) else {},
    )  # fmt: skip


def most_answers(parts: Sequence[ScoredStore]) -> int:
    """The largest number of answers that a fault can change."""
    return max(max(part.store.baseline.samples) for part in parts)


def _joined_detections(parts: Sequence[Detected]) -> Detected:
    """The detections of several stores, concatenated."""
    return Detected(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _tries(parts: Sequence[ScoredStore]) -> Iterator[Tries]:
    for name in ERROR_MODELS:
        trials, alone, different = [], Counter[tuple[int, int, int]](), set[tuple[int, int, int]]()
        for number, part in enumerate(parts):
            rows = [row for row in part.rows if row.trial.target == name]
            trials += rows
            alone.update((number, row.batch, int(row.flags.argmax())) for row in rows if row.changed == 1)
            different.update((number, row.batch, place) for row in rows for place in np.flatnonzero(row.flags).tolist())
        if trials:
            drawn, masked, benign, due, answers = (
                sum(getattr(row, key) for row in trials) for key in ("tried", "masked", "benign", "due", "changed")
            )
            with_fault = sum(row.end == FOUND for row in trials)
            same = max(alone.values(), default=0)
            yield Tries(name, drawn, masked, benign, due, with_fault, len(trials), answers, len(different), same)


def _share(values: Floats, confidence: float) -> Interval:
    """The mean of a share over the faults that have a value, with its interval."""
    return bounded_mean(np.clip(values[~np.isnan(values)], 0, 1), confidence)


def _detections(
    hits: Mapping[tuple[str, float], Detected], groups: Mapping[str, NDArray[np.bool_]], most: int, confidence: float
) -> Iterator[Detection]:
    """The detection of each detector, at each rate of false alarms and for each error model.

    ``most``: largest number of answers that a fault can change.
    """
    for (name, rate), faults in hits.items():
        for errors, mask in groups.items():
            answers = _share_of_answers(faults.share[mask], faults.changed[mask], most, confidence)
            shares = [_share(values[mask], confidence) for values in (faults.share, faults.layers, faults.flops)]
            yield Detection(name, errors, rate, answers, *shares)


def _has_equal_groups(originals: NDArray[np.int64]) -> bool:
    """Whether all original samples, except at most one, have equally many copies."""
    counts = np.sort(np.unique(originals, return_counts=True)[1])
    return len(counts) < 2 or bool(counts[1] == counts[-1])


def _false_alarms(
    parts: Sequence[ScoredStore], names: Sequence[str], rates: Sequence[float], confidence: float
) -> Iterator[FalseAlarms]:
    for name in names:
        for rate in rates:
            alarms: dict[str, list[NDArray[np.bool_]]] = {TEST: [], SHIFTED: []}
            for part in parts:
                threshold = part.threshold(name, rate)
                for key, groups in alarms.items():
                    groups += part.by_original(key, part.clean[key][name] > threshold)
            expected = None
            if len(parts) == 1:
                both = [parts[0].by_original(key, parts[0].clean[key][name]) for key in (CALIBRATION, TEST)]
                expected = exchanged_false_alarms(both[0], both[1], rate, confidence)
            shares = [_share_of_samples(groups, confidence) for groups in alarms.values()]
            yield FalseAlarms(name, rate, shares[0], sum(int(bits.sum()) for bits in alarms[TEST]), expected, shares[1])


def _share_of_samples(groups: Sequence[NDArray[np.bool_]], confidence: float) -> Interval:
    """The share of flagged samples, with an interval that treats original samples as independent."""
    wholes = tuple(len(samples) for samples in groups)
    return _ratio(tuple(int(samples.sum()) for samples in groups), wholes, max(wholes), confidence)


def _restored_shares(
    parts: Sequence[ScoredStore], hits: Detected, groups: Mapping[str, NDArray[np.bool_]], confidence: float
) -> Iterator[Restored]:
    rows = [row for part in parts for row in part.faults]
    if not rows:
        return
    some = np.where(hits.share > 0, hits.share, np.nan)
    alone = np.array([row.restored.mean(1) for row in rows])
    seconds = np.array([row.rung_seconds for row in rows])
    back = {rung: (alone[:, number], hits.by_rung[:, number]) for number, rung in enumerate(RUNGS)}
    back |= {LAYER: (hits.by_layer, hits.by_layer / some), LADDER: (hits.by_ladder, hits.by_ladder / some)}
    most = most_answers(parts)
    for errors, mask in groups.items():
        for rung, (of_changed, of_detected) in back.items():
            wholes, found_wholes = hits.changed[mask], (hits.changed * some)[mask]
            answers = _share_of_answers(of_changed[mask], wholes, most, confidence)
            detected_answers = _share_of_answers(of_detected[mask], found_wholes, most, confidence)
            shares = [_share(part[mask], confidence) for part in (of_changed, of_detected)]
            spent = float(np.median(seconds[mask, RUNGS.index(rung)])) if rung in RUNGS else None
            yield Restored(rung, errors, answers, shares[0], detected_answers, shares[1], spent)


def _share_of_answers(shares: Floats, wholes: Floats, most: int, confidence: float) -> Interval:
    """The share of all changed answers, from the shares and answer counts of the faults."""
    some = ~np.isnan(shares)
    return _ratio(tuple((shares * wholes)[some].tolist()), tuple(wholes[some].tolist()), most, confidence)


@lru_cache(maxsize=10_000)
def _ratio(parts: tuple[float, ...], wholes: tuple[float, ...], most: int, confidence: float) -> Interval:
    """The cached result of `ratio_of_means`, which is slow and often called with the same values."""
    return ratio_of_means(parts, wholes, most, confidence)


def _comparisons(
    hits: Mapping[tuple[str, float], Detected],
    names: Sequence[str],
    groups: Mapping[str, NDArray[np.bool_]],
    options: InferenceCoverageOptions,
) -> Iterator[Comparison]:
    """Compare the first detector with all others, at the requested rate of false alarms."""
    first = hits[names[0], options.rate].share
    pairs = [(name, errors, mask) for name in names[1:] for errors, mask in groups.items() if mask.any()]
    gaps = [(first - hits[name, options.rate].share)[mask] for name, _, mask in pairs]
    for (name, errors, _), result in zip(pairs, paired_differences(gaps, options.confidence), strict=True):
        yield Comparison(name, errors, result)


def _costs(parts: Sequence[ScoredStore], names: Sequence[str]) -> Iterator[Cost]:
    """The mean cost of each detector over all stores."""
    for name in names:
        memory, ratios = [], []
        for part in parts:
            number = part.detectors.index(name)
            memory.append(part.store.baseline.detectors[number].nbytes / part.store.baseline.model_bytes)
            if len(part.times):
                ratios.append(part.times[1 + number] / np.maximum(part.times[0], 1e-9))
        both = np.mean(ratios, axis=0).tolist() if ratios else [np.nan, np.nan]
        yield Cost(name, tuple(both), float(np.mean(memory)))


def _roc(parts: Sequence[ScoredStore], name: str) -> tuple[tuple[float, float], ...]:
    """ROC points: rates of false alarms, each with the share of changed answers that are detected."""
    reached = [shares for part in parts for shares in part.false_alarm_shares(name)]
    samples = min(len(part.clean[TEST][name]) for part in parts)
    values = np.concatenate(reached)
    places = [0.0, *np.geomspace(1 / samples, 1, ROC_POINTS).tolist()]
    return tuple((place, float((values <= place + 1e-12).mean())) for place in places)
