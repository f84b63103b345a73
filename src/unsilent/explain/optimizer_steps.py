"""Counts the steps of any training loop by the updates of its optimizers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepLimitReached(BaseException):
    """Raised to end a loop after the requested number of steps.

    Derived from BaseException so that the user's ``except Exception`` does not catch it.
    """


class OptimizerStepCounter:
    """Counts optimizer updates while it is active.

    Args:
        limit: Number of steps after which `StepLimitReached` is raised; ``None`` for no limit.

    Attributes:
        done: Number of completed updates.
        updating: Whether an update is running.
        optimizers: All optimizers that were used.
        has_called_module: Whether a module was called.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.done, self.updating, self.has_called_module = 0, False, False
        self.optimizers: list[Optimizer] = []
        self._limit = limit
        self._handles: list[Any] = []

    def __enter__(self) -> OptimizerStepCounter:
        self._handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
            register_module_forward_pre_hook(self._call),
        ]
        return self

    def __exit__(self, *raised: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _call(self, module: nn.Module, args: Any) -> None:
        self.has_called_module = True

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.updating = True
        if all(known is not optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.updating = False
        self.done += 1
        if self._limit is not None and self.done >= self._limit:
            raise StepLimitReached
