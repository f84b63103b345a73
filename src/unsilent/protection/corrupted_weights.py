"""Records of corrupted elements of a parameter or buffer, and of their bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_SHOWN = 4
"""Maximum number of elements that are listed as text."""


@dataclass(frozen=True, eq=False)
class CorruptedWeights:
    """Corrupted elements of one parameter or buffer.

    Attributes:
        tensor: Name of the tensor.
        shape: Shape of the tensor.
        elements: int64[n], flat indices of the corrupted elements. If ``flipped`` is empty, indices of all elements in the piece
            of memory with a wrong checksum, one or more of which are corrupted.
        flipped: Mask of the flipped bits of each of these elements; empty if they are not known because nothing was repaired.
    """

    tensor: str
    shape: tuple[int, ...]
    elements: NDArray[np.int64]
    flipped: tuple[int, ...] = ()

    @property
    def is_repaired(self) -> bool:
        """Whether the elements have their right bits again."""
        return bool(self.flipped)

    @property
    def addresses(self) -> Iterator[str]:
        """Address of each element, like ``param:fc.weight[3,5]``."""
        for place in zip(*np.unravel_index(self.elements, self.shape), strict=True) if self.shape else [()]:
            yield f"param:{self.tensor}" + (f"[{','.join(map(str, place))}]" if place else "")

    @property
    def bits(self) -> Iterator[tuple[int, ...]]:
        """Positions of the flipped bits of each element, counted from 0 at the lowest."""
        for mask in self.flipped:
            yield tuple(bit for bit in range(mask.bit_length()) if mask >> bit & 1)

    def __str__(self) -> str:
        if not self.is_repaired:
            first = next(iter(self.addresses))
            return f"{first} or one of the {len(self.elements) - 1:,} elements after it (not repaired)"
        pairs = zip(self.addresses, self.bits, strict=True)
        texts = [f"{address} bit {', '.join(map(str, bits))}" for address, bits in islice(pairs, MOST_SHOWN)]
        more = f"; and {len(self.elements) - MOST_SHOWN:,} more elements" if len(self.elements) > MOST_SHOWN else ""
        return f"{'; '.join(texts)}{more} (repaired)"


def repaired_weights(
    tensor: str, shape: Iterable[int], itemsize: int, differences: Tensor, first: int = 0
) -> CorruptedWeights:
    """The corrupted weights of one tensor, from the bytes that a repair changed.

    Args:
        itemsize: Size of an element in bytes.
        differences: uint8[bytes], bytes before the repair XOR bytes after it.
        first: Flat index of the element that the bytes begin with.
    """
    rows = differences.view(-1, itemsize)
    changed = rows.any(1).nonzero().flatten()
    flipped = tuple(int.from_bytes(bytes(row), "little") for row in rows[changed].tolist())
    return CorruptedWeights(tensor, tuple(shape), changed.cpu().numpy().astype(np.int64) + first, flipped)


def bytes_of(tensor: Tensor) -> Tensor:
    """The content of a tensor as uint8[bytes] in CPU memory, in the order of its elements."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
