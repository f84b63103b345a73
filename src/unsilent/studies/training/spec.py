"""What is corrupted in which training (`TrainingSpec`), what a worker finds out first (`TrainingFound`), what happened
(`TrainingRow`).

How a run is judged is no part of it: a row keeps the curves, and classes follow from them by thresholds that may change later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray

from unsilent.campaigns import codec
from unsilent.campaigns.codec import RUN, StoredRow
from unsilent.campaigns.options import DATA, SEED, WITH, Budget
from unsilent.campaigns.spec import Json, Means, Runner, TrialId, without_folders
from unsilent.errors import UsageError, unknown
from unsilent.options import CONFIDENCE, FAULTS, INTERNAL, MEANS, OUTPUT, PRECISION, RUNS, Asked, Option
from unsilent.outcomes.training import Thresholds

if TYPE_CHECKING:
    from unsilent.workloads.training import Progress

RANDOM = "random"
"""The target of faults in operations: step, fault model, layer and phase are all drawn."""
GUARDED, MADE = "guarded:", "made:"
"""Before a target: the same trial under the guard. Before a class of outcomes: faults made by hand to show it."""
MOMENTS: dict[str, Literal["start", "update", "end"]] = {
    "start": "start",
    "update": "update",
    "end": "end",
    "between": "start",
}
"""When faults corrupt memory -> the moment of a `Step`. Under a guard: after its snapshot, between the backward pass and the
update, after the update and before the check, after the check and before the next snapshot."""
PHASES = ("fwd", "grad_in", "grad_wt")
WATCHED = ("first", "second", "moving")
"""What is watched after a step: the largest magnitude of first moments, of second moments, of moving statistics."""
WATCHED_STEPS = 3
"""Steps that are watched: that of the fault and two more."""
REASONS = (
    "end", "same-bits", "not-finite", "horizon", "raised", "crash", "hang", "not-injected", "recovered", "missed", "stopped",
)  # fmt: skip
"""Why a run ended; the first four are those of runs that were followed, the last three those of guarded ones."""
FOLLOWED, UNDER_GUARD = REASONS[:4], REASONS[-3:]
NOT_INJECTED = "not-injected"
"""The operation that was drawn does not run in that step: no trial."""
OF_MEMORY = ("phases", "accelerator", "value")
"""Options that say where in operations faults are."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Horizon:
    """When a run that looks like golden is taken for masked.

    Attributes:
        steps: how long it must have been inside the band. window: steps that losses are averaged over. loss: for each ``window``
            steps of a run the widest difference from golden of that average. test: of held-out accuracy.
    """

    steps: int
    window: int
    loss: tuple[float, ...]
    test: float


def read_faults(given: Any) -> tuple[tuple[str, float], ...]:
    """Fault models and their weights, like ``RD`` and ``2*RD``; raises ``UsageError``. Models are read where they are used."""
    return tuple(_weighted(item) for item in ([given] if isinstance(given, str) else given))


def write_faults(faults: Any) -> list[str]:
    """The reverse."""
    return [name if weight == 1 else f"{weight:.15g}*{name}" for name, weight in faults]


def _weighted(text: str) -> tuple[str, float]:
    from unsilent.faults import fault_model
    from unsilent.faults.hardware.presets import PRESETS
    from unsilent.faults.values import VALUES

    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)\*(.+)", str(text))
    name, weight = (match[2], float(match[1])) if match else (str(text), 1.0)
    if not weight > 0:
        raise UsageError(f"--fault {text} has weight {weight:g}; expected more than 0")
    if name in PRESETS:
        return name, weight
    if name.partition(":")[0] not in VALUES:
        raise unknown("fault model", name, [*VALUES, *PRESETS])
    return fault_model(name).text, weight


