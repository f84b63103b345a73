"""The interface of a training workload: state, step, evaluation, and snapshots that restore every bit.

A step is a pure function of the state. Each source of randomness has its own stream, seeded from the number of the step
or epoch (see `randomness`). A few counters therefore determine all generators: the state is the model, optimizers,
schedulers, the loss scaler, and these counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Seeds:
    """The seeds of all sources of randomness in a training.

    Changing one seed does not change the random numbers of the other sources.
    """

    init: int = 0
    """Seed of the weights that a run starts from."""
    order: int = 0
    """Seed of the order of the training data."""
    augment: int = 0
    dropout: int = 0
    within: int | None = None
    """Seed of a permutation of the rows inside every batch, which changes the order of sums. None: rows in their usual
    order.
    """

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not whole and not (value is None and part.name == "within"):
                raise UsageError(f"seed {part.name!r} is {value!r}; expected a whole number, 0 or more")

    @classmethod
    def same_for_all(cls, seed: int) -> Seeds:
        """Seeds with the same number for every source of randomness.

        The streams of random numbers stay independent. The rows of a batch are not permuted.
        """
        return cls(seed, seed, seed, seed)

    def to_json(self) -> dict[str, int | None]:
        """The seeds by name; ``Seeds(**json)`` restores them."""
        return asdict(self)


STREAMS = tuple(part.name for part in fields(Seeds))
"""The names of the streams."""


@dataclass(eq=False)
class TrainingState:
    """The state of a training between two steps, which `TrainingWorkload.step` changes.

    ``step``: number of steps done. ``epoch``, ``cursor``: number of the epoch, and number of its batches that were
    taken. ``generators``: one per stream, on the CPU. They are seeded anew from ``seeds`` and the counters before every
    use, so a snapshot does not contain them. ``cached_values``: values that follow from the rest and are only kept to
    save time (the order of this epoch). ``wrapped_model``: a wrapper with the same parameters that a step calls instead
    of the model (None: the model itself).
    """

    model: nn.Module
    optimizers: list[Optimizer]
    schedulers: list[Any]
    scaler: torch.amp.GradScaler | None
    seeds: Seeds
    step: int = 0
    epoch: int = 0
    cursor: int = 0
    generators: dict[str, torch.Generator] = field(
        default_factory=lambda: {name: torch.Generator() for name in STREAMS}
    )
    cached_values: dict[str, Any] = field(default_factory=dict)
    wrapped_model: nn.Module | None = None


@dataclass(frozen=True)
class StepRecord:
    """Results of one step: its number (from 0), the loss before the update, and metrics by name."""

    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of a model on the held-out data, which are the same samples in the same order at every call.

    ``loss``: mean over samples. ``predictions``, ``labels``: int64[n]. ``groups``: name of a group -> mask of its
    samples, bool[n].
    """

    loss: float
    metrics: Mapping[str, float]
    predictions: Ints
    labels: Ints
    groups: Mapping[str, Bools] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts: dict[str, tuple[Any, Any]] = {}
        parts |= {"predictions": (self.predictions, np.int64), "labels": (self.labels, np.int64)}
        parts |= {f"group {name!r}": (mask, np.bool_) for name, mask in self.groups.items()}
        for name, (array, dtype) in parts.items():
            result = getattr(array, "dtype", type(array).__name__), getattr(array, "shape", None)
            if result != (np.dtype(dtype), (len(self.labels),)):
                wanted = f"{np.dtype(dtype).name} [{len(self.labels)}]"
                raise UsageError(f"evaluation: {name} is {result[0]} {result[1]}; expected {wanted}")


@runtime_checkable
class TrainingWorkload(Protocol):
    """The interface of every training workload.

    `Training` implements it from a few functions.
    """

    name: str
    steps: int
    """Number of steps of a full run."""
    world_size: int
    info: Mapping[str, Any]
    """Facts for the reader of a report (JSON values)."""

    def start(self, seeds: int | Seeds) -> TrainingState:
        """The state of a new training.

        A number as seeds stands for `Seeds.same_for_all`.
        """
        ...

    def step(self, state: TrainingState) -> StepRecord:
        """Run one update in place and return its record.

        Equal states give equal results bit for bit.
        """
        ...

    def evaluate(self, state: TrainingState) -> Evaluation:
        """Evaluate the model on the held-out data without changing the state."""
        ...

    def snapshot(self, state: TrainingState) -> dict[str, Any]:
        """A copy of the full state as tensors and plain values.

        It can be saved with ``torch.save`` and read with ``weights_only=True``.
        """
        ...

    def restore(self, snapshot: Mapping[str, Any]) -> TrainingState:
        """The state of a snapshot in new objects.

        Raises ``UsageError`` for the snapshot of another training.
        """
        ...

    def restore_into(self, state: TrainingState, snapshot: Mapping[str, Any]) -> None:
        """Restore a snapshot into the existing tensors of ``state``, so that references to them stay valid."""
        ...
