"""Fingerprints of the bits of parameters and optimizer state: taken after an optimizer step, compared before the next one.

The fingerprint of a tensor is the sum of its 64-bit words, modulo 2**64. It differs for every change of a single bit, and of
several bits unless their changes cancel out (the same bit set in one word and cleared in another). It needs no threshold, and one
read of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from unsilent.monitor.signals.magnitudes import SMALL

_WORDS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}
COUNTERS = "step counters"
"""Name of all tensors of one element in the state of an optimizer together."""


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Fingerprints of n tensors, int64[n] on their device; where some are on the host (step counters), on that of the others."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    large: list[int] = []
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if 0 < tensor.numel() <= SMALL and tensor.dtype in _WORDS:
            small.setdefault((tensor.dtype, tensor.device), []).append(place)
        else:
            large.append(place)
    parts = [torch.stack([_bit_sum(tensors[place]).to(device, non_blocking=True) for place in large])] if large else []
    for (dtype, _), places in small.items():
        sums = _small_bit_sums([tensors[place] for place in places], _WORDS[dtype])
        parts.append(sums.to(device, non_blocking=True))
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([*large, *(place for places in small.values() for place in places)])
    return torch.cat(parts)[order.argsort().to(device, non_blocking=True)]


def _small_bit_sums(tensors: Sequence[Tensor], word: torch.dtype) -> Tensor:
    """Fingerprints of tensors of one dtype in one piece, for small ones cost as much as calls do; sums of their own words."""
    ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0) - 1
    flat = _flatten_dense_tensors(list(tensors)).view(word)
    totals = flat.cumsum(0, dtype=torch.int64)[ends.to(flat.device, non_blocking=True)]
    return torch.cat([totals[:1], totals.diff()])


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


class StateEntry:
    """A parameter, a tensor of an optimizer's state, or several of one element each, which are read together.

    Attributes:
        name: As it is reported.
        is_parameter: Not of an optimizer's state.
    """

    __slots__ = ("_is_sharded", "_places", "_tensors", "is_parameter", "name")

    def __init__(self, name: str, is_parameter: bool = False) -> None:
        self.name, self.is_parameter = name, is_parameter
        self._tensors: list[Tensor] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._is_sharded = False

    def add(self, tensor: Tensor, table: dict[str, Any] | None = None, key: str = "") -> None:
        """One more tensor; in an optimizer's state it is ``table[key]``."""
        self._tensors.append(tensor)
        self._is_sharded = self._is_sharded or hasattr(tensor, "_local_tensor")
        if table is not None:
            self._places.append((table, key))

    def is_current(self) -> bool:
        """Whether the optimizer still holds these tensors: some put others in their place."""
        return all(table.get(key) is t for (table, key), t in zip(self._places, self._tensors, strict=False))

    def _locals(self) -> list[Tensor]:
        """What this rank holds of them."""
        return [getattr(t, "_local_tensor", t) for t in self._tensors] if self._is_sharded else self._tensors

    def versions(self) -> list[tuple[int, int]]:
        """What changes when somebody writes to the tensors through torch, or replaces their memory."""
        return [(tensor._version, tensor.data_ptr()) for tensor in self._locals()]

    def bits(self) -> Tensor:
        """One tensor with all bits."""
        tensors = self._locals()
        return tensors[0] if len(tensors) == 1 else _flatten_dense_tensors(tensors)


def state_entries(parameters: Sequence[tuple[str, Tensor]], optimizer: Optimizer, number: int) -> list[StateEntry]:
    """Parameters and the tensors of an optimizer's state, as they are now; ``number`` of the optimizer."""
    result: list[StateEntry] = []
    counters: dict[tuple[torch.dtype, torch.device], StateEntry] = {}
    for name, parameter in parameters:
        entry = StateEntry(name, is_parameter=True)
        entry.add(parameter)
        result.append(entry)
        table = optimizer.state.get(parameter, {})
        for key, value in table.items():
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if value.numel() == 1:
                kind = value.dtype, value.device
                if kind not in counters:
                    counters[kind] = StateEntry(f"{COUNTERS} of optimizer {number}")
                entry = counters[kind]
            else:
                result.append(entry := StateEntry(f"{name}/{key}"))
            entry.add(value, table, key)
    return result + list(counters.values())
