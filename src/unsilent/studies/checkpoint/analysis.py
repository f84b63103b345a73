"""Analyses the resumes of a campaign: the class of each resume, shares by group, and differences between groups.

A resume is *different* if it ends beyond implementation noise. It is *harmful* if it is worse than the clean resume by more than
the gap and also beyond the noise of seeds, or if it raised, crashed or hung. `unsilent.outcomes.training` defines the classes.
The noise floors are measured on the training in one process.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.campaigns.campaign_result import StoreResult, facts_of_stores
from unsilent.outcomes.training import Thresholds, TrainingCurves, TrainingOutcome, classify_training
from unsilent.replicas.noise_floor_records import NoiseFloors, stored_floors
from unsilent.replicas.noise_floors import NoiseFloorTest
from unsilent.report.text import count_text
from unsilent.statistics.comparing import joint_differences, paired
from unsilent.statistics.intervals import clopper_pearson, normal_quantile
from unsilent.studies.checkpoint.kind import CheckpointStore
from unsilent.studies.checkpoint.spec import (
    COLLECTIVES,
    FOLLOWED,
    CheckpointAnalysisOptions,
    CheckpointBaseline,
    CheckpointRow,
    CheckpointSpec,
    CheckpointTarget,
)

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
ALL_FLIPS = "all numbers of flips"
POWER = 0.8
"""Power of the test with which the smallest detectable difference is found."""
MODEL, OPTIMIZER = ("weights", "statistics"), ("first_moment", "second_moment")


@dataclass(frozen=True, eq=False)
class JudgedResume:
    """One resume with its class.

    Attributes:
        target, flips, k: Target, number of flips and number of the trial; trials of the same section of the file with equal
            ``flips`` and ``k`` have the same faults.
        outcome: Class of the resume; a difference within the noise of seeds is masked.
        different: Whether the resume is beyond implementation noise.
        steps_to_recover: Number of steps after which the metric stayed within the gap of the clean resume's; ``None`` if it
            did not, or is not known.
        nonfinite, extreme: Whether each layer ever had such values, bool[layers].
        changed: Share of parameter elements with other bits than in the clean resume, float64[ranks, evaluations, layers];
            NaN if it is not known or if the rank has no element of the layer.
        changed_of_all: Share of all parameter elements with other bits, float64[ranks, evaluations].
    """

    target: CheckpointTarget
    flips: int
    k: int
    outcome: TrainingOutcome
    different: bool
    bit_identical: bool
    final_hash: str
    steps_to_recover: int | None
    nonfinite: Flags
    extreme: Flags
    changed: Floats
    changed_of_all: Floats

    @property
    def harmful(self) -> bool:
        """Whether the resume ended in a harmful class."""
        return self.outcome.harmful


@dataclass(frozen=True, eq=False)
class LayerSpread:
    """How far the fault spread to one layer, over all resumes of a target.

    Attributes:
        changed: Mean share of changed parameters over ranks and trials, float64[evaluations].
        nonfinite, extreme: Number of trials in which the layer ever had such values.
    """

    target: CheckpointTarget
    layer: str
    changed: Floats
    nonfinite: int
    extreme: int


@dataclass(frozen=True, eq=False)
class ResumeGroup:
    """Resumes of one target with one number of flips.

    Attributes:
        counts: Number of trials in each class.
        harmful, different: Shares of harmful and of different trials.
        recovered: Median number of steps to recover, over trials that left the gap and recovered; ``None`` if none did.
        changed: Mean share of changed parameters over the trials that reached the evaluation, float64[ranks, evaluations].
    """

    target: CheckpointTarget
    flips: int
    trials: int
    counts: dict[str, int]
    harmful: Interval
    different: Interval
    with_nonfinite: int
    with_extreme: int
    recovered: float | None
    changed: Floats

    @property
    def harmful_trials(self) -> int:
        """Trials that ended harmfully."""
        return round((self.harmful.estimate or 0.0) * self.trials)


@dataclass(frozen=True)
class Difference:
    """The difference between two groups in the share of harmful resumes.

    ``detectable``: smallest difference that the test would find with a power of `POWER`.
    """

    name: str
    first: Interval
    second: Interval
    difference: Interval
    detectable: float
    is_paired: bool

    @property
    def is_shown(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0


@dataclass(frozen=True)
class EqualPairs:
    """Counts of pairs of trials that have the same faults under two strategies."""

    same_class: int
    same_bits: int
    count: int


@dataclass(frozen=True, repr=False)
class CheckpointResult(StoreResult[CheckpointSpec, CheckpointBaseline, CheckpointAnalysisOptions]):
    """The result of a checkpoint study."""

    KIND: ClassVar[str] = "unsilent.studies.checkpoint.kind:CHECKPOINT_STUDY"
    floors: NoiseFloors
    trials: tuple[JudgedResume, ...]
    groups: tuple[ResumeGroup, ...]
    layers: tuple[LayerSpread, ...]
    differences: tuple[Difference, ...]
    pairs: EqualPairs


def analyse(store: CheckpointStore, options: CheckpointAnalysisOptions) -> CheckpointResult:
    """Judge all trials of a store.

    Raises ``UsageError`` if the store has no trial or no noise floors.
    """
    floors, spec, baseline = stored_floors(store), store.spec, store.baseline
    if floors is None:
        raise UsageError(f"{store.path} has no noise floors yet; run the command that made it again")
    judge = ResumeJudge(baseline, floors, options)
    trials = tuple(judge.judge(row) for row in store.rows())
    by_stratum: dict[tuple[str, int], list[JudgedResume]] = defaultdict(list)
    for trial in trials:
        by_stratum[trial.target.name, trial.flips].append(trial)
    groups = tuple(
        _group(target, flips, by_stratum[target.name, flips], options.confidence)
        for target in baseline.targets
        for flips in spec.flips
        if by_stratum[target.name, flips]
    )
    differences = Differences(baseline.targets, spec.flips, by_stratum, options.confidence)
    between = (differences.between_sections(), differences.between_strategies(), differences.between_ways_to_load())
    return CheckpointResult(
        **facts_of_stores([store], options),
        floors=floors,
        trials=trials,
        groups=groups,
        layers=tuple(_layer_spreads(baseline, trials)),
        differences=tuple(itertools.chain.from_iterable(between)),
        pairs=differences.equal_pairs(),
    )


class ResumeJudge:
    """Assigns a class to each resume."""

    def __init__(self, baseline: CheckpointBaseline, floors: NoiseFloors, options: CheckpointAnalysisOptions) -> None:
        self._baseline, self._gap = baseline, options.gap
        self._thresholds = Thresholds(gap=options.gap, test_gap=options.gap)
        self._implementation, self._seeds = (
            NoiseFloorTest(floor, options.gap) for floor in (floors.implementation, floors.seeds)
        )

    def judge(self, row: CheckpointRow) -> JudgedResume:
        """The resume of a row with its class."""
        target = self._baseline.target(row.trial.target)
        clean = self._baseline.resume(target.strategy)
        which = target, row.trial.flips or 1, row.trial.k
        if row.end not in FOLLOWED:
            none, layers = np.zeros(0, np.bool_), len(self._baseline.layers)
            shares = np.empty((clean.ranks, 0, layers))
            return JudgedResume(
                *which, TrainingOutcome.CRASHED, True, False, "", None, none, none, shares, shares[..., 0]
            )
        golden = TrainingCurves(np.array(clean.metric), np.array(clean.losses), clean.accuracy[-1], same_bits=True)
        ended = row.end == "finished"
        accuracy = float(row.accuracy[-1]) if ended else math.nan
        faulty = TrainingCurves(row.metric, row.losses, accuracy, same_bits=row.bit_identical)
        gap = float(row.held_out_loss[-1]) - clean.held_out_loss[-1] if ended else math.nan
        different = self._implementation.is_beyond_noise(golden, faulty, gap)
        beyond = different and self._seeds.is_beyond_noise(golden, faulty, gap)
        has_accuracy = not np.array_equal(golden.metric, -golden.losses)
        outcome = classify_training(golden, faulty, self._thresholds, beyond_noise=beyond, training_metric=has_accuracy)
        changed = np.where(row.changed < 0, np.nan, row.changed)
        elements = np.array(clean.elements, np.float64)
        with np.errstate(invalid="ignore"):  # a rank may have no element of a layer
            by_layer, of_all = changed / elements[:, None], changed.sum(-1) / elements.sum(-1)[:, None]
        return JudgedResume(
            *which, outcome, different, row.bit_identical, row.final_hash,
            self._recovery(golden, row) if ended and has_accuracy else None,
            row.nonfinite.sum(0) > 0, row.extreme.sum(0) > 0, by_layer, of_all,
        )  # fmt: skip

    def _recovery(self, golden: TrainingCurves, row: CheckpointRow) -> int | None:
        """Steps until the windowed mean of the metric stays within the gap; None if it never does."""
        window = min(self._thresholds.window, len(row.metric))
        kernel = np.ones(window) / window
        with np.errstate(invalid="ignore"):
            below = np.convolve(golden.metric[: len(row.metric)] - row.metric, kernel, "valid")
        low = np.flatnonzero(~(below <= self._gap))
        if not low.size:
            return 0
        return None if low[-1] == len(below) - 1 else int(low[-1]) + 1


def _group(target: CheckpointTarget, flips: int, trials: Sequence[JudgedResume], confidence: float) -> ResumeGroup:
    recovered = [t.steps_to_recover for t in trials if t.steps_to_recover]
    return ResumeGroup(
        target, flips, len(trials), dict(Counter(str(t.outcome) for t in trials)),
        _share(trials, lambda t: t.harmful, confidence), _share(trials, lambda t: t.different, confidence),
        sum(bool(t.nonfinite.any()) for t in trials), sum(bool(t.extreme.any()) for t in trials),
        float(np.median(recovered)) if recovered else None, mean_over_trials([t.changed_of_all for t in trials]),
    )  # fmt: skip


def _layer_spreads(baseline: CheckpointBaseline, trials: Sequence[JudgedResume]) -> Iterator[LayerSpread]:
    """The spread to every layer for every target, over all numbers of flips."""
    for target in baseline.targets:
        reached = [t for t in trials if t.target == target and t.nonfinite.size]
        if not reached:
            continue
        shares = mean_over_trials([t.changed for t in reached])
        for number, layer in enumerate(baseline.layers):
            yield LayerSpread(
                target, layer, _mean_known(shares[..., number]), sum(bool(t.nonfinite[number]) for t in reached),
                sum(bool(t.extreme[number]) for t in reached),
            )  # fmt: skip


def mean_over_trials(arrays: Sequence[Floats]) -> Floats:
    """The mean over trials at each evaluation, of the trials that reached that evaluation."""
    length = max(array.shape[1] for array in arrays)
    padded = [
        np.pad(a, [(0, 0), (0, length - a.shape[1]), *[(0, 0)] * (a.ndim - 2)], constant_values=np.nan) for a in arrays
    ]
    return _mean_known(np.stack(padded))


def _mean_known(values: Floats) -> Floats:
    """The mean over the first axis, ignoring NaN; NaN where all values are NaN."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        result: Floats = np.where(known, values, 0.0).sum(0) / known.sum(0)
    return result


