"""A training step of the user's own code, which is executed again from a stored state: that of a recording, or of an incident."""

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
    """A step, model and optimizer of the user's own code, and the batch; ``name`` is that of the code in errors."""

    step: StepFunction
    model: nn.Module
    optimizer: Optimizer
    batch: Any
    name: str = "the step"

    def snapshot(self) -> dict[str, Any]:
        """Parameters, buffers, and the state of the optimizer."""
        model = {name: snapshot_copy(tensor, name) for name, tensor in model_tensors(self.model).items()}
        return {"model": model, "optimizer": optimizer_snapshot(self.optimizer, self._names)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Put the state of a snapshot back."""
        put_into_model(self.model, snapshot["model"])
        put_into_optimizer(self.optimizer, snapshot["optimizer"], self._names)

    def check_fit(self, snapshot: Mapping[str, Any], name: str) -> None:
        """Raise ``UsageError``, with the name of the snapshot, where it is of another model or optimizer."""
        parts = {"model": snapshot["model"], "optimizers": [snapshot["optimizer"]], "schedulers": []}
        check_fit(parts, name, self.model, [self.optimizer], [])

    def run(self) -> Any:
        """The result of one update, with random numbers of seed 0."""
        with torch.random.fork_rng(), user_code(self.name):
            torch.manual_seed(0)
            return self.step(self.model, self.optimizer, self.batch)

    @property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in named_parameters(self.model)}


def own_code(code: str) -> tuple[StepFunction, nn.Module, Optimizer]:
    """Step, model and optimizer that a function of the user's own, ``file.py:name``, returns. Raises ``UsageError``."""
    make = find_user_object(code)
    with user_code(code):
        result = make()
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], nn.Module)):
        raise UsageError(f"--code {code} returned {type(result).__name__}; expected (step, model, optimizer)")
    return result
