"""A copy of the state of a training that is restored bit for bit into the same tensors.

References to the tensors stay valid.

The copy holds parameters, buffers, gradients, state and settings of optimizers, schedulers and the like, and the
generators of torch (with those of CUDA devices in use), numpy and Python. A counter in user code or the position of a
data loader is not included. For saving to a file and restoring in another process, use the snapshot of a training
workload.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.nested import tensors_in
from unsilent.sites.memory import drop_repeated_dimensions
from unsilent.workloads.trainings.randomness import save_generator_states

TensorCopier = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Function that makes a copy of each tensor, with the same dtype, shape and strides, where copies are to be kept."""


def clones(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies of tensors in separate memory, each paired with its original."""
    return [t.detach().clone() for t in tensors]


_PLAIN = (bool, int, float, str, type(None))


class HeldTraining:
    """A copy of the state of a training: model, optimizers and other objects with state.

    Args:
        stateful_objects: Schedulers, scalers and other objects with ``state_dict`` and ``load_state_dict``.
        gradients: Whether gradients are held, too.
        further: Other tensors whose content is held.
        copies: Function that makes the copies.
        generators: Random generators besides the global ones.

    Attributes:
        generators: Function that restores only the generators.
        live: The tensors of the state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        stateful_objects: Sequence[Any] = (),
        *,
        gradients: bool = True,
        further: Sequence[Tensor] = (),
        copies: TensorCopier = clones,
        generators: Sequence[Any] = (),
    ) -> None:
        # Comparing a tensor with a text, as ``key != "params"`` would, takes longer than copying a small one.
        modules = list(model.modules())
        of_modules: list[dict[Any, Any]] = [t for m in modules for t in (m._parameters, m._buffers)]
        states = [o.state for o in optimizers]
        entries = [entry for state in states for entry in state.values()]
        groups = [group for o in optimizers for group in o.param_groups]
        self._tables = [(table, dict(table)) for table in (*of_modules, *states, *entries, *groups)]
        # Plain attributes of modules (``training``, counters), which parameters are trained, and groups, which may be added.
        self._attributes = [(m.__dict__, dict(m.__dict__)) for m in modules]
        self._groups = [(o.param_groups, list(o.param_groups)) for o in optimizers]
        stepped = [p for group in groups for p in group["params"]]
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        leaves = {id(p): p for p in (*parameters, *stepped)}
        self._trained = [(p, p.requires_grad) for p in leaves.values()]
        self._gradients = [(p, p.grad) for p in leaves.values()] if gradients else []
        live = {**leaves, **{id(b): b for m in modules for b in m._buffers.values() if b is not None}}
        live.update((id(g), g) for _, g in self._gradients if g is not None)
        live.update((id(t), t) for t in further)
        settings = [(key, value) for table in (*entries, *groups) for key, value in table.items() if key != "params"]
        live.update((id(t), t) for _, value in settings for t in tensors_in(value))
        # Values that are not tensors and can be changed in place are copied; tensors in them are restored by their
        # content.
        self._plain: list[tuple[Any, Any]] = [
            (value, copy.copy(value)) for _, value in settings if isinstance(value, (list, dict))
        ]
        # If a tensor repeats the same memory (``expand``), each cell is copied once.
        self.live = [drop_repeated_dimensions(t) if t.layout is torch.strided else t for t in live.values()]
        self._copies = copies(self.live)
        self._stateful_objects = [(holder, copy.deepcopy(holder.state_dict())) for holder in stateful_objects]
        self.generators = save_generator_states(generators)

    def has_content_of(self, tensor: Tensor) -> bool | None:
        """Whether a tensor still has the bits of its copy, or None if no copy is held."""
        copied = next((copied for live, copied in zip(self.live, self._copies, strict=True) if live is tensor), None)
        if copied is None or copied.shape != tensor.shape:
            return None
        return torch.equal(copied.to(tensor.device), tensor.detach())

    def restore(self) -> None:
        """Restore the whole state."""
        self._restore_attributes()
        for live_groups, kept_groups in self._groups:
            live_groups[:] = kept_groups
        for now, then in self._tables:
            now.clear()
            now.update(then)
        for value, then in self._plain:
            if isinstance(value, list):
                value[:] = then
            else:
                value.clear()
                value.update(then)
        for tensor, copied in zip(self.live, self._copies, strict=True):
            if (tensor.dtype, tensor.shape, tensor.stride()) == (copied.dtype, copied.shape, copied.stride()):
                tensor.data.copy_(copied)
            else:
                tensor.data = copied.to(tensor.device, copy=True)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        for holder, state in self._stateful_objects:
            holder.load_state_dict(copy.deepcopy(state))
        self.generators()

    def _restore_attributes(self) -> None:
        """Restore the attributes of modules that are or were plain values."""
        for attributes, kept_attributes in self._attributes:
            for name in [k for k, v in attributes.items() if isinstance(v, _PLAIN) and k not in kept_attributes]:
                del attributes[name]
            # Values that were plain then or are plain now; other values are restored by their content, or are not
            # known.
            for name, value in kept_attributes.items():
                if isinstance(value, _PLAIN) or isinstance(attributes.get(name), _PLAIN):
                    attributes[name] = value

    @property
    def nbytes(self) -> int:
        """Number of bytes of all copies."""
        return sum(t.numel() * t.element_size() for t in self._copies)
