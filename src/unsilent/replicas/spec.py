"""What is trained (`ReplicaSpec`), what was found out about it (`Trained`), which run (`Replica`), how it ended (`ReplicaRow`).

A replica is known by its training, its switches and its number, and nothing else: who asks for the same one gets the same row,
whichever study, worker or day it is from. Its seeds follow from base seed and number, and those of different switches are the
same for the same number: replica 3 of ALGO and replica 3 of ALGO+IMPL differ in the implementation alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray

from unsilent.campaigns.codec import LARGE, RUN, StoredRow
from unsilent.campaigns.options import DATA, WITH
from unsilent.campaigns.spec import Json, Means, Runner, TrialId, without_folders
from unsilent.errors import UsageError
from unsilent.options import PRECISION, RUNS, Option
from unsilent.replicas.switches import SWITCHES, Switches

if TYPE_CHECKING:
    from unsilent.workloads.training import Progress

WEIGHT_BYTES = 64 * 2**20
"""Final weights that take more than this are not kept; their distances are then not known."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What is trained, and what is written down of it.

    ``steps``: after which a run ends; None: all of the workload's. ``every``: steps between two hashes of the weights.
    """

    workload: Annotated[str, Option(
        "A training: built-in name, file.py:name or package.module:name.", RUNS,
        missing="no training was named; give one like train-resnet (see unsilent workloads), or --explain FILE.py:LOOP",
    )]  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WITH] = ()
    data: Annotated[str | None, DATA] = None
    seed: Annotated[int, Option("Base seed: of the clean twin, and what fresh seeds derive from.", RUNS)] = 0
    steps: Annotated[int | None, Option("Steps of each run.", RUNS, usual="all of the training")] = None
    every: Annotated[int, Option("Steps between two hashes of the weights.", PRECISION)] = 1

    def check(self) -> None:
        """Raise ``UsageError`` for numbers that make no sense."""
        if self.every < 1 or (self.steps is not None and self.steps < 1) or self.seed < 0:
            raise UsageError("--every and --steps are numbers from 1 on, --seed from 0 on")

    @property
    def enumerated(self) -> bool:
        """Never: there are as many replicas as are asked for."""
        return False

    @property
    def flips(self) -> tuple[None]:
        """There are no faults."""
        return (None,)

    @property
    def threads(self) -> int:
        """Of a run without switches."""
        return 1

    @property
    def device(self) -> str:
        """Where it trains: an option of its workload."""
        return dict(self.options).get("device", "cpu")

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)

    def identity(self) -> Json:
        """The spec without the folders its files happen to lie in."""
        return without_folders(self.to_json(), "data")

    def make_runner(self, progress: Progress | None, means: Means) -> Runner:
        """What runs replicas, in a worker."""
        from unsilent.replicas.runner import ReplicaRunner

        return ReplicaRunner(self, means)


@dataclass(frozen=True, slots=True)
class ReplicaBaseline:
    """What a worker found out about a training before its first run.

    Attributes:
        steps: of a run. hashes: of the weights that a run has. fingerprint: what a run depends on, by name. labels: of the
        held-out samples. groups: name -> the samples of it, as bits in hex digits. streams: seeds that have an effect (None: not
        known). layouts: whether it has a tensor that can be channels last. draws: whether a module draws random numbers that do
        not go with the rows of the batch. machine: what only holds where it was found (instructions, cores). run_seconds: of a
        run, as its first steps foretell.
    """

    campaign: str
    fingerprint: Mapping[str, str]
    name: str
    steps: int
    hashes: int
    labels: tuple[int, ...]
    groups: Mapping[str, str]
    streams: tuple[str, ...] | None
    layouts: bool
    draws: bool
    device: str
    parameters: int
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    run_seconds: float = 0.0
    info: Json = field(default_factory=dict)

    @property
    def targets(self) -> tuple[()]:
        """None are known beforehand: which sets of switches are run is asked later."""
        return ()

    @property
    def golden_seconds(self) -> float:
        """Not known, so that no run is taken for one that hangs unless a deadline is given."""
        return math.inf

    @property
    def masks(self) -> dict[str, NDArray[np.bool_]]:
        """Name of a group -> which samples are in it, bool[samples]."""
        count = len(self.labels)
        packed = {name: np.frombuffer(bytes.fromhex(bits), np.uint8) for name, bits in self.groups.items()}
        return {name: np.unpackbits(bits, count=count).astype(np.bool_) for name, bits in packed.items()}

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)


class Replica(NamedTuple):
    """One run: the number-th with these switches."""

    switches: Switches
    number: int

    def __str__(self) -> str:
        return f"{self.switches}/{self.number}"

    @property
    def trial(self) -> TrialId:
        """What it is stored as."""
        return TrialId(str(self.switches), None, self.number)

    def seeds(self, base: int) -> dict[str, int | None]:
        """Stream -> seed, as `Seeds` takes them: fresh ones for what is switched on, the base seed for the rest."""
        fresh = int.from_bytes(hashlib.sha256(f"{base}/{self.number}".encode()).digest()[:7], "big")
        by_name: dict[str, int | None] = dict.fromkeys(("init", "order", "augment", "dropout"), base)
        by_name["within"] = None
        return by_name | {name: fresh for name, _ in self.switches.settings if SWITCHES[name].draws}


@dataclass(frozen=True, eq=False, slots=True)
class ReplicaRow(StoredRow):
    """How one run went, or what was seen at one step of it (``seen``: see `looks`; then all else is empty).

    Attributes:
        losses: float64[steps], before each update. hashes: uint64 of parameters and buffers, each ``every`` steps. finals: JSON
        list of (tensor, hash) of all that the state holds at the end. metrics: JSON object. predictions: int64 of the held-out
        samples. weights: all parameters one after the other, as ``dtype``; empty where they are too large. notes: JSON list of
        what torch warned of. seconds, worker: no content.
    """

    trial: TrialId
    finals: str
    loss: float
    metrics: str
    dtype: str
    notes: str
    losses: NDArray[np.float64]
    hashes: NDArray[np.uint64]
    predictions: NDArray[np.int64]
    weights: Annotated[bytes, LARGE]
    seen: str = ""
    seconds: Annotated[float, Ge(0), Lt(math.inf), RUN] = 0.0
    worker: Annotated[int, RUN] = 0

    @property
    def replica(self) -> Replica:
        """Which run it is."""
        return Replica(Switches.parse(self.trial.target), self.trial.k)

    @property
    def flat(self) -> NDArray[Any] | None:
        """All parameters one after the other; None where they were not kept, or not read."""
        return np.frombuffer(self.weights, self.dtype) if self.weights else None

    @property
    def final(self) -> str:
        """One hash of the state at the end: equal hashes, equal bits of every tensor."""
        return hashlib.sha256(self.finals.encode()).hexdigest()[:16]

    def derived(self) -> dict[str, Any]:
        """The final state as one hash."""
        return {"final": self.final}

    @property
    def bits(self) -> tuple[object, ...]:
        """All that a run returned but its weights, which ``finals`` stand for: equal where all bits are."""
        floats = (np.float64(self.loss).tobytes(), self.losses.tobytes(), self.hashes.tobytes())
        return (*floats, self.finals, self.predictions.tobytes(), self.metrics)

    def notes_list(self) -> list[str]:
        """``notes`` as a list."""
        items: list[str] = json.loads(self.notes)
        return items


def same(one: ReplicaRow, other: ReplicaRow) -> bool:
    """Whether two runs have the same bits in all that was written down."""
    return one.bits == other.bits
