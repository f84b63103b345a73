"""The elements of a stored tensor in C order, a few MiB at a time, whatever blocks it is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.stored_tensors import Block, StoredTensor
from unsilent.errors import UsageError
from unsilent.faults.codecs import Array

PART_BYTES = 4 * 2**20
MOST_ROW = 2**30
"""Bytes of one row of a tensor in several blocks, which is held in memory."""


def content_parts(files: CheckpointFiles, tensor: StoredTensor) -> Iterator[memoryview]:
    """All elements, least significant byte first; the parts must be used before the next is taken.

    Raises ``UsageError`` for a tensor that is only listed, and one with elements that are in no block.
    """
    if not tensor.is_readable:
        reason = tensor.obstacle or f"dtype {tensor.dtype} is not known"
        raise UsageError(f"{tensor.name!r} in {files.root} cannot be read: {reason}")
    if not tensor.numel:
        return
    if len(tensor.blocks) == 1 and _is_whole(tensor):
        parts = _dense_parts(files, tensor, tensor.blocks[0])
    else:
        parts = _gathered_parts(files, tensor)
    for part in parts:
        yield part if not tensor.big_endian else _swapped(part, _word_size(tensor))


def _is_whole(tensor: StoredTensor) -> bool:
    block = tensor.blocks[0]
    return block.packing is None and block.shape == tensor.grid_shape and block.is_c_ordered


def _dense_parts(files: CheckpointFiles, tensor: StoredTensor, block: Block) -> Iterator[memoryview]:
    total = tensor.numel * tensor.item_size
    for begin in range(0, total, PART_BYTES):
        yield memoryview(files.read(block.file, block.offset + begin, min(PART_BYTES, total - begin)))


def _gathered_parts(files: CheckpointFiles, tensor: StoredTensor) -> Iterator[memoryview]:
    """Some rows along the first dimension after another, put together from every block that has elements of them."""
    shape, item = tensor.grid_shape or (1,), tensor.item_size
    row = math.prod(shape[1:]) * item
    if row > MOST_ROW:
        raise UsageError(
            f"{tensor.name!r} in {files.root} has rows of {row:,} bytes in several parts; at most {MOST_ROW:,} can be read"
        )
    rows = max(1, PART_BYTES // max(row, 1))
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        part = np.zeros((last - first, *shape[1:]), f"V{item}")
        filled = 0
        for block in tensor.blocks:
            start, lengths = block.start or (0,), block.shape or (1,)
            low, high = max(first, start[0]), min(last, start[0] + lengths[0])
            if low < high:
                values = _rows_of(files, block, low - start[0], high - start[0], item)
                where = (
                    slice(low - first, high - first),
                    *(slice(s, s + n) for s, n in zip(start[1:], lengths[1:], strict=True)),
                )
                part[where] = values
                filled += values.size
        if filled != part.size:
            raise UsageError(
                f"parts of {tensor.name!r} in {files.root} are missing or overlap; the checkpoint is incomplete"
            )
        yield part.view(np.uint8).reshape(-1).data


def _rows_of(files: CheckpointFiles, block: Block, low: int, high: int, item: int) -> Array:
    """Rows ``low`` to ``high`` of a block, as numpy's void items."""
    shape, strides = (high - low, *block.shape[1:]), block.strides or (1,)
    first = low * strides[0]
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if block.packing is not None:
        content = block.packing.unpack(files.read(block.file, block.offset, block.packed_size))[first * item :]
    else:
        content = files.read(block.file, block.offset + first * item, extent * item)
    if len(content) < extent * item:
        raise UsageError(f"a packed part of {files.shown(block.file)} is shorter than its shape; the file is damaged")
    memory = np.frombuffer(content, f"V{item}", count=extent)
    return np.lib.stride_tricks.as_strided(memory, shape, [s * item for s in strides], writeable=False)


def _word_size(tensor: StoredTensor) -> int:
    """Bytes whose order a big-endian file turns round: a complex number is two of them."""
    return tensor.item_size // 2 if tensor.dtype.startswith("complex") else tensor.item_size


def _swapped(part: memoryview, item: int) -> memoryview:
    return np.frombuffer(part, np.uint8).reshape(-1, item)[:, ::-1].copy().reshape(-1).data
