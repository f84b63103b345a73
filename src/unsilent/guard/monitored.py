"""Registry of models and optimizers with a monitor, and checks before a monitor or guard is created."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError
from unsilent.sites.modules import parameters_of, unwrapped

MONITORED: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()
"""Models and optimizers that belong to a monitor that is not closed."""


def is_monitored(part: nn.Module | Optimizer) -> bool:
    """Whether a model or an optimizer has a monitor that is not closed."""
    return (unwrapped(part) if isinstance(part, nn.Module) else part) in MONITORED


def checked_optimizers(
    kind: str,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    is_taken: Callable[[Any], bool] = is_monitored,
) -> list[Optimizer]:
    """The optimizers as a list, checked to train parameters of the model; raises ``UsageError``.

    Args:
        kind: Class that they are for: ``Monitor`` or ``Guard``.
        is_taken: Returns whether a model or optimizer has a monitor or guard already.
    """
    chosen = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    if not (isinstance(model, nn.Module) and chosen and all(isinstance(part, Optimizer) for part in chosen)):
        arguments = f"{type(model).__name__}, {type(optimizers).__name__}"
        raise UsageError(
            f"{kind}({arguments}) was given; expected a module and a torch optimizer, or a list: {kind}(model, optimizer)"
        )
    parts: list[nn.Module | Optimizer] = [model, *chosen]
    for part in parts:
        if is_taken(part):
            raise UsageError(
                f"this {type(part).__name__} has a {kind.lower()} already; make one {kind} per training, or close() the first"
            )
    of_model = {id(parameter) for parameter in nn.Module.parameters(model)}
    trained = set(map(id, parameters_of(chosen)))
    if of_model and trained and not of_model & trained:
        raise UsageError(
            f"no parameter of {type(chosen[0]).__name__} belongs to this {type(model).__name__}; give the optimizer of this model"
        )
    return chosen
