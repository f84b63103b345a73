"""Access to single elements of a live tensor, whatever its dtype, device or strides.

All access uses an integer view of the tensor's own storage, so values are never converted, NaN payloads are kept
and the tensor is not copied. Writes use ``.data``, because a hardware fault does not change autograd's version counter either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from unsilent.faults import Codec, codec

Words = NDArray[np.unsignedinteger]
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Signed integer dtypes in which a tensor's bits are viewed, by element width in bytes."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype without its prefix: ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def drop_repeated_dimensions(tensor: Tensor) -> Tensor:
    """The tensor without the dimensions that repeat the same memory (stride 0, from ``expand``)."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def content_of(tensor: Tensor) -> Any:
    """The bytes of a tensor's elements in logical order, whatever the memory layout.

    -0 differs from 0, and NaN equals itself.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A dimension of size 1 may have any stride in a contiguous tensor; its bytes then cannot be viewed directly.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data if dense.numel() else b""


def read_together(parts: Sequence[tuple[TensorMemory, NDArray[np.int64]]]) -> list[Words]:
    """The words of elements of several tensors, with one copy from a device per element width."""
    result: dict[int, Words] = {}
    begun: dict[tuple[torch.device, int], list[int]] = {}
    for number, (memory, elements) in enumerate(parts):
        if memory._array is not None:
            result[number] = memory.read(elements)
        else:
            begun.setdefault((memory.tensor.device, memory.tensor.element_size()), []).append(number)
    for numbers in begun.values():
        words = torch.cat([parts[n][0].begin_read(parts[n][1]) for n in numbers]).cpu().numpy()
        ends = np.cumsum([len(parts[n][1]) for n in numbers])
        for number, part in zip(numbers, np.split(words, ends[:-1]), strict=True):
            result[number] = part.view(parts[number][0].codec.word_dtype)
    return [result[number] for number in range(len(parts))]


class TensorMemory:
    """Word access to one tensor by flat C-order element index."""

    __slots__ = ("_array", "_words", "codec", "shape", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.codec: Codec = codec(dtype_name(tensor.dtype))
        words = tensor.data.view(WORDS[tensor.element_size()])
        # Dense memory is indexed flat, other memory dimension by dimension. On the CPU numpy is used, which is much
        # faster than torch for a few elements and shares the same memory.
        self._words = words.view(-1) if words.is_contiguous() else words
        self._array = self._words.numpy().view(self.codec.word_dtype) if tensor.device.type == "cpu" else None

    @property
    def words(self) -> Tensor:
        """The bits of all elements as integers of the element width; flat if the memory is dense."""
        return self._words

    @property
    def is_attached(self) -> bool:
        """Whether the tensor still uses this memory (``model.double()`` or ``.to()`` would replace it)."""
        return self.tensor.data_ptr() == self._words.data_ptr() and dtype_name(self.tensor.dtype) == self.codec.name

    def read(self, elements: NDArray[np.int64]) -> Words:
        """The words at ``elements``, int64[n] -> unsigned[n], a copy."""
        if self._array is not None:
            return self._array[self._index(elements)]
        return self.begin_read(elements).cpu().numpy().view(self.codec.word_dtype)

    def begin_read(self, elements: NDArray[np.int64]) -> Tensor:
        """The words of elements on the tensor's device, as signed integers, without synchronisation."""
        return self._words[self._on_device(self._index(elements))]

    def write(self, elements: NDArray[np.int64], words: Words) -> None:
        """Put ``words`` at ``elements``; elements must be distinct."""
        index = self._index(elements)
        if self._array is not None:
            self._array[index] = words
            return
        values = torch.tensor(words.view(np.dtype(f"i{self.codec.word_dtype.itemsize}")), device=self._words.device)
        self._words[self._on_device(index)] = values

    def hash(self) -> str:
        """The xxh3-128 hash of dtype, shape and all bits."""
        digest = xxhash.xxh3_128(f"{self.codec.name}{list(self.shape)}".encode())
        digest.update(self._words.contiguous().cpu().numpy().data)
        return digest.hexdigest()

    def _index(self, elements: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        if self._words.ndim == 1 and self._words.is_contiguous():
            return (elements,)
        return np.unravel_index(elements, self.shape)

    def _on_device(self, index: tuple[NDArray[np.int64], ...]) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(i, device=self._words.device) for i in index)
