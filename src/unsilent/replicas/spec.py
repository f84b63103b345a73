"""Records of replicas: a training, a run of it, and the results of a run.

A replica is identified only by its training, its switches and its number: the same replica has the same row, whichever study or
worker ran it. Its seeds follow from the base seed and the number. Replicas with different switches but the same number have the
same fresh seeds: replica 3 of ALGO and replica 3 of ALGO+IMPL differ in the implementation alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from unsilent.basics.lazy_numpy import np, npt
from unsilent.basics.options import LARGEST, PRECISION_PANEL, WORKLOAD_PANEL, Option, check_count
from unsilent.campaigns.codec import NOT_EXPORTED, RUN_SPECIFIC, Seconds, StoredRow
from unsilent.campaigns.options import DATA, WORKLOAD_OPTION
from unsilent.campaigns.spec import Json, JsonRecord, SpecOfTraining, TrialId
from unsilent.replicas.switches import SWITCHES, Switches

WEIGHT_BYTES = 64 * 2**20
"""Size in bytes above which final weights are not stored; distances of weights are then unknown."""
MOST_STEPS, MOST_REPLICAS = 10**7, 10**5
"""Maximum number of steps of a run, and of replicas of a variant."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec(SpecOfTraining):
    """The training whose replicas are run, and how often its weights are hashed.

    ``steps``: number of steps of a run; ``None`` for all steps of the workload. ``every``: number of steps between two hashes.
    """

    FILES: ClassVar[tuple[str, ...]] = ("data",)
    workload: Annotated[str, Option(
        "The training: a built-in name, file.py:name or package.module:name.", WORKLOAD_PANEL,
        missing_error="no training was named; give one like train-resnet (see unsilent workloads)",
    )]  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    seed: Annotated[
        int,
        Option(
            "Seed of the clean twin (the run without switches); seeds of other runs derive from it.", WORKLOAD_PANEL
        ),
    ] = 0
    steps: Annotated[
        int | None, Option("Number of steps of each run.", WORKLOAD_PANEL, default_text="all steps of the training")
    ] = None
    every: Annotated[int, Option("Hash the weights after every so many steps.", PRECISION_PANEL)] = 1

    def check(self) -> None:
        """Raise ``UsageError`` for numbers out of range."""
        check_count("--every", self.every, 1, MOST_STEPS)
        check_count("--steps", 1 if self.steps is None else self.steps, 1, MOST_STEPS)
        check_count("--seed", self.seed, 0, LARGEST)


@dataclass(frozen=True, slots=True)
class ReplicaBaseline(JsonRecord):
    """Facts about a training that a worker finds before its first run.

    Attributes:
        steps: Number of steps of a run.
        hash_count: Number of hashes of the weights in a run.
        fingerprint: Versions and hashes of everything that a run depends on, by name.
        labels: Labels of the held-out samples.
        groups: Samples of each group by name, as a bit mask in hex digits.
        effective_streams: Random streams whose seeds have an effect; ``None`` if this is unknown.
        has_channels_last: Whether a parameter can have the memory layout channels last.
        draws_per_batch: Whether a module draws random numbers that are not drawn separately for each row of a batch.
        machine: Facts about the machine, for example its instruction set and processor model.
        run_seconds: Duration of a run, estimated from its first steps.
    """

    campaign: str
    fingerprint: Mapping[str, str]
    name: str
    steps: int
    hash_count: int
    labels: tuple[int, ...]
    groups: Mapping[str, str]
    effective_streams: tuple[str, ...] | None
    has_channels_last: bool
    draws_per_batch: bool
    device: str
    parameters: int
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    run_seconds: float = 0.0
    info: Json = field(default_factory=dict)

    @property
    def targets(self) -> tuple[()]:
        """Empty, since the sets of switches to run are not known beforehand."""
        return ()

    @property
    def golden_seconds(self) -> float:
        """Infinity, so that no run counts as hanging unless the user sets a deadline."""
        return math.inf

    @property
    def group_masks(self) -> dict[str, npt.NDArray[np.bool_]]:
        """A mask for each group by name, bool[samples], that is true for its samples."""
        count = len(self.labels)
        packed = {name: np.frombuffer(bytes.fromhex(bits), np.uint8) for name, bits in self.groups.items()}
        return {name: np.unpackbits(bits, count=count).astype(np.bool_) for name, bits in packed.items()}


