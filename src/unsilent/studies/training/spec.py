"""What is struck in which training (`TrainingSpec`), what a worker finds out first (`TrainingFound`), what happened
(`TrainingRow`).

How a run is judged is no part of it: a row keeps the curves, and classes follow from them by thresholds that may change later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray

from unsilent.campaigns import codec
from unsilent.campaigns.codec import RUN, StoredRow
from unsilent.campaigns.options import DATA, SEED, WITH
from unsilent.campaigns.spec import Json, Means, Runner, TrialId, without_folders
from unsilent.errors import UsageError, unknown
from unsilent.options import FAULTS, INTERNAL, RUNS, Option

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
"""When faults strike memory -> the moment of a `Step`. Under a guard: after its snapshot, between the backward pass and the
update, after the update and before the check, after the check and before the next snapshot."""
PHASES = ("fwd", "grad_in", "grad_wt")
WATCHED = ("first", "second", "moving")
"""What is watched after a step: the largest magnitude of first moments, of second moments, of moving statistics."""
WATCHED_STEPS = 3
"""Steps that are watched: that of the fault and two more."""
REASONS = (
    "end", "same-bits", "not-finite", "horizon", "raised", "crash", "hang", "not-struck", "recovered", "missed", "stopped",
)  # fmt: skip
"""Why a run ended; the first four are those of runs that were followed, the last three those of guarded ones."""
FOLLOWED, UNDER_GUARD = REASONS[:4], REASONS[-3:]
NOT_STRUCK = "not-struck"
"""The operation that was drawn does not run in that step: no trial."""
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

    found = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)\*(.+)", str(text))
    name, weight = (found[2], float(found[1])) if found else (str(text), 1.0)
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
            ``accelerator``. value: what struck elements become, in place of each fault model's own. phases, layers (globs):
        where. per: None: random faults in operations; ``component``, ``layer`` or ``tensor``: faults in parameters and
        optimizer state; ``kind``: faults in each kind of memory. moment: of a step, when memory is struck (see `MOMENTS`).
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

    def make_runner(self, told: Progress | None, means: Means) -> Runner:
        """What runs trials, in a worker."""
        from unsilent.studies.training.runner import TrainingRunner

        return TrainingRunner(self, told, means)

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
class TrainingFound:
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


class Struck(NamedTuple):
    """Where and how one trial strikes: ``site`` as a fault names it, ``model`` as the table of fault models does."""

    step: int
    site: str
    phase: str
    layer: str
    model: str


@dataclass(frozen=True, eq=False, slots=True)
class TrainingRow(StoredRow):
    """How one struck training went.

    Attributes:
        faults: JSON list of what landed (its digest where that is very long). written: largest magnitude that was written (inf
            where it is none). usual: largest magnitude in the struck tensor before. reason: why the run ended (`engine.forking`,
            or ``crash``, ``hang``, ``raised``; of a guarded run ``recovered``, ``missed`` or ``stopped``). ran: steps from the
            fault on. losses, metric: float64[ran]. watched: float64[<= WATCHED_STEPS, 3], inf for what is no number, NaN for
            what is not there. test, test_loss: on held-out samples at the end; NaN where it was not reached. churn: share of
            held-out predictions that differ from golden's. caught: of a guarded run, steps from the fault to the alarm; None:
            none. error: text of what was raised, or of the alarm. seconds, worker: no content.
    """

    trial: TrialId
    struck: Struck
    faults: Annotated[str, codec.FAULTS]
    written: float
    usual: float
    reason: str
    ran: int
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
    bits: bool = field(default=False)
    """Whether the run ended with golden's bits."""

    def unguarded(self) -> TrialId:
        """The trial whose fault a guarded one has."""
        return self.trial._replace(target=self.trial.target.removeprefix(GUARDED))


def bare(row: TrainingRow) -> TrainingRow:
    """Without its curves, for tables."""
    return replace(row, losses=np.empty(0), metric=np.empty(0))
