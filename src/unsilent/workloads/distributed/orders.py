"""Messages between a gang and its ranks: plain values that do not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from unsilent.faults import Fault
from unsilent.faults.receipts import AppliedFault
from unsilent.faults.unresolved_fault import UnresolvedFault

if TYPE_CHECKING:
    from unsilent.workloads.trainings import Seeds

Ints = npt.NDArray[np.int64]
Payload = tuple[str, str, tuple[int, ...]]
"""Site, dtype and shape of a payload."""
Restart = Literal["before", "after"]
RESTARTS = ("before", "after")
EXTREME = 1e6
"""Magnitude above which values are counted as extreme."""


@dataclass(frozen=True)
class GangSettings:
    """Settings of a gang: the training and how its ranks run it.

    Attributes:
        workload: Reference of a training, as `load_training` takes it.
        meeting_place: File through which the ranks find each other; it must not exist.
        folder: Folder in which ranks store data for later requests.
    """

    workload: str
    options: Mapping[str, str]
    data: str | None
    strategy: str
    world_size: int
    seeds: Seeds
    meeting_place: Path
    folder: Path


@dataclass(frozen=True)
class TrainOrder:
    """The order to train without a fault until ``step`` steps are done.

    Rank 0 then saves the full state.
    """

    step: int
    save_to: Path


@dataclass(frozen=True)
class ResumeOrder:
    """The order to restart from files, train on and measure; see `Gang.resume`."""

    files: tuple[Path, ...]
    restart: Restart
    broadcast_optimizer: bool
    until_step: int
    evaluate_every: int
    remember_clean: bool
    comm_faults: tuple[Fault | UnresolvedFault, ...]
    save_to: Path | None


@dataclass(frozen=True, eq=False)
class ResumeStart:
    """Description of the state that a rank has read from its file.

    Attributes:
        step: Number of steps done.
        tensors: Names of the model's floating-point parameters, then of such buffers.
        parameter_count: How many of the names are parameters.
        elements: int64[tensors], number of elements of each tensor that this rank holds.
    """

    step: int
    tensors: tuple[str, ...]
    parameter_count: int
    elements: Ints


@dataclass(frozen=True, eq=False)
class RankPart:
    """The steps of one rank since the last evaluation, and measurements of its model at this evaluation.

    Attributes:
        step: Number of steps done.
        losses: Loss of each step, on the rank's own rows.
        metrics: Metrics of each step, by name.
        nonfinite: int64[tensors], number of NaN and infinite elements.
        extreme: int64[tensors], number of finite elements of a magnitude above `EXTREME`.
        changed: int64[tensors], number of elements with other bits than in the clean resume; -1 if it has no evaluation
            here.
        held_out: Loss and metrics on the held-out data; empty on all ranks except 0.
    """

    step: int
    losses: tuple[float, ...]
    metrics: tuple[Mapping[str, float], ...]
    nonfinite: Ints
    extreme: Ints
    changed: Ints
    held_out: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankEnd:
    """The way in which the run of one rank ended.

    Attributes:
        has_stopped: Whether a loss was not finite, on any rank.
        hashes: xxh3-128 of the rank's full state by part: ``parameters``, ``buffers``, ``optimizers``, ``all``.
        applied_faults: Faults applied on this rank.
        collectives: Site, dtype and shape of the payloads that this rank sends in a step; only for the clean resume.
    """

    has_stopped: bool
    hashes: Mapping[str, str]
    applied_faults: tuple[AppliedFault, ...]
    collectives: tuple[Payload, ...]
