"""A training step of the user's code that is executed from a stored state, of a recording or an incident."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError
from unsilent.basics.user_code import find_user_object, user_code
from unsilent.sites.modules import named_parameters
from unsilent.workloads.trainings.snapshots import (
    check_fit,
    model_tensors,
    optimizer_snapshot,
    put_into_model,
    put_into_optimizer,
    snapshot_copy,
)

StepFunction = Callable[[Any, Any, Any], Any]
"""Function that does one update, given model, optimizer and batch, and returns the loss."""


@dataclass
class OwnStep:
    """A step, model, optimizer and batch of the user's code, with a name for error messages."""

    step: StepFunction
    model: nn.Module
    optimizer: Optimizer
    batch: Any
    name: str = "the step"

    def snapshot(self) -> dict[str, Any]:
        """A copy of parameters, buffers and optimizer state."""
        model = {name: snapshot_copy(tensor, name) for name, tensor in model_tensors(self.model).items()}
        return {"model": model, "optimizer": optimizer_snapshot(self.optimizer, self._names)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Restore the state of a snapshot."""
        put_into_model(self.model, snapshot["model"])
        put_into_optimizer(self.optimizer, snapshot["optimizer"], self._names)

    def check_fit(self, snapshot: Mapping[str, Any], name: str) -> None:
        """Raise ``UsageError`` if the snapshot belongs to another model or optimizer.

        ``name`` is the snapshot's name in the message.
        """
        parts = {"model": snapshot["model"], "optimizers": [snapshot["optimizer"]], "schedulers": []}
        check_fit(parts, name, self.model, [self.optimizer], [])

    def run(self) -> Any:
        """Execute one update with random seed 0 and return its result."""
        with torch.random.fork_rng(), user_code(self.name):
            torch.manual_seed(0)
            return self.step(self.model, self.optimizer, self.batch)

    @property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in named_parameters(self.model)}


def own_code(code: str) -> tuple[StepFunction, nn.Module, Optimizer]:
    """Step, model and optimizer that the user's function ``file.py:name`` returns.

    Raises ``UsageError`` if it does not return these.
    """
    make = find_user_object(code)
    with user_code(code):
        result = make()
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], nn.Module)):
        raise UsageError(f"--code {code} returned {type(result).__name__}; expected (step, model, optimizer)")
    return result