def read_phases(given: Any) -> tuple[str, ...]:
    """Phases, each once; raises ``UsageError``."""
    names = tuple(dict.fromkeys([given] if isinstance(given, str) else given))
    for name in names:
        if name not in PHASES:
            raise unknown("phase", name, PHASES)
    return names


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """What was asked.

    Attributes:
        faults: fault models and their weights (``RD``, ``bitflip:bits=30``); empty: all published ones alike, or those of
            ``accelerator``. value: what corrupted elements become, in place of each fault model's own. phases, layers (globs):
        where. per: None: random faults in operations; ``component``, ``layer`` or ``tensor``: faults in parameters and
        optimizer state; ``kind``: faults in each kind of memory. moment: of a step, when memory is corrupted (see `MOMENTS`).
        init: seed of the training itself. steps: of a run; None: all. horizon: None: every run goes to its end.
    """

    workload: Annotated[str, Option(
        "A training: built-in name, file.py:name or package.module:name.", RUNS,
        missing="no training was named; give one like train-resnet (see unsilent workloads)")]  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WITH] = ()
    data: Annotated[str | None, DATA] = None
    faults: Annotated[tuple[tuple[str, float], ...], Option(
        "A published fault model (RD) or any of unsilent faults; 2*RD weighs it twice; repeat for more.", FAULTS, "fault",
        usual="all 18 published ones alike", read=read_faults, write=write_faults, repeated=True)] = ()  # fmt: skip
    accelerator: Annotated[str | None, Option(
        "Weigh fault models as nvdla, systolic, tensor-core or FILE.toml says.", FAULTS)] = None  # fmt: skip
    value: Annotated[str | None, Option(
        "What injected elements become, like uniform:low=1e16,high=1e18.", FAULTS,
        usual="the model's own")] = None  # fmt: skip
    phases: Annotated[tuple[str, ...], Option(
        "fwd, grad_in or grad_wt; repeat for more.", FAULTS, "phase", usual="all three", read=read_phases,
        repeated=True)] = PHASES  # fmt: skip
    layers: Annotated[tuple[str, ...], Option(
        "Modules, like block1.*; repeat for more.", FAULTS, "layer", usual="all", repeated=True)] = ("*",)  # fmt: skip
    per: Annotated[str | None, Option(
        "Training PVF: inject into parameters and optimizer state of each component, layer or tensor instead; or into each "
        "kind of memory.", FAULTS)] = None  # fmt: skip
    moment: Annotated[str, Option(
        "When faults are injected into memory: start (of a step, after the guard's snapshot), update (before it), end "
        "(before the guard's check), between (that and the next snapshot).", FAULTS)] = "start"  # fmt: skip
    seed: Annotated[int, SEED] = 0
    init: Annotated[int, Option("Seed of the training itself.", RUNS)] = 0
    steps: Annotated[int | None, Option("Steps of each run.", RUNS, usual="all of the training")] = None
    horizon: Annotated[Horizon | None, INTERNAL] = None
    threads: Annotated[int, INTERNAL] = 1
    study: Annotated[str, INTERNAL] = "training"

    @property
    def enumerated(self) -> bool:
        """Never: trials are drawn."""
        return False

    @property
    def device(self) -> str:
        """Where it trains: an option of its workload."""
        return dict(self.options).get("device", "cpu")

    @property
    def flips(self) -> tuple[None]:
        """The fault model says how many elements."""
        return (None,)

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)

    def make_runner(self, progress: Progress | None, means: Means) -> Runner:
        """What runs trials, in a worker."""
        from unsilent.studies.training.runner import TrainingRunner

        return TrainingRunner(self, progress, means)

    def identity(self) -> Json:
        """The spec without the folders its files happen to lie in."""
        return without_folders(self.to_json(), "data", "accelerator")


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """What trials are drawn for: ``random``, or the parameters or the optimizer state of a part of the model."""

    name: str
    what: str = ""
    """``param`` or ``optim``; empty for ``random``."""
    part: str = ""
    """Component, layer or tensor."""
    elements: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """An operation in one phase: ``conv1#convolution.0`` of module ``conv1`` in ``grad_in``."""

    operation: str
    phase: str
    layer: str


@dataclass(frozen=True, slots=True)
class TrainingBaseline:
    """What a worker found out before the first trial.

    Attributes:
        steps: of a run. epochs: of each step. losses, metric, watched: golden's, of each step (see `WATCHED`; None: nothing of
            this kind is remembered). test, test_loss: golden's at the end, on ``samples`` held-out samples. places: where faults
            can be. models: fault models with their weights. golden_seconds: of a whole run. optimizers: names.
    """

    campaign: str
    fingerprint: Mapping[str, str]
    name: str
    targets: tuple[TrainingTarget, ...]
    places: tuple[Place, ...]
    models: tuple[tuple[str, float], ...]
    steps: int
    epochs: tuple[int, ...]
    losses: tuple[float, ...]
    metric: tuple[float, ...]
    watched: tuple[tuple[float | None, ...], ...]
    test: float
    test_loss: float
    samples: int
    golden_seconds: float
    optimizers: tuple[str, ...]
    parameters: int
    info: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)


class InjectionPoint(NamedTuple):
    """Where and how one trial corrupts: ``site`` as a fault names it, ``model`` as the table of fault models does."""

    step: int
    site: str
    phase: str
    layer: str
    model: str


@dataclass(frozen=True, eq=False, slots=True)
class TrainingRow(StoredRow):
    """How one faulty training run went.

    Attributes:
        injection: the step and the operation (or memory) of the fault.
        faults: JSON list of the injected faults, or its digest where that is very long.
        injected_max: largest magnitude that was injected; inf where a value is not finite.
        reference_max: largest magnitude in the same tensor before the fault.
        reason: why the run ended (see `REASONS`).
        steps_run: steps from the fault on.
        losses, metric: float64[steps_run].
        watched: float64[<= WATCHED_STEPS, 3]; inf where a value is not finite, NaN where there is none.
        test, test_loss: accuracy and loss on held-out samples at the end; NaN where the end was not reached.
        churn: share of held-out predictions that differ from the fault-free run's.
        caught: of a guarded run, steps from the fault to the alarm; None without an alarm.
        error: text of what was raised, or of the alarm.
        seconds, worker: cost of the trial; not compared between stores.
        bit_identical: whether the final state is identical to the fault-free run's.
    """

    trial: TrialId
    injection: InjectionPoint
    faults: Annotated[str, codec.FAULTS]
    injected_max: float
    reference_max: float
    reason: str
    steps_run: int
    losses: Floats
    metric: Floats
    watched: Floats
    test: float
    test_loss: float
    churn: float
    caught: int | None = None
    error: str = ""
    seconds: Annotated[float, Ge(0), Lt(math.inf), RUN] = 0.0
    worker: Annotated[int, RUN] = 0
    bit_identical: bool = field(default=False)

    def unguarded(self) -> TrialId:
        """The trial whose fault a guarded one has."""
        return self.trial._replace(target=self.trial.target.removeprefix(GUARDED))


