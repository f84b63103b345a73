"""What is trained (`ReplicaSpec`), what was found out about it (`Trained`), which run (`Replica`), how it ended (`ReplicaRow`).

A replica is known by the fingerprint of its training, its switches and its number, and nothing else: who asks for the same one
gets the same row, whichever study, worker or day it is from. Its seeds follow from base seed and number, and those of different
switches are the same for the same number: replica 3 of ALGO and replica 3 of ALGO+IMPL differ in the implementation alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.spec import Json, canonical, without_folders
from unsilent.replicas.switches import SWITCHES, Switches

WEIGHT_BYTES = 64 * 2**20
"""Final weights that take more than this are not kept; their distances are then not known."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What is trained, and what is written down of it.

    ``steps``: after which a run ends; None: all of the workload's. ``every``: steps between two hashes of the weights.
    """

    workload: str
    options: tuple[tuple[str, str], ...] = ()
    data: str | None = None
    seed: int = 0
    steps: int | None = None
    every: int = 1

    def identity(self) -> Json:
        """The spec without the folders its files happen to lie in."""
        return without_folders(asdict(self), "data")


@dataclass(frozen=True, eq=False, slots=True)
class Trained:
    """What a worker found out about a training before its first run.

    Attributes:
        steps: of a run. fingerprint: what a run depends on, by name. labels: int64 of the held-out samples. groups: name -> the
        samples of it, bool. streams: seeds that have an effect (None: not known). layouts: whether it has a tensor that can be
        channels last. draws: whether a module draws random numbers that do not go with the rows of the batch. machine: what
        only holds where it was found (instructions, cores).
    """

    name: str
    steps: int
    fingerprint: Mapping[str, str]
    labels: NDArray[np.int64]
    groups: Mapping[str, NDArray[np.bool_]]
    streams: tuple[str, ...] | None
    layouts: bool
    draws: bool
    device: str
    parameters: int
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    info: Json = field(default_factory=dict)

    def hash(self, spec: ReplicaSpec) -> str:
        """32 hex digits that stand for the training: spec and fingerprint."""
        text = canonical({"spec": spec.identity() | {"steps": self.steps}, "fingerprint": dict(self.fingerprint)})
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Replica(NamedTuple):
    """One run: the number-th with these switches."""

    switches: Switches
    number: int

    def __str__(self) -> str:
        return f"{self.switches}/{self.number}"

    def seeds(self, base: int) -> dict[str, int | None]:
        """Stream -> seed, as `Seeds` takes them: fresh ones for what is switched on, the base seed for the rest."""
        fresh = int.from_bytes(hashlib.sha256(f"{base}/{self.number}".encode()).digest()[:7], "big")
        found: dict[str, int | None] = dict.fromkeys(("init", "order", "augment", "dropout"), base)
        found["within"] = None
        return found | {name: fresh for name, _ in self.switches.settings if SWITCHES[name].draws}


@dataclass(frozen=True, eq=False, slots=True)
class ReplicaRow:
    """How one run went.

    Attributes:
        losses: float64[steps], before each update. hashes: uint64 of parameters and buffers, each ``every`` steps. finals:
        (tensor, hash) of all that the state holds at the end. predictions: int64 of the held-out samples. weights: parameters one
        after the other, as floats; None where they are too large. notes: what torch warned of. seconds, worker: no content.
    """

    replica: Replica
    losses: NDArray[np.float64]
    hashes: NDArray[np.uint64]
    finals: Sequence[tuple[str, str]]
    loss: float
    metrics: Mapping[str, float]
    predictions: NDArray[np.int64]
    weights: NDArray[Any] | None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    worker: int = 0

    @property
    def content(self) -> tuple[object, ...]:
        """All that a run gave but its weights, which ``finals`` stand for: equal where all bits are."""
        floats = (np.float64(self.loss).tobytes(), self.losses.tobytes(), self.hashes.tobytes())
        return (*floats, self.final, self.predictions.tobytes(), sorted((k, repr(v)) for k, v in self.metrics.items()))

    @property
    def final(self) -> str:
        """One hash of the state at the end: equal hashes, equal bits of every tensor."""
        return hashlib.sha256(canonical([list(pair) for pair in self.finals]).encode()).hexdigest()[:16]


def same(one: ReplicaRow, other: ReplicaRow) -> bool:
    """Whether two runs have the same bits in all that was written down."""
    return one.content == other.content
