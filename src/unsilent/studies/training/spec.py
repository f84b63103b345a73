"""What is struck in which training (`TrainingSpec`), what a worker finds out first (`TrainingFound`), what happened
(`TrainingRow`).

How a run is judged is no part of it: a row keeps the curves, and classes follow from them by thresholds that may change later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray

from unsilent.campaigns.codec import FAULTS, RUN, StoredRow
from unsilent.campaigns.spec import Json, Means, Runner, TrialId, without_folders

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

    workload: str
    options: tuple[tuple[str, str], ...] = ()
    data: str | None = None
    faults: tuple[tuple[str, float], ...] = ()
    accelerator: str | None = None
    value: str | None = None
    phases: tuple[str, ...] = PHASES
    layers: tuple[str, ...] = ("*",)
    per: str | None = None
    moment: str = "start"
    seed: int = 0
    init: int = 0
    steps: int | None = None
    horizon: Horizon | None = None
    threads: int = 1
    study: str = "training"

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
    faults: Annotated[str, FAULTS]
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
