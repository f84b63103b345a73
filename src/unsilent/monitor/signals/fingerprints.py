"""Fingerprints of the bits of parameters and optimizer state: taken after an optimizer step, compared before the next one.

The fingerprint of a tensor is the sum of its 64-bit words, modulo 2**64. It differs for every change of a single bit, and of
several bits unless their changes cancel out (the same bit set in one word and cleared in another). It needs no threshold, and one
read of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unsilent.monitor.signals.magnitudes import local_tensor

COUNTERS = "step counters"
"""Name of all tensors of one element in the state of an optimizer together."""


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Fingerprints of n tensors, int64[n] on the device of the first."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    return torch.stack([_bit_sum(tensor).to(device) for tensor in tensors])


def _bit_sum(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    flat = tensor.view(-1)
    size = flat.element_size()
    per_word = 8 // size if size < 8 else 1
    whole = flat.numel() // per_word * per_word
    if not whole or flat.data_ptr() % 8:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -flat.numel() * size % 8))
        return flat.clone().view(torch.int64).sum()
    total = flat[:whole].view(torch.int64).sum()
    return total + _bit_sum(flat[whole:]) if whole < flat.numel() else total


class _Place(NamedTuple):
    """Where an optimizer holds a tensor: ``optimizer.state[parameter]`` is ``table``, and ``table[key]`` the tensor."""

    parameter: Tensor
    table: dict[str, Any]
    key: str


class StateEntry:
    """A parameter, a tensor of an optimizer's state, or several of one element each, which are read together.

    Attributes:
        name: As it is reported.
        is_parameter: Not of an optimizer's state.
    """

    def __init__(self, name: str, optimizer: Optimizer, is_parameter: bool = False) -> None:
        self.name, self.is_parameter = name, is_parameter
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._places: list[_Place] = []

    def add(self, tensor: Tensor, place: _Place | None = None) -> None:
        """One more tensor, and where an optimizer holds it."""
        self._tensors.append(tensor)
        if place is not None:
            self._places.append(place)

    def is_current(self) -> bool:
        """Whether the optimizer still holds these tensors: `load_state_dict` and some optimizers put others in their place."""
        state = self._optimizer.state
        return all(
            place.table.get(place.key) is tensor and state.get(place.parameter) is place.table
            for place, tensor in zip(self._places, self._tensors, strict=False)
        )

    def versions(self) -> list[tuple[int, int, int]]:
        """What changes when somebody writes to the tensors through torch, or replaces them or their memory."""
        locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in self._tensors]
        return [(id(tensor), tensor._version, tensor.data_ptr()) for tensor in locals_]

    def bits(self) -> Tensor:
        """One tensor with all bits."""
        if len(self._tensors) == 1:
            return local_tensor(self._tensors[0])
        return torch.cat([local_tensor(tensor).reshape(-1) for tensor in self._tensors])  # a shard may be empty


def state_entries(parameters: Sequence[tuple[str, Tensor]], optimizer: Optimizer, number: int) -> list[StateEntry]:
    """Parameters and the tensors of an optimizer's state, as they are now; ``number`` of the optimizer."""
    result: list[StateEntry] = []
    counters: dict[tuple[torch.dtype, torch.device], StateEntry] = {}
    for name, parameter in parameters:
        entry = StateEntry(name, optimizer, is_parameter=True)
        entry.add(parameter)
        result.append(entry)
        table = optimizer.state.get(parameter, {})
        for key, value in table.items():
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if value.numel() == 1:
                kind = value.dtype, value.device
                if kind not in counters:
                    counters[kind] = StateEntry(f"{COUNTERS} of optimizer {number}", optimizer)
                entry = counters[kind]
            else:
                result.append(entry := StateEntry(f"{name}/{key}", optimizer))
            entry.add(value, _Place(parameter, table, key))
    return result + list(counters.values())
