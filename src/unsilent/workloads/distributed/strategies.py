"""Strategies of distributed training, each from one rank's point of view.

`single`: one process. `ddp`: a whole replica on every rank, gradients averaged; rank 0's parameters and buffers are sent to all
when the model is wrapped, its buffers before every forward pass. `fsdp2`: every rank holds its part of each parameter and of
the optimizer's state; buffers are each rank's own, as in any job of this kind.

With three ranks or more, a resume under ddp differs by rounding from the run that was not interrupted: its reducer puts gradients
into other buckets after the first backward pass, and gloo adds up the ranks in an order that depends on the place in a bucket.
Two resumes from the same state have the same bits.

A strategy wraps the model, and turns what a rank holds into a full snapshot and back. The full snapshot has the same names and
shapes for all strategies.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.workloads.trainings import TrainingState

Snapshot = Mapping[str, Any]


class Strategy:
    """Base of every strategy; as it is here, it is `single`.

    Attributes:
        holds_whole_model: Whether the model of a rank is whole between steps, so that it can be evaluated there.
    """

    holds_whole_model = True

    def __init__(self, ranks: int) -> None:
        """Args: ranks: How many there are; their process group is ready."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that a step calls in place of the model; called on all ranks at once, before optimizers exist."""
        return model

    def prepare(self, state: TrainingState, clip: float | None) -> None:
        """Change a new training, which now has its optimizers; called on all ranks at once. ``clip``: as in `Training`."""

    def after_loading(self, state: TrainingState) -> None:
        """Copy to where else this rank keeps parameters what a checkpoint has just put into the model."""

    def release(self, state: TrainingState) -> None:
        """Remove hooks that would keep a training in memory that is over."""

    def gathered(self, snapshot: Any, state: TrainingState) -> Any:
        """A nesting of tensors with the whole of each that is spread over the ranks; called on all ranks at once."""
        return snapshot

    def sent_from_rank_0(self, value: Any) -> Any:
        """The value that rank 0 passes, on every rank; called on all ranks at once."""
        sent = [value]
        distributed.broadcast_object_list(sent, src=0)
        return sent[0]

    def own_part(self, snapshot: Snapshot, state: TrainingState) -> Snapshot:
        """The part of a full snapshot that this rank holds; each rank takes it from the snapshot that it has."""
        return snapshot


class Ddp(Strategy):
    """``torch.nn.parallel.DistributedDataParallel``."""

    def __init__(self, ranks: int) -> None:
        # Of speed alone: gradients of 1x1 convolutions come in another layout and are copied.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides", category=UserWarning)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)
