"""Strategies of distributed training, as seen from one rank.

`single`: one process. `ddp`: a whole replica on every rank, with averaged gradients. Rank 0's parameters and buffers
are sent to all ranks when the model is wrapped, and its buffers before every forward pass. `fsdp2`: every rank holds
its part of each parameter and of the optimizer's state, and its own buffers.

With three or more ranks, a resume under ddp differs by rounding from an uninterrupted run: the reducer puts gradients
into other buckets after the first backward pass, and the order in which gloo adds ranks depends on the place in a
bucket. Two resumes from the same state have the same bits.

A strategy wraps the model, and converts the state of a rank to a full snapshot and back. The full snapshot has the same
names and shapes for all strategies.
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
    """Base class of the strategies.

    An instance of this class is the strategy `single`.

    Attributes:
        holds_whole_model: Whether a rank has the whole model between steps, so that it can evaluate it.
    """

    holds_whole_model = True

    def __init__(self, ranks: int) -> None:
        """Set up the strategy for a number of ranks, whose process group must be initialised."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that a step calls instead of the model.

        Must be called on all ranks at once, before the optimizers are made.
        """
        return model

    def prepare(self, state: TrainingState, clip: float | None) -> None:
        """Adapt a new training after its optimizers were made.

        Must be called on all ranks at once. ``clip`` is the argument of `Training`.
        """

    def after_loading(self, state: TrainingState) -> None:
        """Copy the parameters of a loaded checkpoint to all other places where this rank keeps them."""

    def release(self, state: TrainingState) -> None:
        """Remove hooks that would keep a finished training in memory."""

    def gathered(self, snapshot: Any, state: TrainingState) -> Any:
        """The nesting of tensors with sharded tensors replaced by whole ones.

        Must be called on all ranks at once.
        """
        return snapshot

    def sent_from_rank_0(self, value: Any) -> Any:
        """The value that rank 0 passes, returned on every rank.

        Must be called on all ranks at once.
        """
        sent = [value]
        distributed.broadcast_object_list(sent, src=0)
        return sent[0]

    def own_part(self, snapshot: Snapshot, state: TrainingState) -> Snapshot:
        """The part of a full snapshot that this rank holds."""
        return snapshot


class Ddp(Strategy):
    """The strategy that uses ``torch.nn.parallel.DistributedDataParallel``."""

    def __init__(self, ranks: int) -> None:
        # This warning is only about speed: gradients of 1x1 convolutions have another layout and are copied.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides", category=UserWarning)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)
