"""The state of a training as it is now, to be put back bit for bit: into the same tensors, so that nobody who holds them notices.

Optimizers have ``state_dict`` and ``load_state_dict``, but loading rounds state to the dtype of its parameter; so their state is
copied as it lies there. Held are: parameters, buffers, gradients, state and settings of optimizers, and the generators of
torch (with those of CUDA devices in use), numpy and Python. A counter in user code or a data loader's place is not seen here.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Restore = Callable[[], Any]
"""Puts a value back and gives it."""


class TrainingState:
    """A snapshot. ``others``: schedulers, scalers and the like: whatever has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any] = ()) -> None:
        tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
        self._tables = [(table, dict(table)) for table in tables]
        self._tensors = [_held(t) for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values()]
        stepped = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        leaves = {id(p): p for p in model.parameters()} | stepped
        self._tensors += [_held(p) for key, p in stepped.items() if key not in {id(q) for q in model.parameters()}]
        self._gradients = [(p, _held(p.grad)) for p in leaves.values()]
        self._optimizers = [_of_optimizer(o) for o in optimizers]
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._random = _generators()

    def restore(self) -> None:
        """Put everything back."""
        for now, then in self._tables:
            now.clear()
            now.update(then)
        for put_back in self._tensors:
            put_back()
        for parameter, put_back in self._gradients:
            parameter.grad = put_back()
        for put_back in self._optimizers:
            put_back()
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        self._random()


def _held(value: Any) -> Restore:
    """A copy of a value; tensors come back as themselves, containers and the rest as copies."""
    if isinstance(value, Tensor):
        kept = value.detach().clone()

        def put_back() -> Tensor:
            value.data.copy_(kept)
            return value

        return put_back
    if isinstance(value, dict):
        entries = {key: _held(item) for key, item in value.items()}
        return lambda: {key: entry() for key, entry in entries.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items, kind = [_held(item) for item in value], type(value)
        return lambda: kind(item() for item in items)
    own = copy.deepcopy(value)
    return lambda: copy.deepcopy(own)


def _of_optimizer(optimizer: Optimizer) -> Restore:
    state = {p: _held(entries) for p, entries in optimizer.state.items()}
    groups = [{k: _held(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def put_back() -> None:
        optimizer.state.clear()
        optimizer.state.update({p: entries() for p, entries in state.items()})
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key in set(group) - {"params", *settings}:
                del group[key]
            group.update({key: setting() for key, setting in settings.items()})

    return put_back


def _generators() -> Callable[[], None]:
    """The state of all random generators that a step may draw from."""
    own, numpys, pythons = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        torch.random.set_rng_state(own)
        np.random.set_state(numpys)
        random.setstate(pythons)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return put_back