def bare(row: TrainingRow) -> TrainingRow:
    """Without its curves, for tables."""
    return replace(row, losses=np.empty(0), metric=np.empty(0))


# -- what is asked beside it, and how a spec is made of that -------------------------------------------------------------


def read_thresholds(given: Any) -> Thresholds:
    """``gap=0.05`` and the like, or a mapping, in place of defaults; raises ``UsageError``."""
    usual = Thresholds()
    texts = [given] if isinstance(given, str) else given
    result = {}
    for name, number in given.items() if isinstance(given, Mapping) else (text.partition("=")[::2] for text in texts):
        kinds = {part.name: type(getattr(usual, part.name)) for part in fields(Thresholds)}
        if name not in kinds:
            raise unknown("threshold", name, kinds)
        try:
            result[name] = kinds[name](str(number))
        except ValueError:
            noun = "a whole number" if kinds[name] is int else "a number"
            text = f"{name}={number}".rstrip("=")
            raise UsageError(f"--threshold {text!r}: expected {noun}, like {name}={getattr(usual, name)}") from None
    return Thresholds(**result)


def write_thresholds(thresholds: Any) -> list[str]:
    """The reverse, of those that are not the defaults."""
    return [
        f"{name}={value:.15g}" for name, value in asdict(thresholds).items() if value != getattr(Thresholds(), name)
    ]


@dataclass(frozen=True)
class TrainingBudget(Budget):
    """How many trials; a campaign is not split over machines, since the guard's trials follow from all others."""

    trials: Annotated[int, Option("Faulty runs, of each target with --per.", PRECISION)] = 200
    shard: Annotated[tuple[int, int], INTERNAL] = (1, 1)


@dataclass(frozen=True)
class Reading:
    """How a store is read: what may change without a trial being run again.

    ``margin``: how far held-out accuracy must be below the worst fault-free replica for a convergence failure.
    """

    thresholds: Annotated[Thresholds, Option(
        "Of the classes, like gap=0.05; repeat for more. See docs/training.md.", PRECISION, "threshold", unasked=(),
        read=read_thresholds, write=write_thresholds, repeated=True)] = field(default_factory=Thresholds)  # fmt: skip
    confidence: Annotated[float, CONFIDENCE] = 0.95
    margin: Annotated[float, Option(
        "How far below the worst fault-free run a convergence failure is (--per).", PRECISION)] = 0.02  # fmt: skip

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence}; expected a share between 0 and 1, like 0.95")
        if not 0 <= self.margin < 1:
            raise UsageError(f"margin is {self.margin}; expected a share from 0 to below 1")


@dataclass(frozen=True)
class ComparisonOptions:
    """What faulty runs are compared with: fault-free runs, and the same faults under the guard."""

    horizon: Annotated[int | None, Option(
        "Take a run for masked after so many steps inside the fault-free band.", PRECISION,
        usual="never")] = None  # fmt: skip
    replicas: Annotated[int, Option(
        "Fault-free runs of each noise floor: implementation noise, and other seeds.", PRECISION)] = 20  # fmt: skip
    noise: Annotated[str, Option("What differs between those of the first, as for unsilent noise.", PRECISION)] = "impl"
    floor: Annotated[Path | None, Option(
        "Where fault-free runs are kept.", OUTPUT, usual="unsilent-noise-….sqlite here")] = None  # fmt: skip
    guard: Annotated[bool, Option(
        "Run every different trial again under the guard, and say what it saved.", MEANS)] = False  # fmt: skip


def resolve(asked: Asked) -> TrainingSpec:
    """What was asked, checked as far as that is possible without the training; raises ``UsageError``."""
    from unsilent.faults.hardware.presets import PRESETS

    if asked["per"] is not None:
        asked.refuse(OF_MEMORY, "--per corrupts parameters and optimizer state, not operations")
        for name, _ in asked["faults"]:
            if name in PRESETS:
                raise UsageError(
                    f"--fault {name} is of an operation, and --per corrupts memory; name one like bitflip or zero"
                )
    else:
        asked.refuse(("margin",), "--margin is of convergence failures, which --per counts")
        asked.refuse(("moment",), "--moment is of faults in memory, which --per corrupts")
    if asked["moment"] not in MOMENTS:
        raise unknown("moment", asked["moment"], MOMENTS)
    for name, least in (("steps", 1), ("horizon", 2), ("seed", 0), ("init", 0)):
        if asked[name] is not None and asked[name] < least:
            raise UsageError(f"--{name} is {asked[name]}; expected {least} or more")
    return asked.make(TrainingSpec)
