"""Values: what a piece of memory holds between two writes to it. Tensors are *windows* on values.

A view needs no operation of its own: it is another window on the same memory. So dirt is tracked by storage, whatever
views of it a model makes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Holders = dict[int, Tensor]
"""A tensor on the memory of each value (its home window)."""


class Diverged(Exception):
    """The faulty run may not do what the tape says; the message says where."""


class StorageWindow(NamedTuple):
    """A tensor as a place in a value: strides and offset count elements."""

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def window_of(tensor: Tensor, value: int) -> StorageWindow:
    """The window that ``tensor`` is."""
    return StorageWindow(value, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def fits(tensor: Tensor, window: StorageWindow) -> bool:
    """Whether a tensor has a window's dtype, shape, strides and offset."""
    return (
        tensor.shape == window.shape
        and tensor.dtype == window.dtype
        and tensor.stride() == window.stride
        and tensor.storage_offset() == window.offset
    )


def view_window(holder: Tensor, window: StorageWindow) -> Tensor:
    """The window on the memory that ``holder`` lives in."""
    if holder.dtype == window.dtype:
        return holder.as_strided(window.shape, window.stride, window.offset)
    return _tensor_on(holder.untyped_storage(), holder, window)


def tensor_at_window(holder: Tensor, window: StorageWindow) -> Tensor:
    """The window on the memory of ``holder``, which is ``holder`` itself where it is that window."""
    return holder if fits(holder, window) else view_window(holder, window)


def private_copy(tensor: Tensor) -> Tensor:
    """The tensor's window on a copy of its whole storage."""
    return _tensor_on(tensor.untyped_storage().clone(), tensor, window_of(tensor, -1))


def _tensor_on(storage: torch.UntypedStorage, like: Tensor, window: StorageWindow) -> Tensor:
    empty = torch.empty(0, dtype=window.dtype, device=like.device)
    return empty.set_(storage, window.offset, window.shape, window.stride)


def words_of_storage(tensor: Tensor) -> Tensor:
    """All bits of the storage a tensor lives in, as integers as wide as its size allows (wide ones compare faster)."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    dtype, width = (torch.int64, 8) if size % 8 == 0 else (torch.int32, 4) if size % 4 == 0 else (torch.uint8, 1)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (size // width,), (1,))


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether the storages of two tensors hold the same bits (-0 is not 0, a NaN equals itself)."""
    return torch.equal(words_of_storage(one), words_of_storage(two))
