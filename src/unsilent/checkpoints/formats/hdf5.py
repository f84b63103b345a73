"""HDF5 files with numeric datasets, contiguous or chunked; chunks may have the filters Fletcher-32, shuffle and gzip.

libhdf5 only reports the positions of bytes, in a process with limits (`hdf5_reader`); this module reads and edits elements. A
dataset with two names is listed under the first; links to other files are not followed. Unsupported datasets are listed with the
reason.
"""

from __future__ import annotations

import math

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.hdf5_filters import (
    CHECKSUM_BYTES,
    DEFLATE,
    FLETCHER32,
    SHUFFLE,
    ChunkChecksum,
    ChunkPacking,
)
from unsilent.checkpoints.formats.hdf5_reader import Chunk, Dataset, datasets
from unsilent.checkpoints.names import unique_names
from unsilent.checkpoints.stored_tensors import ITEM_SIZES, Block, Checksum, Shape, StoredTensor, c_strides, dense_block

NAME = "HDF5"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
MOST_PACKED_CHUNK = 2**28
"""Largest size in bytes of a chunk that is unpacked in memory; unpacking takes several times as much memory."""
_KNOWN_FILTERS = {
    DEFLATE: "gzip", SHUFFLE: "shuffle", FLETCHER32: "Fletcher-32", 4: "szip", 5: "N-bit", 6: "scale-offset", 32000: "LZF",
}  # fmt: skip
_LAYOUTS = {
    "compact": "its elements are within the description of the dataset",
    "external": "its elements are in another file",
    "virtual": "it is made of other datasets",
}


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is an HDF5 file."""
    return not files.is_folder and signature_offset(files, 0, files.size("")) is not None


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All datasets of the file."""
    return range_tensors(files, 0, files.size(""))


def signature_offset(files: CheckpointFiles, begin: int, size: int) -> int | None:
    """The offset of HDF5's signature: 0, 512, 1024, 2048 and so on; None if it is not an HDF5 file."""
    at = 0
    while at + len(SIGNATURE) <= size:
        if files.read("", begin + at, len(SIGNATURE)) == SIGNATURE:
            return at
        at = 2 * at or 512
    return None


def range_tensors(
    files: CheckpointFiles, begin: int, size: int, checksums: tuple[Checksum, ...] = ()
) -> list[StoredTensor]:
    """All datasets of an HDF5 file that is embedded in a checkpoint file.

    Args:
        checksums: Checksums of the file around it, which cover all of its bytes.

    Raises:
        UsageError: it is not an HDF5 file, or it is damaged.
    """
    after = signature_offset(files, begin, size)
    if after is None:
        raise UsageError(f"{files.shown('')} has no HDF5 data where they are expected; it is damaged")
    listing = datasets(files, begin + after, size - after)
    names = unique_names([_naming_path(dataset.path) for dataset in listing], [dataset.shape for dataset in listing])
    return [_tensor(name, dataset, checksums) for name, dataset in zip(names, listing, strict=True)]


def _naming_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path without the group in which Keras 2 keeps a model's weights."""
    return path[1:] if len(path) > 1 and path[0] == "model_weights" else path


def _tensor(name: str, dataset: Dataset, checksums: tuple[Checksum, ...]) -> StoredTensor:
    obstacle = _obstacle(dataset)
    blocks: tuple[Block, ...] = ()
    if not obstacle and dataset.offset is not None and dataset.layout == "contiguous":
        blocks = (dense_block("", dataset.offset, dataset.shape, checksums),)
    elif not obstacle:
        blocks = tuple(_block(name, dataset, chunk, checksums) for chunk in dataset.chunks)
    order, stored_as = dataset.big_endian, "/".join(dataset.path)
    return StoredTensor(name, dataset.dtype, dataset.shape, blocks, None, order, stored_as, obstacle)


def _obstacle(dataset: Dataset) -> str:
    """The reason why the elements of a dataset cannot be located; empty if they can."""
    item = ITEM_SIZES.get(dataset.dtype, 0)
    if not item:
        return f"its elements are no plain numbers but of HDF5's class {ascii(dataset.dtype)[:40]}"
    if dataset.layout in _LAYOUTS:
        return _LAYOUTS[dataset.layout]
    if not math.prod(dataset.shape):
        return ""
    if dataset.layout == "contiguous":
        if dataset.offset is None:
            return "its elements were never written"
        return "" if dataset.size == math.prod(dataset.shape) * item else "its bytes do not fit its shape"
    return _obstacle_of_chunks(dataset, item) if dataset.layout == "chunked" else "its layout is not known"


def _obstacle_of_chunks(dataset: Dataset, item: int) -> str:
    codes = [code for code, _ in dataset.filters]
    for code in codes:
        if code not in (DEFLATE, SHUFFLE, FLETCHER32):
            name = _KNOWN_FILTERS.get(code, code)
            return f"its chunks have the filter {name}; gzip, shuffle and Fletcher-32 are known"
    if len(set(codes)) != len(codes):
        return "its chunks have the same filter twice"
    if len(dataset.chunk) != len(dataset.shape):
        return "its chunks do not fit its shape"
    if len(dataset.chunks) != math.prod(-(-n // step) for n, step in zip(dataset.shape, dataset.chunk, strict=True)):
        return "some of its elements were never written"
    size = math.prod(dataset.chunk) * item
    if size > MOST_PACKED_CHUNK and {DEFLATE, SHUFFLE} & set(codes):
        return f"its chunks have {size:,} bytes; {MOST_PACKED_CHUNK:,} can be unpacked at most"
    if not 0 < _shuffled_item(dataset) <= size:
        return "its filter shuffle is damaged"
    for chunk in dataset.chunks:
        applied = _applied_filters(dataset, chunk)
        expected = size + CHECKSUM_BYTES * (FLETCHER32 in applied)
        if DEFLATE not in applied and chunk.size != expected:
            return f"a chunk has {chunk.size:,} bytes in the file where {expected:,} are expected"
        if DEFLATE in applied and chunk.size <= CHECKSUM_BYTES:
            return "a chunk is too short"
    return ""


def _shuffled_item(dataset: Dataset) -> int:
    """The item size in bytes that the shuffle filter of a dataset uses."""
    values = next((values for code, values in dataset.filters if code == SHUFFLE), (1,))
    return values[0] if values else 0


def _applied_filters(dataset: Dataset, chunk: Chunk) -> tuple[int, ...]:
    """The filters that were applied to a chunk; HDF5 writers skip a filter that fails."""
    return tuple(code for place, (code, _) in enumerate(dataset.filters) if not chunk.skipped >> place & 1)


def _block(name: str, dataset: Dataset, chunk: Chunk, checksums: tuple[Checksum, ...]) -> Block:
    """One chunk as a block, without the elements beyond the dataset's edge."""
    sizes = zip(dataset.chunk, dataset.shape, chunk.start, strict=True)
    shape: Shape = tuple(min(step, n - at) for step, n, at in sizes)
    filters, stored = _applied_filters(dataset, chunk), chunk.size
    if filters and filters[-1] == FLETCHER32:
        filters, stored = filters[:-1], stored - CHECKSUM_BYTES
        checksums = (ChunkChecksum("", chunk.offset, stored, repr(name)), *checksums)
    packing = None
    if filters:
        size = math.prod(dataset.chunk) * ITEM_SIZES[dataset.dtype]
        packing = ChunkPacking(filters, size, _shuffled_item(dataset), repr(name))
    return Block(
        "", chunk.offset, chunk.start, shape, c_strides(dataset.chunk), packing, stored if packing else 0, checksums
    )
