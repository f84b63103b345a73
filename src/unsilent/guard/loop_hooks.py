"""Hooks of a model and its optimizers: those that a loop registers are not put back, and act on every later step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OF_MODULES = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OWN = f"{__name__.partition('.')[0]}."


def hooks_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, tuple[Any, ...]]:
    """Keys of hooks, which torch gives once only, by the place of the hooks in words; but for those of this package."""
    result = {}
    for kind, owner, hooks in _tables(model, optimizers):
        if hooks and (keys := tuple(key for key, hook in hooks.items() if not _is_own(hook))):
            result[f"{kind.strip('_')} of {owner}"] = keys
    return result


def hooks_changed(then: Mapping[str, tuple[Any, ...]], now: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Places where hooks are others than then."""
    return [place for place in dict.fromkeys((*then, *now)) if then.get(place) != now.get(place)]


def _tables(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str, Mapping[Any, Any] | None]]:
    """The kind of some hooks, whose they are, and the hooks by key."""
    for name, module in model.named_modules():
        for kind in _OF_MODULES:
            yield kind, name or "the model", vars(module).get(kind)
    for name, parameter in model.named_parameters():
        for kind in _OF_PARAMETERS:
            yield kind, name, getattr(parameter, kind)
    owners = [(f"optimizer {number}", vars(optimizer)) for number, optimizer in enumerate(optimizers)]
    shared = [(f"every {kind.__name__}", vars(sys.modules[kind.__module__])) for kind in (nn.Module, Optimizer)]
    for owner, parts in (*owners, *shared):
        for kind, hooks in parts.items():
            if kind.endswith("_hooks") and isinstance(hooks, Mapping):
                yield kind, owner, hooks


def _is_own(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OWN)
