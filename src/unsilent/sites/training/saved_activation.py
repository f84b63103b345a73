"""Activations that are kept from the forward to the backward pass, corrupted in memory between the two.

Only a weak reference is held, so that a fault keeps nothing alive that the step would free. Corrupted is the memory itself: every
node that saved it sees the corruption, as it would a flipped bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class SavedActivation(NamedTuple):
    """A tensor as its memory and its place in it."""

    memory: StorageWeakRef
    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> SavedActivation:
        """Remember a tensor without keeping it."""
        memory = StorageWeakRef(tensor.untyped_storage())
        offset = int(tensor.storage_offset())
        return cls(memory, tensor.dtype, tensor.device, offset, tuple(tensor.shape), tuple(tensor.stride()))

    def tensor(self) -> Tensor | None:
        """The tensor, if anyone has kept it."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            return None
        again = torch.empty(0, dtype=self.dtype, device=self.device)
        return again.set_(storage, self.offset, self.shape, self.stride)
