"""``.pt`` and ``.pth`` files of ``torch.save``: a zip with ``data.pkl`` and one record of raw bytes for every storage.

Records are stored uncompressed, so an element is at a fixed byte. Views that share a storage are separate tensors
of the same bytes. Numbers (a learning rate) are in ``data.pkl``: floats can be edited there, integers are only listed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from unsilent.basics.errors import UsageError
from unsilent.basics.pickle_values import ByteString, Float, PickleDamaged, read_pickle
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint_files import MOST_METADATA, CheckpointFiles
from unsilent.checkpoints.formats.torch_pickle import KeyPath, Leaf, PickledObject, PickledTensor, leaves
from unsilent.checkpoints.names import unique_names, with_parameter_names
from unsilent.checkpoints.stored_tensors import ITEM_SIZES, OBJECT, Block, StoredTensor
from unsilent.checkpoints.zip_directory import STORED, ZipDirectory, ZipEntry

NAME = "torch.save"
_PICKLE = "data.pkl"
_CONSTANTS = "constants.pkl"
"""A record that only TorchScript writes: a module, whose attributes are its parameters, buffers and modules."""
_MAGIC = b"PK\x03\x04"
_VERSIONS = range(1, 11)


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a zip file of ``torch.save``."""
    if files.is_folder or files.size("") < 4 or files.read("", 0, 4) != _MAGIC:
        return False
    return any(name.endswith(f"/{_PICKLE}") for name in ZipDirectory(files, "").names)


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors and numbers of the file."""
    return with_names(read_archive(files, "")[1])


class ArchiveValue(NamedTuple):
    """A value in an archive, with the keys that lead to it.

    Attributes:
        path: The keys that lead to it.
        is_tensor: Whether it is a tensor; otherwise it is a number or bytes of the pickle itself.
        stored: The value, named by its keys.
    """

    path: KeyPath
    is_tensor: bool
    stored: StoredTensor


def with_names(values: Sequence[ArchiveValue], in_order: bool = True) -> list[StoredTensor]:
    """The values with names made from their keys, which are the same in every format.

    The parameter numbers in an optimizer's groups are left out if they are consecutive, as in torch; the first number of each
    later group stays, because it shows where the group begins.

    Args:
        values: All values of the checkpoint.
        in_order: Whether the model's values are in its order, so that an optimizer's numbers can be replaced by parameter names.
    """
    shapes = [value.stored.shape if value.is_tensor else None for value in values]
    names: Sequence[str] = unique_names([value.path for value in values], shapes)
    if in_order:
        names = with_parameter_names(names, shapes, [value.stored.value for value in values])
    return [replace(value.stored, name=name) for name, value in _without_numbering(zip(names, values, strict=True))]


def _without_numbering(named: Iterable[tuple[str, ArchiveValue]]) -> Iterator[tuple[str, ArchiveValue]]:
    expected: Counter[KeyPath] = Counter()
    for name, value in named:
        above = value.path[:-3]
        is_numbering = value.path[-2:-1] == ("params",) and above[-1:] == ("param_groups",)
        if is_numbering and value.stored.value == expected[above] and not value.is_tensor:
            if value.path[-1] == "0" and expected[above]:
                yield name, value
            expected[above] += 1
        else:
            expected[above] = -1 if is_numbering else expected[above]
            yield name, value


def read_archive(
    files: CheckpointFiles, file: str, start: int = 0, size: int | None = None
) -> tuple[Any, list[ArchiveValue]]:
    """Read an archive of ``torch.save``: the pickled object and all of its values.

    The archive may be part of a larger file.

    Args:
        files: The checkpoint's files.
        file: The file that is or contains the archive.
        start, size: The archive's bytes within that file; by default all.

    Returns:
        The pickled object, made of the records of `unsilent.basics.pickle_values`, and its values in their order.

    Raises:
        UsageError: it is not such an archive, or it is damaged.
    """
    archive = ZipDirectory(files, file, start, size)
    where = files.shown(file)
    pickle = next((entry for name, entry in archive.entries.items() if name.endswith(f"/{_PICKLE}")), None)
    if pickle is None:
        raise UsageError(f"{where} is a zip file without {_PICKLE}; expected one written by torch.save")
    folder = pickle.name.removesuffix(_PICKLE)
    if folder.count("/") != 1 or not all(name.startswith(folder) for name in archive.entries):
        raise UsageError(f"{where} has records outside of the folder of {_PICKLE}, which torch refuses; it is damaged")
    big_endian = _checked_records(archive, folder, where).get("byteorder") == b"big"
    try:
        content = archive.content(pickle, "the description of tensors")
        if big_endian and b"_rebuild_tensor_v3" in content:  # torch does not swap these, as their storage has no type
            advice = "load it where it was saved, and save it again"
            raise UsageError(f"{where} has tensors in two orders of bytes; {advice}")
        root, _ = read_pickle(content)
        pickled = list(leaves(root, where, len(content)))
    except PickleDamaged as error:
        raise UsageError(f"{where}: {pickle.name!r} cannot be read: {error}; the file is damaged") from None
    is_script = f"{folder}{_CONSTANTS}" in archive.entries
    values = []
    for path, leaf in pickled:
        name = "/".join(path)
        if isinstance(leaf, PickledTensor):
            path = (".".join(path),) if is_script else path  # the name in the module's state dict
            values.append(ArchiveValue(path, True, _tensor(name, leaf, archive, folder, big_endian, where)))
        else:
            values.append(ArchiveValue(path, False, number(name, leaf, pickle)))
    if is_script:
        values.append(ArchiveValue(("code and constants",), False, _code_and_constants(archive, folder, files)))
    return root, values


def _code_and_constants(archive: ZipDirectory, folder: str, files: CheckpointFiles) -> StoredTensor:
    """All records of a TorchScript archive besides its tensors, as one value that is compared by a hash."""
    parts = {name.removeprefix(folder): entry for name, entry in archive.entries.items()}
    others = {name: parts[name] for name in sorted(parts) if not name.startswith(("data/", _PICKLE))}
    fingerprint = ""
    if sum(entry.size for entry in others.values()) <= MOST_METADATA:
        result = hashlib.sha256()
        for name, entry in others.items():
            result.update(f"{len(name)} {name} {entry.size} ".encode("utf-8", "backslashreplace"))
            result.update(files.read(entry.file, entry.offset, entry.size))
        fingerprint = result.hexdigest()
    return StoredTensor("", OBJECT, (), (), obstacle="code and constants are not read", fingerprint=fingerprint)


def _checked_records(archive: ZipDirectory, folder: str, where: str) -> dict[str, bytes]:
    """The records with torch's settings, such as the version.

    Raises ``UsageError`` for settings that torch refuses.
    """
    names = ("version", "byteorder", ".format_version", ".storage_alignment")
    entries = {name: archive.entries[folder + name] for name in names if folder + name in archive.entries}
    records = {name: archive.content(entry, "a setting of torch") for name, entry in entries.items()}
    numbers = {name: value.strip() for name, value in records.items() if name != "byteorder"}
    version = numbers.get("version", b"")
    if records.get("byteorder", b"little") not in (b"little", b"big"):
        raise UsageError(f"{where} has the order of bytes {ascii(records['byteorder'])[:20]}; expected little or big")
    if not all(value.isdigit() and len(value) < 10 for value in numbers.values()) or int(version or 0) not in _VERSIONS:
        raise UsageError(
            f"{where} has no version from {_VERSIONS[0]} to {_VERSIONS[-1]} that torch reads; it is damaged"
        )
    return records


def number(name: str, leaf: Leaf, pickle: ZipEntry | None) -> StoredTensor:
    """A number that is stored in the pickle itself, or an object that is not read."""
    if isinstance(leaf, Float) and pickle is not None:
        block = Block(pickle.file, pickle.offset + leaf.offset, (), (), (), checksums=(pickle.checksum,))
        return StoredTensor(name, "float64", (), (block,), big_endian=True, stored_as=name, value=leaf.value)
    if isinstance(leaf, ByteString) and pickle is not None:
        shape = (len(leaf.value),)
        block = Block(pickle.file, pickle.offset + leaf.offset, (0,), shape, (1,), checksums=(pickle.checksum,))
        return StoredTensor(name, "uint8", shape, (block,), stored_as=name)
    if isinstance(leaf, PickledObject):
        return _unread(name, f"{escape_unprintable(leaf.kind)[:100]} is not read", leaf.fingerprint)
    if isinstance(leaf, ByteString):
        return _unread(name, "bytes that are not read", hashlib.sha256(leaf.value).hexdigest())
    if isinstance(leaf, int) and leaf.bit_length() >= 64:
        content = leaf.to_bytes(leaf.bit_length() // 8 + 1, signed=True)
        return _unread(name, "an integer of 64 bits or more is not read", hashlib.sha256(content).hexdigest())
    assert not isinstance(leaf, PickledTensor)
    plain = leaf.value if isinstance(leaf, Float) else leaf
    kind = {bool: "bool", int: "int64", float: "float64"}[type(plain)]
    reason = "not a floating-point number; only these can be edited in the pickle"
    return StoredTensor(name, kind, (), (), stored_as=name, obstacle=reason, value=plain)


def _unread(name: str, reason: str, fingerprint: str) -> StoredTensor:
    return StoredTensor(name, OBJECT, (), (), stored_as=name, obstacle=reason, fingerprint=fingerprint)


def listed_tensor(name: str, leaf: PickledTensor, reason: str) -> StoredTensor:
    """A tensor whose elements cannot be read, with the reason."""
    return StoredTensor(name, leaf.dtype, leaf.shape, (), stored_as=name, obstacle=reason)


def _tensor(
    name: str, leaf: PickledTensor, archive: ZipDirectory, folder: str, big_endian: bool, where: str
) -> StoredTensor:
    entry = archive.entries.get(f"{folder}data/{leaf.storage}")
    if entry is None:
        raise UsageError(f"{where} has no record {ascii(leaf.storage)[:40]} for {name!r}; the file is damaged")
    if entry.method != STORED:
        return listed_tensor(name, leaf, "its record is compressed, which torch.save never does")
    if entry.size != leaf.storage_size and leaf.dtype:
        raise UsageError(
            f"{where}: the record {entry.name!r} has {entry.size:,} bytes, {_PICKLE} says {leaf.storage_size:,}; it is damaged"
        )
    item = ITEM_SIZES.get(leaf.dtype, 0)
    if leaf.obstacle or not item:
        return listed_tensor(name, leaf, leaf.obstacle or f"dtype {leaf.dtype or 'unknown'} is not known")
    block = Block(
        entry.file, entry.offset + leaf.offset * item, (0,) * len(leaf.shape), leaf.shape, leaf.strides,
        checksums=(entry.checksum,),
    )  # fmt: skip
    if (leaf.offset + block.last_element + 1) * item > entry.size:
        raise UsageError(f"{where}: {name!r} reaches beyond its record {entry.name!r}; the file is damaged")
    return StoredTensor(name, leaf.dtype, leaf.shape, (block,), big_endian=big_endian, stored_as=name)
