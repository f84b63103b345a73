"""``.pt`` and ``.pth`` files of ``torch.save``: a zip with ``data.pkl`` and one record of raw bytes for every storage.

Records are stored as they are, so an element is at a fixed byte. Views that share a storage are separate tensors
of the same bytes. Numbers (a learning rate) are in ``data.pkl``: floats can be edited there, integers are only listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.torch_pickle import KeyPath, Leaf, PickledTensor, leaves
from unsilent.checkpoints.names import optimizer_names, unique_names
from unsilent.checkpoints.stored_tensors import ITEM_SIZES, Block, StoredTensor
from unsilent.checkpoints.zip_directory import STORED, ZipDirectory, ZipEntry
from unsilent.errors import UsageError
from unsilent.pickle_values import ByteString, Float, PickleDamaged, read_pickle

NAME = "torch.save"
_PICKLE = "data.pkl"
_MAGIC = b"PK\x03\x04"


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is such a file."""
    if files.is_folder or files.size("") < 4 or files.read("", 0, 4) != _MAGIC:
        return False
    return any(name.endswith(f"/{_PICKLE}") for name in ZipDirectory(files, "").entries)


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors and numbers of the file."""
    return with_optimizer_names(with_names(read_archive(files, "")[1]))


class ArchiveValue(NamedTuple):
    """A value of an archive, before it has a name.

    Attributes:
        path: The keys that lead to it.
        is_tensor: Whether it is a tensor; else it is a number or bytes of the pickle itself.
        stored: The value, named by its keys.
    """

    path: KeyPath
    is_tensor: bool
    stored: StoredTensor


def with_names(values: Sequence[ArchiveValue]) -> list[StoredTensor]:
    """The values with the names that their keys give them in every format.

    The parameters of a group, as an optimizer numbers them, are left out: they are no state of the training.
    """
    values = [value for value in values if value.is_tensor or value.path[-2:-1] != ("params",)]
    names = unique_names([value.path for value in values], [not value.is_tensor for value in values])
    return [replace(value.stored, name=name) for name, value in zip(names, values, strict=True)]


def read_archive(
    files: CheckpointFiles, file: str, start: int = 0, size: int | None = None
) -> tuple[Any, list[ArchiveValue]]:
    """What one archive of ``torch.save`` pickles, and all of its values; it may lie inside of a larger file.

    Args:
        files: The checkpoint.
        file: The file in it that is or holds the archive.
        start, size: The archive's bytes within that file; by default all.

    Returns:
        The pickled object, made of the records of `unsilent.pickle_values`, and its values in their order.

    Raises:
        UsageError: it is no such archive, or damaged.
    """
    archive = ZipDirectory(files, file, start, size)
    where = files.shown(file)
    pickle = next((entry for name, entry in archive.entries.items() if name.endswith(f"/{_PICKLE}")), None)
    if pickle is None:
        raise UsageError(f"{where} is a zip file without {_PICKLE}; expected one written by torch.save")
    folder = pickle.name.removesuffix(_PICKLE)
    order = archive.entries.get(f"{folder}byteorder")
    big_endian = order is not None and archive.content(order, "the order of bytes") == b"big"
    try:
        content = archive.content(pickle, "the description of tensors")
        root, _ = read_pickle(content)
        found = list(leaves(root, where, len(content)))
    except PickleDamaged as error:
        raise UsageError(f"{where}: {pickle.name!r} cannot be read: {error}; the file is damaged") from None
    values = []
    for path, leaf in found:
        name = "/".join(path)
        if isinstance(leaf, PickledTensor):
            values.append(ArchiveValue(path, True, _tensor(name, name, leaf, archive, folder, big_endian, where)))
        else:
            values.append(ArchiveValue(path, False, number(name, name, leaf, pickle)))
    return root, values


def with_optimizer_names(values: list[StoredTensor]) -> list[StoredTensor]:
    """The values, with the names of parameters in place of an optimizer's numbers where they are certain."""
    new = optimizer_names([value.name for value in values], {value.name: value.shape for value in values})
    taken = {value.name for value in values}
    new = {old: name for old, name in new.items() if name not in taken}
    return [replace(value, name=new[value.name]) if value.name in new else value for value in values]


def number(name: str, stored_as: str, leaf: Leaf, pickle: ZipEntry | None) -> StoredTensor:
    """A number that stands in the pickle itself."""
    if isinstance(leaf, Float) and pickle is not None:
        block = Block(pickle.file, pickle.offset + leaf.offset, (), (), (), checksums=(pickle.checksum,))
        return StoredTensor(name, "float64", (), (block,), big_endian=True, stored_as=stored_as, value=leaf.value)
    if isinstance(leaf, ByteString) and pickle is not None:
        shape = (len(leaf.value),)
        block = Block(pickle.file, pickle.offset + leaf.offset, (0,), shape, (1,), checksums=(pickle.checksum,))
        return StoredTensor(name, "uint8", shape, (block,), stored_as=stored_as)
    plain = leaf.value if isinstance(leaf, Float) else leaf
    kind = {bool: "bool", int: "int64", float: "float64"}.get(type(plain), "uint8")
    reason = "not a floating-point number; only these can be edited in the pickle"
    shown = plain if isinstance(plain, float) or (isinstance(plain, int) and plain.bit_length() < 64) else None
    return StoredTensor(name, kind, (), (), stored_as=stored_as, obstacle=reason, value=shown)


def _tensor(
    name: str, stored_as: str, leaf: PickledTensor, archive: ZipDirectory, folder: str, big_endian: bool, where: str
) -> StoredTensor:
    entry = archive.entries.get(f"{folder}data/{leaf.storage}")
    if entry is None:
        raise UsageError(f"{where} has no record {ascii(leaf.storage)[:40]} for {name!r}; the file is damaged")
    if entry.method != STORED:
        reason = "its record is compressed, which torch.save never does"
        return StoredTensor(name, leaf.dtype, leaf.shape, (), stored_as=stored_as, obstacle=reason)
    item = ITEM_SIZES.get(leaf.dtype, 0)
    block = Block(
        entry.file, entry.offset + leaf.offset * item, (0,) * len(leaf.shape), leaf.shape, leaf.strides,
        checksums=(entry.checksum,),
    )  # fmt: skip
    if (leaf.offset + block.last_element + 1) * item > entry.size:
        raise UsageError(f"{where}: {name!r} reaches beyond its record {entry.name!r}; the file is damaged")
    return StoredTensor(name, leaf.dtype, leaf.shape, (block,), big_endian=big_endian, stored_as=stored_as)
