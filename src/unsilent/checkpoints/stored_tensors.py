"""The positions of a tensor's elements in the files of a checkpoint, and the checksums that cover them.

A tensor is made of *blocks*: boxes of elements that lie in one file at fixed distances, which covers dense tensors, strided
views, chunks of HDF5, shards of several ranks and slices of a flattened partition. A format only has to list blocks; reading,
locating, editing and comparing work the same way for all formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.faults.codecs import CODECS, Array, Codec, codec

Ints = NDArray[np.int64]
Shape = tuple[int, ...]
ITEM_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "bits8": 1, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits16": 2, "quint4x2": 1, "quint2x4": 1,
    **dict.fromkeys((f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)), 1),
}  # fmt: skip
"""Bytes of an element, by torch's name of the dtype; dtypes without a codec can be read and compared, but not edited."""
OBJECT = "object"
"""Name in place of a dtype, for values that are not tensors and are not read."""
Read = Callable[[str, int, int], bytes]
"""Bytes of a file of the checkpoint, from its name, an offset and a length."""


class Patch(NamedTuple):
    """A replacement of bytes in one file by as many others."""

    file: str
    offset: int
    before: bytes
    after: bytes


class Checksum(Protocol):
    """A checksum in a file that covers some of its bytes."""

    @property
    def name(self) -> str:
        """Name of the checksum, for messages: ``CRC-32 of archive/data/0``."""

    @property
    def places(self) -> tuple[tuple[str, int, int], ...]:
        """File, offset and length of each place where the checksum is stored."""

    def update(self, patches: list[Patch], read: Read) -> list[Patch]:
        """The patches that make the checksum fit the bytes after ``patches``; empty if they change no covered byte.

        ``read`` reads the bytes before any patch. The patches may include those of other checksums.
        """


class Packing(Protocol):
    """The encoding of a block's bytes, such as compression."""

    def unpack(self, stored: bytes) -> bytes:
        """Decode stored bytes to the bytes of the elements.

        Raises ``UsageError`` if they are damaged.
        """

    def pack(self, content: bytes, stored_size: int) -> bytes:
        """Encode elements to exactly ``stored_size`` bytes.

        Raises ``UsageError`` if they do not fit.
        """


