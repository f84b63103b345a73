"""Fingerprints of the bits of parameters and optimizer state, to detect changes between two steps.

The fingerprint of a tensor is the digest of its bits (`unsilent.recovery.digests`), which depends on the position of each
element. It needs no threshold, and memory is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

COUNTERS = "step counters"
"""Common name of all one-element tensors in the state of an optimizer."""


class StateEntry:
    """A tensor of which one fingerprint is taken, or several tensors of one element each.

    They are a parameter, or tensors of an optimizer's state.

    Attributes:
        name: Name in reports.
        is_parameter: Whether it is a parameter; otherwise it belongs to an optimizer's state.
    """

    __slots__ = ("_is_sharded", "_places", "_tensors", "is_parameter", "name")

    def __init__(self, name: str, is_parameter: bool = False) -> None:
        self.name, self.is_parameter = name, is_parameter
        self._tensors: list[Tensor] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._is_sharded = False

    def add(self, tensor: Tensor, table: dict[str, Any] | None = None, key: str = "") -> None:
        """Add a tensor, which is ``table[key]`` in an optimizer's state."""
        self._tensors.append(tensor)
        self._is_sharded = self._is_sharded or hasattr(tensor, "_local_tensor")
        if table is not None:
            self._places.append((table, key))

    def is_current(self) -> bool:
        """Whether the optimizer still holds these tensors.

        Some optimizers replace them.
        """
        return all(table.get(key) is t for (table, key), t in zip(self._places, self._tensors, strict=False))

    def _locals(self) -> list[Tensor]:
        """Parts of the tensors that this rank holds."""
        return [getattr(t, "_local_tensor", t) for t in self._tensors] if self._is_sharded else self._tensors

    def versions(self) -> list[tuple[int, int]]:
        """Keys that change when a tensor is written to through torch, or its memory is replaced."""
        return [(tensor._version, tensor.data_ptr()) for tensor in self._locals()]

    def bits(self) -> Tensor:
        """A tensor with the bits of all tensors of the entry."""
        tensors = self._locals()
        return tensors[0] if len(tensors) == 1 else _flatten_dense_tensors(tensors)


def state_entries(parameters: Sequence[tuple[str, Tensor]], optimizer: Optimizer, number: int) -> list[StateEntry]:
    """Entries for the parameters and for the current tensors of an optimizer's state.

    ``number``: number of the optimizer.
    """
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
