"""What a study of faulty training runs found: plain records, for reports and for callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.statistics.intervals import Interval
from unsilent.studies.training.kind import Floors
from unsilent.studies.training.spec import TrainingRow


@dataclass(frozen=True, eq=False, slots=True)
class Judged:
    """A trial, without its curves, and its class.

    Attributes:
        outcome: its class; what does not exceed both noise floors is masked. by_implementation: the class that it would have
            if implementation noise were all the noise there is.
    """

    row: TrainingRow
    outcome: TrainingOutcome
    by_implementation: TrainingOutcome

    @property
    def different(self) -> bool:
        """Whether it differs from golden by a threshold, and by more than implementation noise; or was lost."""
        return not self.by_implementation.masked

    @property
    def harmful(self) -> bool:
        """Whether it is worse than golden by a threshold, and by more than both noise floors; or was lost."""
        return self.outcome.harmful


@dataclass(frozen=True, slots=True)
class Group:
    """Trials that have something in common: of each class how many, and the shares that are different, harmful, latent harm."""

    name: str
    n: int
    counts: Mapping[str, int]
    different: Interval
    harmful: Interval
    latent: Interval


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
class Curve:
    """An example of a class: steps from that of the fault on; the training metric, averaged, of it and of golden; its losses."""

    outcome: str
    trial: str
    told: str
    step: int
    metric: tuple[float, ...]
    golden: tuple[float, ...]
    losses: tuple[float | None, ...]
    test: float | None
    made: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """A large history value within two steps of the fault, beside the outcome (latent harm).

    Attributes:
        kind: what is watched (first, second, moving, any). factor: times golden's largest, from which it counts as large. With
            and without it: how many of the latent (``hit``, ``missed``), of the harmless (``false``, ``clear``), and of those
            whose harm shows itself (``loud_with``, ``loud_without``), which neither share counts. different: sensitivity among
            all trials that are latent harm by implementation noise alone.
    """

    kind: str
    factor: float
    hit: int
    missed: int
    false: int
    clear: int
    sensitivity: Interval
    specificity: Interval
    loud_with: int
    loud_without: int
    different: Interval


@dataclass(frozen=True, slots=True)
class Point:
    """One trial in the view of necessary conditions: largest values within two steps, by kind, as multiples of golden's."""

    trial: str
    outcome: str
    ratios: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Training PVF of one target: trials, convergence failures, and their share.

    ``different``: the share that would be failures if implementation noise were all the noise there is.
    """

    target: str
    what: str
    part: str
    elements: int
    n: int
    failures: int
    pvf: Interval
    different: Interval


@dataclass(frozen=True, slots=True)
class Cost:
    """What a trial cost.

    Attributes:
        steps: mean share of a full run's steps that a trial ran. bound: the same if each went to its end. seconds: mean share
            of a full run's time. per_hour: trials in an hour of one worker. ends: why runs ended, how many each.
    """

    steps: float
    bound: float
    seconds: float
    per_hour: float
    ends: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Caught:
    """Faults of one kind under the guard. ``within``: caught within two steps; ``identical``: of these, golden's bits."""

    name: str
    n: int
    within: int
    identical: int
    share: Interval


@dataclass(frozen=True, slots=True)
class GuardFound:
    """What the guard saved: of all different trials, of all harmful ones, of those of them that wrote more than ``large``
    times what was usual, by size, and by group (phase of the operation, or target in memory). ``late``, ``stopped``,
    ``alarms``: counts of harmful ones.
    """

    large: float
    different: Caught
    all: Caught
    largest: Caught
    sizes: tuple[Caught, ...]
    groups: tuple[Caught, ...]
    late: int
    stopped: int
    alarms: Mapping[str, int]


@dataclass(frozen=True, eq=False, slots=True)
class TrainingResult:
    """Everything that was found."""

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
    floors: Floors
    level: float
    n: int
    classes: tuple[ClassShare, ...]
    whole: Group
    groups: Mapping[str, tuple[Group, ...]]
    contrasts: tuple[Contrast, ...]
    curves: tuple[Curve, ...]
    conditions: tuple[Condition, ...]
    points: tuple[Point, ...]
    parts: tuple[Part, ...]
    margin: float
    cost: Cost
    guard: GuardFound | None
    seconds: float
    cpu_seconds: float
    versions: Mapping[str, str]
    info: Mapping[str, Any]
    notes: tuple[str, ...]
    golden_losses: tuple[float, ...] = ()
    """Of each step of the fault-free run."""