@dataclass(frozen=True)
class Block:
    """A rectangular region of a tensor's elements that is stored together.

    Attributes:
        file: Name of the file within the checkpoint.
        offset: Position of the block's first element, in bytes; position of the packed bytes if ``packing`` is given.
        start: Index of its first element in the tensor's grid.
        shape: Number of elements along each dimension of the grid.
        strides: Distances between neighbours along each dimension, in elements.
        packing: Packing of its bytes; None: they are not packed.
        packed_size: Number of bytes in the file, if the block is packed.
        checksums: Checksums that cover it, the innermost first.
    """

    file: str
    offset: int
    start: Shape
    shape: Shape
    strides: Shape
    packing: Packing | None = None
    packed_size: int = 0
    checksums: tuple[Checksum, ...] = ()

    @property
    def last_element(self) -> int:
        """Distance from the first element to the last one in memory, in elements."""
        return sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) if self.numel else -1

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_c_ordered(self) -> bool:
        """Whether the elements are contiguous and in C order."""
        return all(n == 1 or s == e for n, s, e in zip(self.shape, self.strides, c_strides(self.shape), strict=True))


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, or number, of a checkpoint.

    Attributes:
        name: Section and name within it: ``model/fc.weight``, ``optimizer/fc.weight/exp_avg``.
        dtype: Torch's name of the dtype: a key of `ITEM_SIZES`, or another name for a tensor that is only listed.
        shape: Logical shape.
        blocks: Blocks of its elements; empty if the tensor is only listed.
        grid: The shape in which blocks are boxes, with the same elements in C order; None: ``shape``.
        big_endian: Whether the most significant byte of an element comes first.
        stored_as: Name in the file.
        obstacle: Reason why it is only listed, or can be read but not edited; empty if only its dtype can prevent this.
        value: The number itself; None for tensors.
        fingerprint: Hash of the file's description of a value that is not read, for comparisons; empty if there is none.
        raw_size: Size in bytes of a tensor whose elements are not whole bytes; its block consists of bytes.
    """

    name: str
    dtype: str
    shape: Shape
    blocks: tuple[Block, ...]
    grid: Shape | None = None
    big_endian: bool = False
    stored_as: str = ""
    obstacle: str = ""
    value: float | int | bool | None = None
    fingerprint: str = ""
    raw_size: int = 0

    @property
    def section(self) -> str:
        """The tensor's section: ``model``, ``optimizer``, ``scheduler``, ``rng`` or ``other``."""
        return self.name.partition("/")[0]

    @property
    def site(self) -> str:
        """Site of the tensor: ``file:model/fc.weight``."""
        return f"file:{self.name}"

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def item_size(self) -> int:
        """Size of an element in bytes; 0 if the dtype is unknown."""
        return ITEM_SIZES.get(self.dtype, 0)

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes; 0 if it is unknown."""
        return self.numel * self.item_size or self.raw_size

    def stored_size(self, block: Block) -> int:
        """Number of bytes from the first to the last byte of a block in its file."""
        return block.packed_size or (block.last_element + 1) * self.item_size

    @property
    def is_number(self) -> bool:
        """Whether the value is a number rather than a tensor."""
        return self.value is not None

    @property
    def is_object(self) -> bool:
        """Whether the value is neither a tensor nor a number, and is not read."""
        return self.dtype == OBJECT

    @property
    def is_readable(self) -> bool:
        """Whether the bytes of the elements can be read."""
        return bool((self.item_size and not self.numel) or (self.nbytes and self.blocks))

    @property
    def reason_not_editable(self) -> str:
        """The reason why the value cannot be edited; empty if it can."""
        if self.obstacle or self.dtype in CODECS:
            return self.obstacle
        return f"dtype {self.dtype or 'unknown'} has no known layout of bits"

    @property
    def codec(self) -> Codec:
        """The bit layout of the dtype.

        Raises ``UsageError`` if the dtype has no codec.
        """
        return codec(self.dtype)

    @property
    def file_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The NumPy dtype of a word in the file, with the file's byte order."""
        return self.codec.word_dtype.newbyteorder(">" if self.big_endian else "<")

    @property
    def grid_shape(self) -> Shape:
        """The shape of the array that the blocks are regions of."""
        return self.shape if self.grid is None else self.grid

    @cached_property
    def _corners(self) -> tuple[Ints, Ints]:
        """The first index of every block and the index after the last one, int64[B, d] each."""
        dimensions = len(self.grid_shape)
        first = np.array([block.start for block in self.blocks], np.int64).reshape(len(self.blocks), dimensions)
        size = np.array([block.shape for block in self.blocks], np.int64).reshape(len(self.blocks), dimensions)
        return first, first + size

    def locate(self, elements: Ints) -> Iterator[tuple[Block, Ints, Ints]]:
        """Yield the blocks that contain some elements, with the elements' positions in each block.

        Args:
            elements: int64[n], flat C-order indices.

        Yields:
            ``(block, places, positions)``: ``elements[places]`` are at byte ``block.offset + positions * itemsize`` of the file,
            or ``positions * itemsize`` of the unpacked block.

        Raises:
            UsageError: an element is not in any block.
        """
        shape = self.grid_shape
        index = np.stack(np.unravel_index(elements, shape), -1) if shape else np.zeros((len(elements), 0), np.int64)
        first, end = self._corners
        block_of = np.full(len(elements), -1)
        for place, at in enumerate(index):
            inside = np.flatnonzero(((first <= at) & (at < end)).all(axis=1))
            if not inside.size:
                raise UsageError(
                    f"element {int(elements[place])} of {self.name!r} is in no part of the checkpoint's files; "
                    "the checkpoint is incomplete, save it again"
                )
            block_of[place] = inside[0]
        for number in np.unique(block_of).tolist():
            places = np.flatnonzero(block_of == number)
            block = self.blocks[number]
            within = index[places] - np.array(block.start, np.int64)
            yield block, places, within @ np.array(block.strides, np.int64)


def c_strides(shape: Shape) -> Shape:
    """The strides of an array in C order, in elements."""
    result, step = [], 1
    for length in reversed(shape):
        result.append(step)
        step *= max(length, 1)
    return tuple(reversed(result))


def dense_block(file: str, offset: int, shape: Shape, checksums: tuple[Checksum, ...] = ()) -> Block:
    """A block in C order that begins at the tensor's first element."""
    return Block(file, offset, (0,) * len(shape), shape, c_strides(shape), checksums=checksums)


def words_from_bytes(tensor: StoredTensor, content: bytes) -> Array:
    """Convert bytes to words in the machine's byte order, as a copy."""
    return np.frombuffer(content, tensor.file_dtype).astype(tensor.codec.word_dtype)
