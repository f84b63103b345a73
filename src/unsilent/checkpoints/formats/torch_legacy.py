"""Files in the format of ``torch.save`` before torch 1.6, which can be read but not edited.

Follows ``_legacy_save`` of torch 2.13: five pickles (a magic number, the version 1001, the machine, the object, the keys of its
storages), then for each key the number of elements in eight bytes and the elements, least significant byte first. Nothing is
unpickled. Other pickles are refused, because a loader of checkpoints would find no tensors in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.pickle_values import MAGIC, Call, Mapped, Name, Persistent, PickleDamaged, read_pickle
from unsilent.checkpoints.checkpoint_files import MOST_METADATA, CheckpointFiles
from unsilent.checkpoints.formats.torch_pickle import STORAGE_DTYPES, Leaf, PickledTensor, leaves
from unsilent.checkpoints.formats.torch_zip import ArchiveValue, listed_tensor, number, with_names
from unsilent.checkpoints.stored_tensors import ITEM_SIZES, Block, StoredTensor

NAME = "torch.save (legacy)"
_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The magic number, pickled."""
_VERSION = 1001
_FIRST_READ = 2**20
_OBSTACLE = (
    "files of the legacy torch.save are not edited; load the file and save it again with torch.save or as safetensors"
)
_Places = dict[str, tuple[int, int]]
"""Position of the first element of a storage, and its size in bytes, by its key."""


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a legacy file of ``torch.save`` or another pickle."""
    size = 0 if files.is_folder else files.size("")
    if size >= len(_START) and files.read("", 0, len(_START)) == _START:
        return True
    if size <= 2 or files.read("", 0, 1) != MAGIC:
        return False
    return files.read("", 1, 1)[0] <= 5 and files.read("", size - 1, 1) == b"."


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors and numbers of the file."""
    where = files.shown("")
    if files.size("") < len(_START) or files.read("", 0, len(_START)) != _START:
        raise UsageError(
            f"{where} is a pickle that torch.save did not write; load it and save it again with torch.save"
        )
    try:
        root, places = _object_and_places(files)
        pickled = list(leaves(root, where, min(files.size(""), MOST_METADATA)))
    except (PickleDamaged, ValueError) as error:
        raise UsageError(f"{where} cannot be read: {error}; the file is truncated or damaged") from None
    values = []
    for path, leaf in pickled:
        name = "/".join(path)
        if isinstance(leaf, PickledTensor):
            values.append(ArchiveValue(path, True, _tensor(name, leaf, places, where)))
        else:
            values.append(ArchiveValue(path, False, _number(name, leaf)))
    return with_names(values)


def _number(name: str, leaf: Leaf) -> StoredTensor:
    value = number(name, leaf, None)
    return value if value.is_object else replace(value, obstacle=_OBSTACLE)


def _tensor(name: str, leaf: PickledTensor, places: _Places, where: str) -> StoredTensor:
    if leaf.storage not in places:
        raise UsageError(f"{where} has no storage {ascii(leaf.storage)[:40]} for {name!r}; the file is damaged")
    begin, size = places[leaf.storage]
    item = ITEM_SIZES.get(leaf.dtype, 0)
    if leaf.obstacle:
        return listed_tensor(name, leaf, leaf.obstacle)
    block = Block("", begin + leaf.offset * item, (0,) * len(leaf.shape), leaf.shape, leaf.strides)
    if (leaf.offset + block.last_element + 1) * item > size:
        raise UsageError(f"{where}: {name!r} reaches beyond its storage; the file is damaged")
    return StoredTensor(name, leaf.dtype, leaf.shape, (block,), stored_as=name, obstacle=_OBSTACLE)


def _object_and_places(files: CheckpointFiles) -> tuple[Any, _Places]:
    """The pickled object and the file positions of its storages.

    Raises ``ValueError`` if the file is damaged.
    """
    (_, version, _, root, keys), at = _pickles(files)
    if version != _VERSION or not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"it has no list of storages, or is not of version {_VERSION}")
    sizes = dict(_sizes_of_storages(root))
    places: _Places = {}
    for key in keys:
        if key not in sizes:
            raise ValueError("it has a storage that nothing belongs to")
        elements = int.from_bytes(files.read("", at, 8), "little")
        fits = elements and not sizes[key] % elements and sizes[key] // elements in (1, 2, 4, 8, 16)
        if sizes[key] != 0 and not fits:
            raise ValueError(f"a storage of {sizes[key]:,} bytes has {elements:,} elements")
        if at + 8 + sizes[key] > files.size(""):
            raise ValueError("it ends within a storage")
        places[key] = (at + 8, sizes[key])
        at += 8 + sizes[key]
    return root, places


def _pickles(files: CheckpointFiles) -> tuple[list[Any], int]:
    """The five pickles at the start of the file and the offset where they end.

    No more of the file is read than they need.
    """
    most = min(files.size(""), MOST_METADATA)
    length = min(_FIRST_READ, most)
    while True:
        content = files.read("", 0, length)
        values: list[Any] = []
        at = 0
        try:
            while len(values) < 5:
                value, at = read_pickle(content, start=at)
                values.append(value)
        except PickleDamaged:
            if length == most:
                raise
            length = min(8 * length, most)
        else:
            return values, at


def _sizes_of_storages(root: Any) -> Iterator[tuple[str, int]]:
    """Yield key and size in bytes of every storage that the object refers to.

    Raises ``ValueError`` if the file is damaged.
    """
    waiting, seen = [root], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Persistent):
            # The other ones are classes of a model that was saved as a whole.
            if isinstance(value.id, tuple) and value.id[:1] == ("storage",):
                yield _size_of_storage(value)
        elif isinstance(value, (Call, Mapped, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapped):
        return [part for pair in value.items for part in pair]
    if isinstance(value, Call):
        of_items = (part for pair in value.items for part in pair)
        return [value.function, value.arguments, value.state, *value.elements, *of_items]
    return list(value)


def _size_of_storage(storage: Persistent) -> tuple[str, int]:
    match storage.id:
        case ("storage", Name(_, kind), str(key), _, int(numel), None) if kind in STORAGE_DTYPES and 0 <= numel < 2**62:
            return key, numel * ITEM_SIZES[STORAGE_DTYPES[kind]]
    raise ValueError("it names a storage in a way that torch has not written since version 1.0")
