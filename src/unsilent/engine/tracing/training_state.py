"""The state of a training as it is now, to be put back bit for bit: into the same tensors, so that nobody who holds them notices.

Held are: parameters, buffers, gradients, state and settings of optimizers, and the generators of torch (with those of CUDA
devices in use), numpy and Python. A counter in user code or a data loader's place is not seen here. What can go into a file, and
come back in another process, is the snapshot of a training workload; both copy and put back with the same functions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.workloads.trainings.randomness import held_generators
from unsilent.workloads.trainings.snapshots import of_optimizer, put_back, put_into_optimizer


class HeldTraining:
    """A snapshot. ``others``: schedulers, scalers and the like: whatever has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any] = ()) -> None:
        tables: list[dict[Any, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
        self._tables = [(table, dict(table)) for table in tables]
        stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        leaves = {id(p): p for p in [*model.parameters(), *stepped]}
        self._tensors = [_held(t) for t in {**leaves, **{id(b): b for b in model.buffers()}}.values()]
        self._gradients = [(p, None if p.grad is None else _held(p.grad)) for p in leaves.values()]
        self._tables += [(o.state, dict(o.state)) for o in optimizers]
        self._tables += [(entries, dict(entries)) for o in optimizers for entries in o.state.values()]
        self._optimizers = [(o, of_optimizer(o, {}, plain=False)) for o in optimizers]
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]
        self._random = held_generators()

    def restore(self) -> None:
        """Put everything back."""
        for now, then in self._tables:
            now.clear()
            now.update(then)
        for tensor, kept in self._tensors:
            put_back(tensor, kept)
        for parameter, held in self._gradients:
            parameter.grad = None if held is None else put_back(*held)
        for optimizer, state in self._optimizers:
            put_into_optimizer(optimizer, state, {})
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
        self._random()


def _held(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, tensor.detach().clone()