class Replica(NamedTuple):
    """A run of a training, given by its switches and its number among the runs with these switches."""

    switches: Switches
    number: int

    def __str__(self) -> str:
        return f"{self.switches}/{self.number}"

    @property
    def trial(self) -> TrialId:
        """The trial under which the run is stored."""
        return TrialId(str(self.switches), None, self.number)

    def seeds(self, base: int) -> dict[str, int | None]:
        """The seed of each random stream: a fresh one if its switch is on, else the base seed."""
        fresh = int.from_bytes(hashlib.sha256(f"{base}/{self.number}".encode()).digest()[:7], "big")
        by_name: dict[str, int | None] = dict.fromkeys(("init", "order", "augment", "dropout"), base)
        by_name["within"] = None
        return by_name | {name: fresh for name, _ in self.switches.settings if SWITCHES[name].is_random_stream}


@dataclass(frozen=True, eq=False, slots=True)
class ReplicaRow(StoredRow):
    """The results of a run, or the trace of one of its steps.

    A step trace is in ``step_trace_json`` (see `step_trace`); all other fields are empty then.

    Attributes:
        losses: Training loss of each step before its update, float64[steps].
        hashes: Hashes of parameters and buffers every ``every`` steps and after the last step, uint64.
        final_hashes: JSON list of (tensor, hash) for all tensors of the final state.
        metrics: Metrics as a JSON object.
        predictions: Predictions for the held-out samples, int64.
        weights: Bytes of all parameters concatenated, of type ``dtype``; empty if they were not stored.
        notes: JSON list of notes, for example on operations without a deterministic kernel.
        seconds, worker: Duration in seconds and number of the worker, which are not results.
    """

    trial: TrialId
    final_hashes: str
    loss: float
    metrics: str
    dtype: str
    notes: str
    losses: npt.NDArray[np.float64]
    hashes: npt.NDArray[np.uint64]
    predictions: npt.NDArray[np.int64]
    weights: Annotated[bytes, NOT_EXPORTED]
    step_trace_json: str = ""
    seconds: Seconds = 0.0
    worker: Annotated[int, RUN_SPECIFIC] = 0

    @property
    def replica(self) -> Replica:
        """The run whose results the row holds."""
        return Replica(Switches.parse(self.trial.target), self.trial.k)

    @property
    def flat_weights(self) -> npt.NDArray[Any] | None:
        """All parameters concatenated; None if they were not stored or not read."""
        return np.frombuffer(self.weights, self.dtype) if self.weights else None

    @property
    def final_state_hash(self) -> str:
        """A hash of the final state: equal hashes mean equal bits of every tensor."""
        return hashlib.sha256(self.final_hashes.encode()).hexdigest()[:16]

    def derived(self) -> dict[str, Any]:
        """The hash of the final state, for exports."""
        return {"final": self.final_state_hash}

    @property
    def bitwise_results(self) -> tuple[object, ...]:
        """The results of a run, equal for two runs if all their bits are equal.

        Hashes of the final state represent the weights.
        """
        floats = (np.float64(self.loss).tobytes(), self.losses.tobytes(), self.hashes.tobytes())
        return (*floats, self.final_hashes, self.predictions.tobytes(), self.metrics)

    def notes_list(self) -> list[str]:
        """The notes, parsed from ``notes``."""
        items: list[str] = json.loads(self.notes)
        return items


def same_replica_bits(first: ReplicaRow, second: ReplicaRow) -> bool:
    """Whether two runs have bit-identical results."""
    return first.bitwise_results == second.bitwise_results
