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
        outcome: Its class; what does not exceed both noise floors is masked.
        by_implementation: The class that it would have if implementation noise were all the noise there is.
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
    """The largest history values of one trial, by kind, relative to those of the golden run."""

    trial: str
    outcome: str
    ratios: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class TrainingPvfRow:
    """The training PVF of one target: the share of trials with a convergence failure.

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
    """How many faults of one group the guard detected.

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
    """FIT of the groups of an accelerator's flip-flops, where its raw failure rate is known."""
