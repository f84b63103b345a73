"""Result records of a study of faulty training runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from unsilent.campaigns.campaign_result import CampaignResult
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.replicas.noise_floor_records import NoiseFloors
from unsilent.statistics.intervals import Interval
from unsilent.studies.training.spec import TrainingRow


@dataclass(frozen=True, eq=False, slots=True)
class JudgedTrial:
    """A trial with its class, but without its curves.

    Attributes:
        row: Stored row of the trial, without its curves.
        outcome: Class of the trial; a run within either of the two noise floors is masked.
        by_implementation: Class of the trial if only implementation noise counts as noise.
    """

    row: TrainingRow
    outcome: TrainingOutcome
    by_implementation: TrainingOutcome

    @property
    def is_different(self) -> bool:
        """Whether the trial was lost, or differs from the golden run beyond implementation noise."""
        return not self.by_implementation.masked

    @property
    def is_harmful(self) -> bool:
        """Whether the trial was lost, or is worse than the golden run beyond both noise floors."""
        return self.outcome.harmful


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """A group of trials: its counts by class, and its shares of different, harmful and latent trials."""

    name: str
    n: int
    counts: Mapping[str, int]
    different: Interval
    harmful: Interval
    latent: Interval


@dataclass(frozen=True, slots=True)
class FlipFlopFit:
    """The failure rates of one group of an accelerator's flip-flops."""

    name: str
    n: int
    raw: float
    different: Interval
    harmful: Interval


@dataclass(frozen=True, slots=True)
class ClassShare:
    """The count and the share of one class of outcomes."""

    name: str
    n: int
    different: int
    share: Interval


@dataclass(frozen=True, slots=True)
class Contrast:
    """The difference between two groups in one share, with an interval that holds jointly for all rows."""

    name: str
    first: str
    second: str
    one: Interval
    other: Interval
    difference: Interval


@dataclass(frozen=True, eq=False, slots=True)
class ExampleCurve:
    """The curves of an example trial, from the step of its fault on."""

    outcome: str
    trial: str
    trial_description: str
    step: int
    metric: tuple[float, ...]
    golden: tuple[float, ...]
    losses: tuple[float | None, ...]
    test_accuracy: float | None


@dataclass(frozen=True, slots=True)
class NecessaryCondition:
    """The contingency table of large history values after a fault and latent harm.

    Attributes:
        kind: Kind of history value (first, second, moving, any).
        factor: Multiple of the golden run's largest value above which a value counts as large.
        true_positives, false_negatives: Number of latent trials with and without a large value.
        false_positives, true_negatives: Number of harmless trials with and without a large value.
        sensitivity, specificity: Share of latent trials with a large value, and of harmless trials without one.
        visible_harm_with, visible_harm_without: Number of trials with visible harm, with and without a large value;
            they count in neither share.
        different: Sensitivity over all trials that are latent if only implementation noise counts as noise.
    """

    kind: str
    factor: float
    true_positives: int
    false_negatives: int
    false_positives: int
    true_negatives: int
    sensitivity: Interval
    specificity: Interval
    visible_harm_with: int
    visible_harm_without: int
    different: Interval


@dataclass(frozen=True, slots=True)
class ConditionPoint:
    """The largest history values of one trial, by kind, relative to those of the golden run."""

    trial: str
    outcome: str
    ratios: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class TrainingPvfRow:
    """The training PVF of one target: the share of trials with a convergence failure.

    ``different``: share of trials that are failures if only implementation noise counts as noise.
    """

    target: str
    memory_kind: str
    part: str
    elements: int
    n: int
    failures: int
    pvf: Interval
    different: Interval


@dataclass(frozen=True, slots=True)
class TrialCost:
    """The cost of a trial.

    Attributes:
        steps: Mean share of a full run's steps that a trial ran.
        steps_without_early_end: Mean share of steps if no run had ended early.
        seconds: Mean duration of a trial as a share of a full run's.
        per_hour: Number of trials per hour and worker.
        end_reasons: Number of runs by reason why they ended.
    """

    steps: float
    steps_without_early_end: float
    seconds: float
    per_hour: float
    end_reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GuardDetection:
    """How many faults of one group the guard detected.

    Attributes:
        n: Number of faults.
        detected_in_time: Number of faults with an alarm within two steps, after which the guard did not stop the run.
        recovered_identical: Number of faults detected in time after which the state was identical to golden's.
        share: Share of faults detected in time.
    """

    name: str
    n: int
    detected_in_time: int
    recovered_identical: int
    share: Interval


@dataclass(frozen=True, slots=True)
class GuardResult:
    """How many trials the guard detected and recovered.

    Attributes:
        large_fault_factor: Multiple of the largest value before the fault above which a fault counts as large.
        different: Detection in all trials that differ from fault-free runs.
        all_harmful: Detection in all harmful trials.
        large_harmful: Detection in harmful trials with a large fault.
        sizes: Detection in harmful trials by the size of the fault.
        groups: Detection in harmful trials by phase of the operation, or by target in memory.
        late_alarms: Number of harmful trials with a late alarm.
        stopped: Number of harmful trials that the guard stopped.
        alarms: Number of harmful trials by kind of alarm.
    """

    large_fault_factor: float
    different: GuardDetection
    all_harmful: GuardDetection
    large_harmful: GuardDetection
    sizes: tuple[GuardDetection, ...]
    groups: tuple[GuardDetection, ...]
    late_alarms: int
    stopped: int
    alarms: Mapping[str, int]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class TrainingResult(CampaignResult):
    """The result of a training campaign."""

    KIND: ClassVar[str] = "unsilent.studies.training.kind:TRAINING"
    workload: str
    command: str
    spec: Mapping[str, Any]
    campaign: str
    store: str
    steps: int
    samples: int
    parameters: int
    optimizers: tuple[str, ...]
    golden_test: float
    golden_seconds: float
    confidence: float
    thresholds: Thresholds
    floors: NoiseFloors
    level: float
    n: int
    classes: tuple[ClassShare, ...]
    all_trials: TrialGroup
    groups: Mapping[str, tuple[TrialGroup, ...]]
    contrasts: tuple[Contrast, ...]
    curves: tuple[ExampleCurve, ...]
    conditions: tuple[NecessaryCondition, ...]
    points: tuple[ConditionPoint, ...]
    parts: tuple[TrainingPvfRow, ...]
    margin: float
    cost: TrialCost
    guard: GuardResult | None
    seconds: float
    cpu_seconds: float
    versions: Mapping[str, str]
    info: Mapping[str, Any]
    notes: tuple[str, ...]
    golden_losses: tuple[float, ...] = ()
    """Loss of each step of the fault-free run."""
    flip_flops: tuple[FlipFlopFit, ...] = ()
    """Failure rates of the groups of an accelerator's flip-flops whose raw failure rate is known."""
