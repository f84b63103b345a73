"""Judges faulty runs by comparison with fault-free ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.interval import Interval
from unsilent.outcomes.training import Thresholds, TrainingCurves, TrainingOutcome, averaged, classify_training
from unsilent.replicas import ReplicaSpec
from unsilent.replicas.noise_floor_records import NoiseFloors, ReplicaDifferences
from unsilent.replicas.noise_floors import NoiseFloorTest
from unsilent.statistics.comparing import joint_differences
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.records import Contrast, ExampleCurve, FlipFlopFit, JudgedTrial, TrialGroup
from unsilent.studies.training.spec import (
    EarlyEndRule,
    TrainingBaseline,
    TrainingRow,
    TrainingSpec,
    row_without_curves,
)

Floats = NDArray[np.float64]
SLACK = 2.0
"""Half-width of the band, as a multiple of the largest difference of a replica in this window or an adjacent one."""


def replica_spec(spec: TrainingSpec) -> ReplicaSpec:
    """The settings of the fault-free runs of a training."""
    return ReplicaSpec(spec.workload, spec.options, spec.data, spec.init, spec.steps)


def horizon_from_floor(floor: ReplicaDifferences, steps: int) -> EarlyEndRule:
    """The rule for ending masked runs early, from the replicas of the implementation floor."""
    band = np.pad(np.array(floor.loss_band), 1, mode="edge")
    wide = SLACK * np.max([band[:-2], band[1:-1], band[2:]], axis=0)
    return EarlyEndRule(steps, floor.window, tuple(wide.tolist()), float(np.abs(floor.accuracy).max()))


def convergence_limits(golden: float, floors: NoiseFloors, margin: float) -> tuple[float, float]:
    """Two limits of held-out accuracy below which a run has not converged.

    The first limit uses both noise floors, the second only implementation noise.
    """
    implementation, seeds = min(floors.implementation.accuracy), min(floors.seeds.accuracy)
    return golden + min(implementation, seeds) - margin, golden + implementation - margin


CRASHED = ("crash", "hang", "raised")
BACKWARD, FORWARD = ("grad_in", "grad_wt"), ("fwd",)
EXAMPLES = 3
"""Number of curves shown for each class."""
QUARTERS = 4
SHARES: Mapping[str, Callable[[JudgedTrial], bool]] = {
    "different": lambda trial: trial.is_different,
    "harmful": lambda trial: trial.is_harmful,
    "latent": lambda trial: trial.outcome.latent,
}
"""Conditions for the shares that are reported for every group of trials, in the order of `TrialGroup`."""


class TrainingJudge:
    """Assigns a class to each trial.

    Args:
        baseline: Baseline with the golden run.
        floors: Noise floors; a run that is not beyond both of them is masked, unless it was lost.
        thresholds: Thresholds of the classes.
    """

    def __init__(self, baseline: TrainingBaseline, floors: NoiseFloors, thresholds: Thresholds) -> None:
        self._found, self._thresholds = baseline, thresholds
        self._losses, self._metric = np.array(baseline.losses), np.array(baseline.metric)
        self._implementation, self._seeds = (
            NoiseFloorTest(f, thresholds.test_gap) for f in (floors.implementation, floors.seeds)
        )
        self.has_step_accuracy = not np.array_equal(self._metric, -self._losses)
        """Whether steps return an accuracy; thresholds do not apply to a loss, which has no fixed scale."""

    def golden_curves(self, step: int) -> TrainingCurves:
        """The curves of the golden run from a step on."""
        return TrainingCurves(self._metric[step:], self._losses[step:], self._found.test_accuracy, same_bits=True)

    def completed_curves(self, row: TrainingRow) -> TrainingCurves:
        """The curves of a faulty run from the fault to the end of the training.

        A run that was ended early as masked continues with the values of the golden run.
        """
        after = row.injection.step + row.steps_run
        rest = slice(after, None) if row.end_reason in ("same-bits", "horizon") else slice(0, 0)
        return TrainingCurves(
            np.concatenate([row.metric, self._metric[rest]]),
            np.concatenate([row.losses, self._losses[rest]]),
            row.test_accuracy,
            same_bits=row.bit_identical,
        )

    def judge(self, row: TrainingRow) -> JudgedTrial:
        """The trial of a row with its class."""
        if row.end_reason in CRASHED:
            return JudgedTrial(row_without_curves(row), TrainingOutcome.CRASHED, TrainingOutcome.CRASHED)
        golden, ending = self.golden_curves(row.injection.step), self.completed_curves(row)
        gap = row.test_loss - self._found.test_loss
        different = self._implementation.is_beyond_noise(golden, ending, gap)
        harmful = different and self._seeds.is_beyond_noise(golden, ending, gap)
        return JudgedTrial(
            row_without_curves(row), *(self._class(golden, ending, beyond) for beyond in (harmful, different))
        )

    def _class(self, golden: TrainingCurves, ending: TrainingCurves, beyond: bool) -> TrainingOutcome:
        return classify_training(
            golden, ending, self._thresholds, beyond_noise=beyond, training_metric=self.has_step_accuracy
        )

    def example_curve(self, row: TrainingRow, judged: JudgedTrial) -> ExampleCurve:
        """The curves of a trial for a figure, with averaged metrics."""
        golden, ending = self.golden_curves(row.injection.step), self.completed_curves(row)
        window = self._thresholds.window
        s = row.injection
        return ExampleCurve(
            outcome=str(judged.outcome),
            trial=str(row.trial),
            trial_description=f"{s.model} at {s.site}, step {s.step}",
            step=s.step,
            metric=_rounded_curve(averaged(ending.metric, window)),
            golden=_rounded_curve(averaged(golden.metric, window)),
            losses=tuple(x if np.isfinite(x) else None for x in ending.losses.tolist()),
            test_accuracy=None if np.isnan(row.test_accuracy) else row.test_accuracy,
        )


def group_trials_by(
    trials: Iterable[JudgedTrial], key: Callable[[JudgedTrial], str], confidence: float
) -> tuple[TrialGroup, ...]:
    """Group trials by the result of ``key``, the largest group first."""
    by_name: dict[str, list[JudgedTrial]] = defaultdict(list)
    for trial in trials:
        by_name[key(trial)].append(trial)
    names = sorted(by_name, key=lambda name: (-len(by_name[name]), name))
    return tuple(make_trial_group(name, by_name[name], confidence) for name in names)


def make_trial_group(name: str, trials: Sequence[JudgedTrial], confidence: float) -> TrialGroup:
    """The counts and shares of a group of trials."""
    counts = Counter(str(trial.outcome) for trial in trials)
    shares = (clopper_pearson(sum(map(is_so, trials)), len(trials), confidence) for is_so in SHARES.values())
    return TrialGroup(name, len(trials), dict(counts), *shares)


def groups_by_attribute(
    trials: Sequence[JudgedTrial], baseline: TrainingBaseline, confidence: float
) -> dict[str, tuple[TrialGroup, ...]]:
    """Groups of trials by phase, layer, fault model, part of the run and optimizer."""
    optimizers = " and ".join(dict.fromkeys(baseline.optimizers)) or "none"
    keys: dict[str, Callable[[JudgedTrial], str]] = {
        "phase": lambda trial: trial.row.injection.phase,
        "layer": lambda trial: trial.row.injection.layer,
        "fault model": lambda trial: trial.row.injection.model,
        "part of the run": lambda trial: _part(trial.row.injection.step, baseline.steps),
        "optimizer": lambda trial: optimizers,
    }
    return {name: group_trials_by(trials, key, confidence) for name, key in keys.items()}


def flip_flop_rates(
    trials: Sequence[JudgedTrial], baseline: TrainingBaseline, confidence: float
) -> tuple[FlipFlopFit, ...]:
    """The failure rate of each group of flip-flops: its raw rate times the measured shares."""
    return tuple(
        FlipFlopFit(group.name, group.n, raw, *(_times(raw, share) for share in (group.different, group.harmful)))
        for group in group_trials_by(trials, lambda trial: trial.row.injection.model.partition("/")[0], confidence)
        if (raw := baseline.raw_fit.get(group.name)) is not None
    )


def _times(raw: float, share: Interval) -> Interval:
    estimate = None if share.estimate is None else raw * share.estimate
    return replace(share, estimate=estimate, low=raw * share.low, high=raw * share.high)


def _part(step: int, steps: int) -> str:
    quarter = step * QUARTERS // steps
    first, last = -(-quarter * steps // QUARTERS), -(-(quarter + 1) * steps // QUARTERS) - 1
    return f"steps {first} to {last}"


def backward_against_forward(trials: Sequence[JudgedTrial], confidence: float) -> Iterator[Contrast]:
    """Contrasts between faults in the backward and in the forward pass.

    Only fault models that were drawn in both passes count. Fault models are drawn before the phase, so they have the same
    distribution in both passes. Limits of the differences hold for all three rows together.
    """
    models = [{t.row.injection.model for t in trials if t.row.injection.phase in side} for side in (BACKWARD, FORWARD)]
    both = models[0] & models[1]
    sides = [
        [t for t in trials if t.row.injection.phase in side and t.row.injection.model in both]
        for side in (BACKWARD, FORWARD)
    ]
    if not all(sides):
        return
    counts = [tuple((sum(map(is_so, side)), len(side)) for side in sides) for is_so in SHARES.values()]
    gaps = joint_differences([(first, second) for first, second in counts], confidence)
    for name, pair, gap in zip(SHARES, counts, gaps, strict=True):
        backward, forward = (clopper_pearson(*side, confidence) for side in pair)
        yield Contrast(name, "backward", "forward", backward, forward, gap)


def _rounded_curve(curve: Floats) -> tuple[float, ...]:
    return tuple(np.round(curve, 5).tolist())
