"""Reader of the ``.metadata`` file of ``torch.distributed.checkpoint``: the chunks of each tensor and their positions.

The file is a pickle of dataclasses (torch 2.13: ``torch/distributed/checkpoint/metadata.py``), which is read without being
unpickled. Everything is checked: shapes, chunks that fill their tensor, and places inside of the folder's files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.pickle_values import Call, Mapped, Name, PickleDamaged, read_pickle
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.torch_pickle import MOST_LEAVES, size_values
from unsilent.checkpoints.stored_tensors import Shape

METADATA = ".metadata"
ENDING = ".distcp"
_MOST_COMPARED = 1024
"""Largest number of chunks of a tensor that are all compared with each other."""


class Slice(NamedTuple):
    """The byte range of one chunk of a tensor, or of another value, in a file."""

    file: str
    offset: int
    length: int
    is_transformed: bool


class TensorRecord(NamedTuple):
    """A tensor as described in the metadata; each chunk is a pair of offsets and sizes."""

    dtype: str
    shape: Shape
    chunks: list[tuple[Shape, Shape]]


class Metadata(NamedTuple):
    """The content of a ``.metadata`` file.

    Attributes:
        values: Keys that lead to a value, and its description, by its name; None: it is not a tensor.
        slices: Position of a value, by its name and its offsets in the tensor; None: it is not a tensor.
    """

    values: dict[str, tuple[tuple[str, ...], TensorRecord | None]]
    slices: dict[tuple[str, Shape | None], Slice]


def read_metadata(files: CheckpointFiles) -> Metadata:
    """Read a folder's metadata and check them against its files.

    Raises ``UsageError`` if they are damaged.
    """
    if METADATA not in files.names():
        raise UsageError(
            f"{files.root} has {ENDING} files but no {METADATA}; the save was not finished, or every rank saved on its own"
        )
    where = files.shown(METADATA)
    try:
        root, _ = read_pickle(files.read_all(METADATA, "the metadata of a checkpoint"))
        result = _metadata_from_fields(_fields(root, "Metadata"))
    except (PickleDamaged, ValueError) as error:
        raise UsageError(f"{where} cannot be read: {error}; it is damaged, or was not written by torch") from None
    used = sorted(result.slices.values())
    for place in used:
        if place.offset + place.length > files.size(place.file):
            raise UsageError(
                f"{files.shown(place.file)} ends at byte {files.size(place.file):,}, but {METADATA} names bytes up to "
                f"{place.offset + place.length:,}; the file is truncated, or of another save"
            )
    for first, second in itertools.pairwise(used):
        overlap = first.file == second.file and second.offset < first.offset + first.length
        if overlap and not (first.offset == second.offset and is_safetensors(files, second)):
            raise UsageError(f"{where} names parts of {ascii(first.file)[:80]} that overlap; it is damaged")
    return result


def is_safetensors(files: CheckpointFiles, place: Slice) -> bool:
    """Whether a file has the header of a safetensors file at a slice's offset."""
    if files.size(place.file) - place.offset < 9:
        return False
    head = files.read(place.file, place.offset, 9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= files.size(place.file) - place.offset - 8


def _metadata_from_fields(fields: Mapped) -> Metadata:
    described, places, paths = fields.get("state_dict_metadata"), fields.get("storage_data"), fields.get("planner_data")
    if not isinstance(described, Mapped) or not isinstance(places, Mapped):
        raise ValueError("it has no state_dict_metadata or storage_data")
    if len(described.items) + len(places.items) > MOST_LEAVES:
        raise ValueError(f"it has more than {MOST_LEAVES:,} entries")
    path_of = dict(_paths(paths)) if isinstance(paths, Mapped) else {}
    values, chunks = {}, 0
    for name, record in described.items:
        if not isinstance(name, str) or not isinstance(record, Call):
            raise ValueError("a value has no name or no description")
        is_tensor = isinstance(record.function, Name) and record.function.name == "TensorStorageMetadata"
        tensor = _tensor_record(record, name) if is_tensor else None
        values[name] = (path_of.get(name, (name,)), tensor)
        chunks += len(tensor.chunks) if tensor else 0
        if chunks > MOST_LEAVES:  # a small pickle can refer to one list many times
            raise ValueError(f"it has more than {MOST_LEAVES:,} chunks")
    slices = {}
    for key, place in places.items:
        index = _fields(key, "MetadataIndex")
        offset = index.get("offset")
        name = index.get("fqn")
        if not isinstance(name, str):
            raise ValueError("a place belongs to no value")
        slices[name, None if offset is None else size_values(offset)] = _slice(_fields(place, "_StorageInfo"))
    return Metadata(values, slices)


def _paths(planner_data: Mapped) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each value with the keys that lead to it in the saved state."""
    for name, keys in planner_data.items:
        if isinstance(name, str) and isinstance(keys, tuple) and keys and all(type(key) in (str, int) for key in keys):
            yield name, tuple(str(key)[:500] for key in keys)


def _tensor_record(record: Call, name: str) -> TensorRecord:
    fields = _fields(record, "TensorStorageMetadata")
    properties, chunks = fields.get("properties"), fields.get("chunks")
    state = properties.state if isinstance(properties, Call) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Name) or dtype.module != "torch" or not isinstance(chunks, list):
        raise ValueError(f"{ascii(name)[:60]} has no dtype or no chunks")
    shape = size_values(fields.get("size"))
    boxes = []
    for chunk in chunks:
        parts = _fields(chunk, "ChunkStorageMetadata")
        boxes.append((size_values(parts.get("offsets")), size_values(parts.get("sizes"))))
    if not _tile(shape, boxes):
        raise ValueError(f"the chunks of {ascii(name)[:60]} overlap or leave elements out")
    return TensorRecord(escape_unprintable(dtype.name)[:20], shape, boxes)


def _tile(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> bool:
    """Whether boxes (offsets, sizes) fill a shape without overlap."""
    boxes = [box for box in boxes if math.prod(box[1])]
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if any(start + size > length for start, size, length in zip(offsets, sizes, shape, strict=True)):
            return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    if not 1 < len(boxes) <= _MOST_COMPARED:
        return True
    first = np.array([offsets for offsets, _ in boxes], np.int64).reshape(len(boxes), len(shape))
    end = first + np.array([sizes for _, sizes in boxes], np.int64).reshape(first.shape)
    overlap = ((first[:, None] < end[None]) & (first[None] < end[:, None])).all(axis=-1)
    return int(overlap.sum()) == len(boxes)


def _slice(fields: Mapped) -> Slice:
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if not isinstance(file, str) or not file or any(type(n) is not int or not 0 <= n < 2**62 for n in (offset, length)):
        raise ValueError("a place is no file, offset and length")
    return Slice(file, offset, length, bool(fields.get("transform_descriptors")))


def _fields(record: Any, kind: str) -> Mapped:
    """The attributes of a pickled record, which must be of the given class."""
    if not isinstance(record, Call) or not isinstance(record.function, Name) or record.function.name != kind:
        raise ValueError(f"expected a {kind}")
    if not isinstance(record.state, Mapped):
        raise ValueError(f"a {kind} has no attributes")
    return record.state
