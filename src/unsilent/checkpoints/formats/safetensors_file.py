"""``.safetensors`` files, and folders with an index of several such files.

Format: https://github.com/huggingface/safetensors (version 0.8 of its README): 8 bytes length, little endian; at most 100 MB of
header; ``data_offsets`` from the end of the header; C order, little endian; no checksum. This module refuses all files that the
loader of that version refuses: tensors must fill the file without holes, and metadata must be text.
"""

from __future__ import annotations

import codecs
import math
from typing import Any, NamedTuple

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import parse_json
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.names import unique_names
from unsilent.checkpoints.stored_tensors import ITEM_SIZES, StoredTensor, dense_block

NAME = "safetensors"
_MOST_HEADER = 100_000_000
_INDEX = ".safetensors.index.json"
_ENDING = ".safetensors"
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "F4", "F6_E2M3": "F6_E2M3", "F6_E3M2": "F6_E3M2",
}  # fmt: skip
"""Torch's names of the dtypes; dtypes of less than a byte have none."""
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_PAIRS = "float4_e2m1fn_x2"
"""Torch's dtype of two elements of F4."""
_FIELDS = {"dtype", "shape", "data_offsets"}


class _Part(NamedTuple):
    """A tensor's entry in the header: dtype, shape, and byte range relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is a ``.safetensors`` file or a folder of them."""
    if files.is_folder:
        return any(name.endswith((_INDEX, _ENDING)) for name in files.names())
    size = files.size("")
    if size < 9 or files.read("", 8, 1) not in (b"{", b" "):
        return False
    return 2 <= int.from_bytes(files.read("", 0, 8), "little") <= size - 8


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors of the file, or of all files in the folder."""
    if not files.is_folder:
        return _of_file(files, "")
    names = files.names()
    indices = [name for name in names if name.endswith(_INDEX)]
    if len(indices) > 1:
        raise UsageError(
            f"{files.root} has several indices ({escape_unprintable(', '.join(indices[:3]))[:200]}); give one file"
        )
    parts = (
        _tensor_names_by_file(files, indices[0])
        if indices
        else {name: None for name in names if name.endswith(_ENDING)}
    )
    result: dict[str, StoredTensor] = {}
    for part, expected in parts.items():
        for tensor in _of_file(files, part):
            if expected is not None and tensor.stored_as not in expected:
                continue  # the index, which loaders use, has it in another file
            if tensor.name in result:
                raise UsageError(f"{files.root} has {tensor.name!r} in two files; give one file")
            result[tensor.name] = tensor
            if expected is not None:
                expected.discard(tensor.stored_as)
        if expected:
            raise UsageError(f"{files.shown(part)} lacks {ascii(min(expected))[:80]}, which the index says it has")
    return list(result.values())


def _tensor_names_by_file(files: CheckpointFiles, index: str) -> dict[str, set[str] | None]:
    """The names of the tensors in each file, from an index."""
    try:
        mapping = parse_json(files.read_all(index, "an index"))["weight_map"]
        result: dict[str, set[str] | None] = {}
        for name, part in mapping.items():
            names = result.setdefault(str(part), set())
            assert names is not None
            names.add(str(name))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{files.shown(index)} is no index of safetensors; expected JSON with weight_map") from None
    return result


def _of_file(files: CheckpointFiles, file: str) -> list[StoredTensor]:
    """The tensors of one file."""
    where = files.shown(file)
    length = int.from_bytes(files.read(file, 0, 8), "little")
    if length > min(_MOST_HEADER, files.size(file) - 8):
        raise UsageError(
            f"{where} is no safetensors file: its header would have {length:,} bytes; it is truncated or damaged"
        )
    try:
        content = files.read(file, 8, length)
        if content.startswith(codecs.BOM_UTF8):
            raise ValueError("it begins with a byte order mark")
        header = parse_json(content, object_pairs_hook=_distinct, parse_int=_whole, parse_constant=_refuse_constant)
        _check_metadata(header.pop("__metadata__", None))
        parts = {name: _checked_header_entry(record) for name, record in header.items()}
        "".join(parts).encode("utf-8")  # half of a surrogate pair is no text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{where} is no safetensors file: its header is damaged ({ascii(str(error))[:60]})") from None
    names = unique_names([(name,) for name in parts], [part.shape for part in parts.values()])
    _check_places(files, file, 8 + length, dict(zip(names, parts.values(), strict=True)))
    named = zip(names, parts.items(), strict=True)
    return [_stored_tensor(file, name, stored_as, 8 + length, part) for name, (stored_as, part) in named]


def _check_places(files: CheckpointFiles, file: str, begin: int, parts: dict[str, _Part]) -> None:
    """Raise ``UsageError`` unless the tensors' byte ranges fit their shapes and fill the file after ``begin``."""
    where, size, end, previous = files.shown(file), files.size(file) - begin, 0, ""
    for name, part in sorted(parts.items(), key=lambda item: (item[1].first, item[1].last)):
        if part.last > size:
            raise UsageError(f"{where}: {name!r} ends beyond the end of the file; it is truncated")
        bits = math.prod(part.shape) * _BITS.get(part.dtype, 8 * ITEM_SIZES.get(part.dtype, 0))
        if bits != 8 * (part.last - part.first):
            raise UsageError(
                f"{where}: the shape of {name!r} does not fit its {part.last - part.first:,} bytes; it is damaged"
            )
        if part.first < end:
            raise UsageError(f"{where}: {previous!r} and {name!r} overlap; the file is damaged")
        if part.first > end:
            raise UsageError(
                f"{where} has {part.first - end:,} bytes before {name!r} that belong to no tensor; the file is damaged"
            )
        end, previous = part.last, name
    if end != size:
        raise UsageError(f"{where} has {size - end:,} bytes behind its last tensor; the file is damaged")