def _share(trials: Sequence[JudgedResume], is_so: Callable[[JudgedResume], bool], confidence: float) -> Interval:
    return clopper_pearson(sum(map(is_so, trials)), len(trials), confidence)


class Differences:
    """Differences of harmful shares between targets.

    Args:
        targets, flips: Targets and numbers of flips of the campaign.
        by_stratum: Trials by name of the target and number of flips.
        confidence: Confidence of the limits.
    """

    def __init__(
        self,
        targets: Sequence[CheckpointTarget],
        flips: Sequence[int],
        by_stratum: Mapping[tuple[str, int], Sequence[JudgedResume]],
        confidence: float,
    ) -> None:
        self._flips, self._by_stratum, self._confidence = flips, by_stratum, confidence
        self._targets = [target for target in targets if target.section != COLLECTIVES]

    def between_sections(self) -> Iterator[Difference]:
        """Differences between each section of the model and each section of the optimizer.

        The first ones are for all numbers of flips together, the others for each number; the limits of each kind hold jointly.
        Strategies are never combined, because they have the same faults, so their trials are not independent.
        """
        if len(self._flips) > 1:
            yield from self._between_sections([tuple(self._flips)])
        yield from self._between_sections([(flips,) for flips in self._flips])

    def _between_sections(self, choices: Sequence[tuple[int, ...]]) -> Iterator[Difference]:
        pairs = [
            (model, optimizer, flips, self._as_many(model, optimizer, flips), self._as_many(optimizer, model, flips))
            for model, optimizer in itertools.product(self._targets, repeat=2)
            for flips in choices
            if model.section in MODEL and optimizer.section in OPTIMIZER
            and (model.strategy, model.loaded_by) == (optimizer.strategy, optimizer.loaded_by)
        ]  # fmt: skip
        pairs = [pair for pair in pairs if pair[-1]]
        counts = [(harmful_count(first), harmful_count(second)) for *_, first, second in pairs]
        gaps = joint_differences(counts, self._confidence)
        alone = 1 - (1 - self._confidence) / max(len(counts), 1)
        for (model, optimizer, flips, first, second), gap in zip(pairs, gaps, strict=True):
            where = model.strategy if model.loaded_by == "all" else f"{model.strategy} ({model.loaded_by})"
            what = count_text(flips[0], "flip") if len(flips) == 1 else ALL_FLIPS
            name = f"{where}, {model.section} against {optimizer.section}, {what}"
            detectable = smallest_detectable(harmful_count(first), harmful_count(second), alone)
            yield self._difference(name, first, second, gap, detectable, is_paired=False)

    def _as_many(self, target: CheckpointTarget, rival: CheckpointTarget, flips: Sequence[int]) -> list[JudgedResume]:
        """The trials of a target, limited at each number of flips to as many as its rival has."""
        return [
            trial
            for number in flips
            for trial in self._by_stratum[target.name, number][: len(self._by_stratum[rival.name, number])]
        ]

    def between_strategies(self) -> Iterator[Difference]:
        """Differences between each pair of strategies, on trials with the same faults.

        Only trials in which all ranks load the corrupted file count. The intervals hold jointly.
        """
        names = dict.fromkeys(target.strategy for target in self._targets)
        yield from self._paired_differences(
            (f"{first} against {later}", self._pairs(first, "all", later, "all"))
            for first, later in itertools.combinations(names, 2)
        )

    def between_ways_to_load(self) -> Iterator[Difference]:
        """Differences between each pair of ways to load the file, by strategy, on trials with the same faults.

        The intervals hold jointly.
        """
        ways = dict.fromkeys((target.strategy, target.loaded_by) for target in self._targets)
        yield from self._paired_differences(
            (f"{strategy}, loaded by {way} against {later}", self._pairs(strategy, way, strategy, later))
            for (strategy, way), (same, later) in itertools.combinations(ways, 2)
            if strategy == same
        )

    def equal_pairs(self) -> EqualPairs:
        """Count the pairs of trials that have the same faults under two strategies."""
        names = dict.fromkeys(target.strategy for target in self._targets)
        pairs = [pair for a, b in itertools.combinations(names, 2) for pair in self._pairs(a, "all", b, "all")]
        return EqualPairs(
            sum(a.outcome == b.outcome for a, b in pairs),
            sum(bool(a.final_hash) and a.final_hash == b.final_hash for a, b in pairs),
            len(pairs),
        )

    def _pairs(
        self, strategy: str, loaded_by: str, other_strategy: str, other_loaded_by: str
    ) -> list[tuple[JudgedResume, JudgedResume]]:
        """Pairs of trials with the same faults, one of each strategy and way to load."""
        first, second = (
            {(t.target.section, t.flips, t.k): t for target in self._targets for flips in self._flips
             if (target.strategy, target.loaded_by) == chosen for t in self._by_stratum[target.name, flips]}
            for chosen in ((strategy, loaded_by), (other_strategy, other_loaded_by))
        )  # fmt: skip
        return [(first[key], second[key]) for key in first if key in second]

    def _paired_differences(
        self, choices: Iterable[tuple[str, list[tuple[JudgedResume, JudgedResume]]]]
    ) -> Iterator[Difference]:
        """Differences on paired trials; a comparison with fewer than two pairs is left out."""
        chosen = [(name, pairs) for name, pairs in choices if len(pairs) > 1]
        alone = 1 - (1 - self._confidence) / max(len(chosen), 1)
        for name, pairs in chosen:
            gap = paired([float(a.harmful) - float(b.harmful) for a, b in pairs], alone)
            first, second = zip(*pairs, strict=True)
            unequal = sum(a.harmful != b.harmful for a, b in pairs)
            yield self._difference(
                name, first, second, replace(gap, confidence=self._confidence),
                smallest_detectable_in_pairs(unequal, len(pairs), alone), is_paired=True,
            )  # fmt: skip

    def _difference(
        self,
        name: str,
        first: Sequence[JudgedResume],
        second: Sequence[JudgedResume],
        gap: Interval,
        detectable: float,
        *,
        is_paired: bool,
    ) -> Difference:
        share, other_share = (_share(side, lambda t: t.harmful, self._confidence) for side in (first, second))
        return Difference(name, share, other_share, gap, detectable, is_paired)


def harmful_count(trials: Sequence[JudgedResume]) -> tuple[int, int]:
    """The number of harmful trials, and the number of trials."""
    return sum(t.harmful for t in trials), len(trials)


def smallest_detectable(first: tuple[int, int], second: tuple[int, int], confidence: float) -> float:
    """The approximate smallest difference of two independent shares that a test with a power of 80 % finds.

    The function uses the normal approximation with the pooled share (Fleiss, Levin and Paik 2003, section 4.2). It assumes at
    least one event and one trial without.
    """
    (events, n), (others, m) = first, second
    pooled = min(max((events + others) / (n + m), 1 / (n + m)), 1 - 1 / (n + m))
    return min(1.0, _quantiles(confidence) * math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m)))


def smallest_detectable_in_pairs(unequal: int, pairs: int, confidence: float) -> float:
    """The smallest detectable difference of shares between paired trials, ``unequal`` of which differ."""
    return min(1.0, _quantiles(confidence) * math.sqrt(max(unequal, 1)) / pairs)


def _quantiles(confidence: float) -> float:
    return normal_quantile(confidence) + normal_quantile(2 * POWER - 1)
