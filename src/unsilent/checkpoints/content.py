"""Reading of all elements of a stored tensor in C order, a few MiB at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.stored_tensors import Block, Shape, StoredTensor
from unsilent.faults.codecs import Array

PART_BYTES = 2**20
"""Bytes read at once. They are hashed while they are in the processor's cache: with 4 MiB, half as fast."""
UNORDERED_PART_BYTES = 64 * 2**20
"""Bytes read at once of a tensor whose rows are spread over its bytes: each part reads through all of them."""
LEAST_READ = 256 * 2**10
"""Smallest number of bytes that are read at once, even if fewer are needed."""
MOST_ROW = 2**30
"""Largest size in bytes of one row of a tensor in several blocks; a row is held in memory."""


def content_parts(files: CheckpointFiles, tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield all elements of a tensor in parts, least significant byte first.

    Each part must be used before the next is requested.

    Raises ``UsageError`` for a tensor that is only listed, or that has elements outside of all blocks.
    """
    if not tensor.is_readable:
        reason = tensor.obstacle or f"dtype {tensor.dtype} is not known"
        raise UsageError(f"{tensor.name!r} in {files.root} cannot be read: {reason}")
    if not tensor.numel:
        return
    if tensor.raw_size or (len(tensor.blocks) == 1 and _is_whole(tensor)):
        parts = _dense_parts(files, tensor, tensor.blocks[0])
    else:
        parts = _gathered_parts(files, tensor)
    for part in parts:
        yield part if not tensor.big_endian else _with_swapped_bytes(part, _word_size(tensor))


def _is_whole(tensor: StoredTensor) -> bool:
    block = tensor.blocks[0]
    return block.packing is None and block.shape == tensor.grid_shape and block.is_c_ordered


def _dense_parts(files: CheckpointFiles, tensor: StoredTensor, block: Block) -> Iterator[memoryview]:
    total = tensor.nbytes
    for begin in range(0, total, PART_BYTES):
        yield memoryview(files.read(block.file, block.offset + begin, min(PART_BYTES, total - begin)))


def _gathered_parts(files: CheckpointFiles, tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield the tensor in groups of rows along its first dimension, each assembled from all blocks that overlap it."""
    shape, item = tensor.grid_shape or (1,), tensor.item_size
    row = math.prod(shape[1:]) * item
    if row > MOST_ROW:
        raise UsageError(
            f"{tensor.name!r} in {files.root} has rows of {row:,} bytes in several parts; at most {MOST_ROW:,} can be read"
        )
    rows = _rows_of_a_part(tensor, row)
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        part = np.zeros((last - first, *shape[1:]), _item_dtype(item))
        filled = 0
        for block in tensor.blocks:
            start, lengths = block.start or (0,), block.shape or (1,)
            low, high = max(first, start[0]), min(last, start[0] + lengths[0])
            if low < high:
                inner = (slice(s, s + n) for s, n in zip(start[1:], lengths[1:], strict=True))
                where = (slice(low - first, high - first), *inner)
                _fill_rows(part[where], files, block, low - start[0])
                filled += part[where].size
        if filled != part.size:
            raise UsageError(
                f"parts of {tensor.name!r} in {files.root} are missing or overlap; the checkpoint is incomplete"
            )
        yield part.view(np.uint8).reshape(-1).data


def _rows_of_a_part(tensor: StoredTensor, row: int) -> int:
    """The number of rows to assemble at once, when a row has ``row`` bytes.

    A multiple of the rows of a packed block if possible, so that each block is unpacked only once.
    """
    is_ordered = all(block.is_c_ordered for block in tensor.blocks)
    rows = max(1, (PART_BYTES if is_ordered else UNORDERED_PART_BYTES) // max(row, 1))
    together = max((block.shape[0] for block in tensor.blocks if block.packing is not None and block.shape), default=1)
    return -(-rows // together) * together if together * row <= UNORDERED_PART_BYTES else rows


def _fill_rows(target: Array, files: CheckpointFiles, block: Block, low: int) -> None:
    """Copy rows of a block from row ``low`` on into a part of a tensor."""
    item, strides = target.itemsize, block.strides or (1,)
    first = low * strides[0]
    if block.packing is None:
        _fill(target, files, block.file, block.offset + first * item, strides)
        return
    content = block.packing.unpack(files.read(block.file, block.offset, block.packed_size))[first * item :]
    if len(content) < _extent(target.shape, strides) * item:
        raise UsageError(f"a packed part of {files.shown(block.file)} is shorter than its shape; the file is damaged")
    target[...] = _strided_items(content, target.shape, strides, item)


def _fill(target: Array, files: CheckpointFiles, file: str, offset: int, strides: Shape) -> None:
    """Copy strided elements from a file into an array.

    Reads in halves if most of the bytes between the first and the last element belong to other tensors.
    """
    shape, item = target.shape, target.itemsize
    extent = _extent(shape, strides) * item
    if extent <= max(LEAST_READ, 2 * target.nbytes):
        target[...] = _strided_items(files.read(file, offset, extent), shape, strides, item)
        return
    widest = max(range(len(shape)), key=lambda dimension: (shape[dimension] - 1) * strides[dimension])
    half = shape[widest] // 2
    before = (slice(None),) * widest
    _fill(target[(*before, slice(None, half))], files, file, offset, strides)
    _fill(target[(*before, slice(half, None))], files, file, offset + half * strides[widest] * item, strides)


def _extent(shape: Shape, strides: Shape) -> int:
    """Number of elements between the first and the last one in memory, both included."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1


def _strided_items(content: bytes, shape: Shape, strides: Shape, item: int) -> Array:
    memory = np.frombuffer(content, _item_dtype(item), count=_extent(shape, strides))
    return np.lib.stride_tricks.as_strided(memory, shape, [s * item for s in strides], writeable=False)


def _item_dtype(size: int) -> str:
    """A NumPy dtype for copying elements of a given size in bytes."""
    return f"u{size}" if size in (1, 2, 4, 8) else f"V{size}"


def _word_size(tensor: StoredTensor) -> int:
    """Size in bytes of the unit whose byte order matters: an element, or half of a complex one."""
    return tensor.item_size // 2 if tensor.dtype.startswith("complex") else tensor.item_size


def _with_swapped_bytes(part: memoryview, item: int) -> memoryview:
    return np.frombuffer(part, np.uint8).reshape(-1, item)[:, ::-1].copy().reshape(-1).data