def _stored_tensor(file: str, name: str, stored_as: str, begin: int, part: _Part) -> StoredTensor:
    dtype, shape, offset, size = part.dtype, part.shape, begin + part.first, part.last - part.first
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        dtype, shape = _PAIRS, (*shape[:-1], shape[-1] // 2)
    if dtype in ITEM_SIZES:
        return StoredTensor(name, dtype, shape, (dense_block(file, offset, shape),), stored_as=stored_as)
    block = dense_block(file, offset, (size,))
    return StoredTensor(name, dtype, shape, (block,), stored_as=stored_as, raw_size=size)


def _check_metadata(metadata: Any) -> None:
    """Raise ``ValueError`` unless the metadata map strings to strings."""
    if not isinstance(metadata, (dict, type(None))):
        raise ValueError("its metadata are no map")
    for key, value in (metadata or {}).items():
        if not isinstance(value, str):
            raise ValueError("its metadata hold more than text")
        (key + value).encode("utf-8")


def _whole(text: str) -> int:
    if text.startswith("-"):
        raise ValueError("a number is negative")
    return int(text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _checked_header_entry(record: dict[str, Any]) -> _Part:
    """Dtype, shape and byte range of one tensor, checked.

    Raises ``ValueError``, ``KeyError`` or ``TypeError``.
    """
    if unknown := record.keys() - _FIELDS:
        raise ValueError(f"a tensor has the field {min(unknown)[:20]}")
    first, last = record["data_offsets"]
    shape = tuple(record["shape"])
    if any(type(n) is not int or not 0 <= n < 2**62 for n in (*shape, first, last)) or first > last or len(shape) > 64:
        raise ValueError("a shape or offset is no size")
    if math.prod(shape) >= 2**59:
        raise ValueError("a shape is too large")
    if record["dtype"] not in DTYPES:
        raise ValueError(f"the dtype {record['dtype']} is not known"[:60])
    return _Part(DTYPES[record["dtype"]], shape, first, last)
