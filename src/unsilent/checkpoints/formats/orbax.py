"""Folders of Orbax (JAX), whose values are listed but neither read nor edited.

Follows Orbax 0.12.8: ``_METADATA`` is JSON with the keys of every value. Elements are in compressed chunks, in files of OCDBT
(``manifest.ocdbt``) or one zarr array for each value, so they are not at fixed bytes. For OCDBT, ``_METADATA`` has no dtypes, and
only the shapes of the written shards; zarr arrays have both. A step of a ``CheckpointManager`` has one such folder for each item.
Orbax does not notice faults in them: of 60 single bit flips in the chunk of a float32 array, none caused an error when it was
restored, 45 changed one element and 15 changed many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import parse_json
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.torch_pickle import MOST_DEPTH, MOST_LEAVES, size_values
from unsilent.checkpoints.formats.torch_zip import ArchiveValue, with_names
from unsilent.checkpoints.stored_tensors import ITEM_SIZES, Shape, StoredTensor

NAME = "Orbax"
_METADATA = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
_MANIFEST = "manifest.ocdbt"
_MOST_ARRAY = 2**20
_SECTIONS = {"opt_state": "optimizer"}
"""Keys that JAX programs use for a section -> keys that `unsilent.checkpoints.names` knows."""
_ZARR_DTYPES = {
    "f2": "float16", "f4": "float32", "f8": "float64", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8",
    "u2": "uint16", "u4": "uint32", "u8": "uint64", "b1": "bool", "c8": "complex64", "c16": "complex128",
}  # fmt: skip
_AGAIN = "restore it and save it again with torch.save or as safetensors"
_OCDBT = f"Orbax stored it in compressed OCDBT frames, and the shape is that of one shard; {_AGAIN}"
_ZARR = f"Orbax stored it in compressed zarr chunks; {_AGAIN}"


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is an Orbax folder, or a step folder of its ``CheckpointManager``."""
    return files.is_folder and bool({_METADATA, _STEP, _MANIFEST} & set(files.names()))


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All arrays and numbers."""
    if _METADATA in files.names():
        return with_names(list(_values(files, "", ())))
    items = _items(files) if _STEP in files.names() else []
    if not items:
        raise UsageError(
            f"{files.root} has no {_METADATA} that says what it holds; restore it with Orbax and save it with torch.save"
        )
    return with_names([value for name, path in items for value in _values(files, name, path)])


def _items(files: CheckpointFiles) -> list[tuple[str, tuple[str, ...]]]:
    """The folders of a step that hold arrays, each with a slash at its end, and the keys for their values."""
    described = _json(files, _STEP).get("item_handlers")
    names = [name for name in described if isinstance(name, str) and name] if isinstance(described, dict) else []
    names = [name for name in names if files.has(f"{name}/{_METADATA}")]
    return [(f"{name}/", () if name == "default" else (name,)) for name in names]


def _values(files: CheckpointFiles, folder: str, above: tuple[str, ...]) -> Iterator[ArchiveValue]:
    metadata = _json(files, folder + _METADATA)
    entries, is_zarr = metadata.get("tree_metadata"), metadata.get("use_ocdbt") is False
    try:
        if not isinstance(entries, dict) or len(entries) > MOST_LEAVES:
            raise TypeError("it has no tree_metadata")
        records = [_record(entry) for entry in entries.values()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damage_error(files, folder + _METADATA, error) from None
    for keys, kind, shape in records:
        if kind == "None":
            continue
        dtype, stored_as = "", ".".join(keys)
        if is_zarr:
            dtype, shape = _zarr(files, folder + stored_as, shape)
        path = (*above, _SECTIONS.get(keys[0], keys[0]), *keys[1:])
        value = StoredTensor(stored_as, dtype, shape, (), stored_as=stored_as, obstacle=_ZARR if is_zarr else _OCDBT)
        yield ArchiveValue(path, kind != "scalar", value)


def _record(entry: Any) -> tuple[tuple[str, ...], str, Shape]:
    """Keys, kind and shape of a value in the metadata."""
    keys = tuple(str(part["key"])[:500] for part in entry["key_metadata"])
    if not 0 < len(keys) <= MOST_DEPTH:
        raise ValueError("a value has no keys")
    about = entry["value_metadata"]
    return keys, str(about["value_type"]), size_values(about.get("write_shape") or ())


def _zarr(files: CheckpointFiles, folder: str, shape: Shape) -> tuple[str, Shape]:
    """Dtype and shape of a zarr array of version 2 or 3; an empty dtype and ``shape`` if it has no description."""
    for name, key in ((f"{folder}/.zarray", "dtype"), (f"{folder}/zarr.json", "data_type")):
        if files.has(name):
            about = _json(files, name, _MOST_ARRAY)
            dtype = str(about.get(key))[:40]
            dtype = _ZARR_DTYPES.get(dtype.lstrip("<>|="), dtype)
            try:
                return dtype if dtype in ITEM_SIZES else "", size_values(about.get("shape"))
            except ValueError as error:
                raise _damage_error(files, name, error) from None
    return "", shape


def _json(files: CheckpointFiles, name: str, most: int | None = None) -> dict[str, Any]:
    if most is not None and files.size(name) > most:
        raise _damage_error(files, name, ValueError(f"it has {files.size(name):,} bytes"))
    try:
        result = parse_json(files.read_all(name, "the metadata of a checkpoint"))
        if not isinstance(result, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise _damage_error(files, name, error) from None
    return result


def _damage_error(files: CheckpointFiles, name: str, error: Exception) -> UsageError:
    reason = ascii(str(error))[1:60]
    return UsageError(
        f"{files.shown(name)} is no metadata of Orbax: {reason}; it is damaged, copy the checkpoint again"
    )
