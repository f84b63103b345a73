"""Ownership of memory: bytes shared by several names are counted once, under the first name."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class OwnedElements(NamedTuple):
    """The flat elements that a tensor owns (None: all), or the name of the tensor that owns its memory."""

    owned: NDArray[np.int64] | None = None
    tied_to: str = ""
    view_of: str = ""


class StorageOwnership:
    """The elements of one storage that tensors have claimed so far."""

    def __init__(self) -> None:
        self._owners: list[tuple[str, Tensor]] = []
        self._taken: NDArray[np.bool_] | None = None

    def claim(self, name: str, tensor: Tensor) -> OwnedElements:
        """Claim the elements of ``tensor`` that no earlier tensor of this storage holds."""
        if not self._owners:
            self._owners.append((name, tensor))
            return OwnedElements(owned=distinct_elements(tensor))
        tied = next((n for n, t in self._owners if _place(t) == _place(tensor)), None)
        if tied:
            return OwnedElements(tied_to=tied)
        taken = self._marks()
        covered = taken[_bytes(tensor)].any(1)
        if covered.all():
            return OwnedElements(view_of=self._first_sharing(tensor))
        taken[_bytes(tensor)] = True
        self._owners.append((name, tensor))
        elements = distinct_elements(tensor)
        if not covered.any():
            return OwnedElements(owned=elements)
        free = np.flatnonzero(~covered)
        return OwnedElements(owned=free if elements is None else np.intersect1d(free, elements))

    def _marks(self) -> NDArray[np.bool_]:
        """A mask of the storage's bytes that are claimed already."""
        if self._taken is None:
            owner = self._owners[0][1]
            self._taken = np.zeros(owner.untyped_storage().nbytes(), bool)
            self._taken[_bytes(owner)] = True
        return self._taken

    def _first_sharing(self, tensor: Tensor) -> str:
        for name, owner in self._owners:
            mark = np.zeros(owner.untyped_storage().nbytes(), bool)
            mark[_bytes(owner)] = True
            if mark[_bytes(tensor)].any():
                return name
        raise AssertionError("no owner shares bytes with the covered tensor; expected at least one")


def distinct_elements(tensor: Tensor) -> NDArray[np.int64] | None:
    """The first element at each memory address of a tensor that overlaps itself; None: all elements."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return None
    _, first = np.unique(_bytes(tensor)[:, 0], return_index=True)
    return None if first.size == tensor.numel() else np.sort(first)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _bytes(tensor: Tensor) -> NDArray[np.int64]:
    """Byte offsets of a tensor's elements in its storage, int64[elements, itemsize], C order."""
    offsets = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size, dtype=np.int64) * stride
    starts = (offsets.reshape(-1, 1) + tensor.storage_offset()) * tensor.element_size()
    return np.asarray(starts, np.int64) + np.arange(tensor.element_size(), dtype=np.int64)
