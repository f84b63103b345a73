"""Results of a study of faulty training runs: plain records, for reports and for callers."""

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
    """A trial, without its curves, and its class.

    Attributes:
        outcome: Its class; what does not exceed both noise floors is masked.
        by_implementation: The class that it would have if implementation noise were all the noise there is.
    """

    row: TrainingRow
    outcome: TrainingOutcome
    by_implementation: TrainingOutcome

    @property
    def is_different(self) -> bool:
        """Whether it differs from golden by a threshold, and by more than implementation noise; or was lost."""
        return not self.by_implementation.masked

    @property
    def is_harmful(self) -> bool:
        """Whether it is worse than golden by a threshold, and by more than both noise floors; or was lost."""
        return self.outcome.harmful


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """Trials that have something in common: of each class how many, and the shares that are different, harmful, latent harm."""

    name: str
    n: int
    counts: Mapping[str, int]
    different: Interval
    harmful: Interval
    latent: Interval


@dataclass(frozen=True, slots=True)
class FlipFlopFit:
    """Failure rates of one group of an accelerator's flip-flops: FIT of all faults, of those that end different, and harmful."""

    name: str
    n: int
    raw: float
    different: Interval
    harmful: Interval


@dataclass(frozen=True, slots=True)
class ClassShare:
    """One class: how many trials, how many of these are different, and their share of all trials."""

    name: str
    n: int
    different: int
    share: Interval


@dataclass(frozen=True, slots=True)
class Contrast:
    """One group against another: a share (``name``) of both, and the difference, whose limits hold for all rows together."""

    name: str
    first: str
    second: str
    one: Interval
    other: Interval
    difference: Interval


@dataclass(frozen=True, eq=False, slots=True)
class ExampleCurve:
    """An example of a class: steps from that of the fault on; the training metric, averaged, of it and of golden; its losses."""

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
    """A large history value within two steps of the fault, together with the outcome (latent harm).

    Attributes:
        kind: What is watched (first, second, moving, any).
        factor: Times golden's largest, from which it counts as large. With and without it: how many of the
            latent (``true_positives``, ``false_negatives``), of the harmless (``false_positives``,
            ``true_negatives``), and of those whose harm shows itself (``visible_harm_with``,
            ``visible_harm_without``), which neither share counts.
        different: Sensitivity among all trials that are latent harm by implementation noise alone.
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
    """One trial in the view of necessary conditions: largest values within two steps, by kind, as multiples of golden's."""

    trial: str
    outcome: str
    ratios: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class TrainingPvfRow:
    """Training PVF of one target: trials, convergence failures, and their share.

    ``different``: the share that would be failures if implementation noise were all the noise there is.
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
        steps_without_early_end: The same if no run had ended early.
        seconds: Mean share of a full run's time.
        per_hour: Trials in an hour of one worker.
        end_reasons: Why runs ended, how many each.
    """

    steps: float
    steps_without_early_end: float
    seconds: float
    per_hour: float
    end_reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GuardDetection:
    """Faults of one kind under the guard.

    ``detected_in_time``: caught within two steps; ``recovered_identical``: of these, with final weights identical to golden's.
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
        large_fault_factor: A fault is large that wrote more than so many times the reference.
        different: Of all trials that differ from fault-free ones.
        all_harmful: Of all harmful trials.
        large_harmful: Of harmful trials with a large fault.
        sizes: By the size of the fault.
        groups: By phase of the operation, or target in memory.
        late_alarms: Harmful trials whose alarm came late.
        stopped: Harmful trials that the guard stopped.
        alarms: Harmful trials by kind of alarm.
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
    """Everything that was found."""

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
    """FIT of the groups of an accelerator's flip-flops, where its raw failure rate is known."""
