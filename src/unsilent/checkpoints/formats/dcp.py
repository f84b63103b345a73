"""Folders of ``torch.distributed.checkpoint``: a ``.metadata`` file and a ``__RANK_N.distcp`` file or more per rank.

Follows ``FileSystemWriter`` of torch 2.13. ``.metadata`` is a pickle, which is read without being unpickled: it lists the
chunks of every tensor, and for each chunk a file, an offset and a length. This range is a whole archive of ``torch.save`` with
one tensor, so an element is at a fixed byte and the archive's CRC-32 covers it. Other values are such archives too. A replicated
tensor is stored once, by one rank. Torch's reader does not check the content, not even its CRC-32.

Slices that an extension compresses are only listed, and so are slices of ``SerializationFormat.SAFETENSORS``, which torch's own
``FileSystemReader`` cannot load.
"""

from __future__ import annotations

import math
from dataclasses import replace

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.dcp_metadata import (
    ENDING,
    METADATA,
    Metadata,
    TensorRecord,
    is_safetensors,
    read_metadata,
)
from unsilent.checkpoints.formats.torch_zip import ArchiveValue, read_archive, with_names
from unsilent.checkpoints.stored_tensors import Block, StoredTensor

NAME = "torch.distributed.checkpoint"
_QUANTISED = ("qint", "quint")
"""Prefixes of the dtypes of tensors with scales; their archives have several values, as archives of objects do."""
_COMPRESSED = "its parts were transformed by an extension of the writer; save it again without extensions"
_SAFETENSORS = "it was saved with SerializationFormat.SAFETENSORS, which FileSystemReader cannot load; use TORCH_SAVE"


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a folder of ``torch.distributed.checkpoint``, complete or not."""
    return files.is_folder and any(name == METADATA or name.endswith(ENDING) for name in files.names())


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors and numbers of all ranks."""
    metadata = read_metadata(files)
    result: list[ArchiveValue] = []
    for name, (path, record) in metadata.values.items():
        if record is not None and not record.dtype.startswith(_QUANTISED):
            result.append(ArchiveValue(path, True, _tensor(files, name, record, metadata)))
            continue
        for offsets in [None] if record is None else [offsets for offsets, _ in record.chunks]:
            place = metadata.slices.get((name, offsets))
            if place is None:
                raise _missing(files, name)
            if place.is_transformed:
                listed = StoredTensor(name, "uint8", (place.length,), (), stored_as=name, obstacle=_COMPRESSED)
                result.append(ArchiveValue(path, False, listed))
                continue
            for value in read_archive(files, place.file, place.offset, place.length)[1]:
                stored = replace(value.stored, stored_as="/".join((name, *value.path)))
                result.append(value._replace(path=(*path, *value.path), stored=stored))
    return with_names(result)


def _tensor(files: CheckpointFiles, name: str, record: TensorRecord, metadata: Metadata) -> StoredTensor:
    blocks: list[Block] = []
    orders, obstacle = set(), ""
    for offsets, sizes in record.chunks:
        if not math.prod(sizes):
            continue
        place = metadata.slices.get((name, offsets))
        if place is None:
            raise _missing(files, name)
        if place.is_transformed or is_safetensors(files, place):
            blocks, obstacle = [], _COMPRESSED if place.is_transformed else _SAFETENSORS
            break
        _, values = read_archive(files, place.file, place.offset, place.length)
        stored = values[0].stored if len(values) == 1 and values[0].is_tensor else None
        if stored is None or (stored.dtype, stored.shape) != (record.dtype, sizes):
            raise UsageError(
                f"{files.shown(place.file)} does not hold {record.dtype}{list(sizes)} of {name!r} at byte "
                f"{place.offset:,}, as {METADATA} says; the checkpoint is damaged, or its files are of different saves"
            )
        orders.add(stored.big_endian)
        blocks += [replace(block, start=offsets) for block in stored.blocks]
        obstacle = obstacle or stored.obstacle
    if len(orders) > 1:
        raise UsageError(f"{files.root}: parts of {name!r} have different orders of bytes; the checkpoint is damaged")
    big_endian, dtype, shape = orders == {True}, record.dtype, record.shape
    return StoredTensor(name, dtype, shape, tuple(blocks), None, big_endian, stored_as=name, obstacle=obstacle)


def _missing(files: CheckpointFiles, name: str) -> UsageError:
    return UsageError(f"{files.shown(METADATA)} does not say where all of {name!r} is; the save was not finished")
