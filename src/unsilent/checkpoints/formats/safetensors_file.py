"""``.safetensors`` files, and folders with an index of several: a length, a JSON header, then the bytes of every tensor.

Format: https://github.com/huggingface/safetensors (version 0.8 of its README): 8 bytes length, little endian; at most 100 MB of
header; ``data_offsets`` from the end of the header; C order, little endian; no checksum.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.names import unique_names
from unsilent.checkpoints.stored_tensors import ITEM_SIZES, StoredTensor, dense_block
from unsilent.errors import UsageError
from unsilent.printable import escape_unprintable

NAME = "safetensors"
_MOST_HEADER = 100_000_000
_INDEX = ".safetensors.index.json"
_ENDING = ".safetensors"
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32", "U64": "uint64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip


def matches(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is such a file, or a folder of them."""
    if files.is_folder:
        return any(name.endswith((_INDEX, _ENDING)) for name in files.names())
    size = files.size("")
    if size < 9 or files.read("", 8, 1) not in (b"{", b" "):
        return False
    return 2 <= int.from_bytes(files.read("", 0, 8), "little") <= size - 8


def tensors(files: CheckpointFiles) -> list[StoredTensor]:
    """All tensors, those of all files of a folder."""
    if not files.is_folder:
        return _of_file(files, "")
    names = files.names()
    indices = [name for name in names if name.endswith(_INDEX)]
    if len(indices) > 1:
        raise UsageError(
            f"{files.root} has several indices ({escape_unprintable(', '.join(indices[:3]))[:200]}); give one file"
        )
    parts = _indexed(files, indices[0]) if indices else {name: None for name in names if name.endswith(_ENDING)}
    result: dict[str, StoredTensor] = {}
    for part, expected in parts.items():
        for tensor in _of_file(files, part):
            if expected is not None and tensor.stored_as not in expected:
                continue  # the index, which loaders follow, has it elsewhere
            if tensor.name in result:
                raise UsageError(f"{files.root} has {tensor.name!r} in two files; give one file")
            result[tensor.name] = tensor
            if expected is not None:
                expected.discard(tensor.stored_as)
        if expected:
            raise UsageError(f"{files.shown(part)} lacks {ascii(min(expected))[:80]}, which the index says it has")
    return list(result.values())


def _indexed(files: CheckpointFiles, index: str) -> dict[str, set[str] | None]:
    """File -> names of its tensors, from an index."""
    try:
        mapping = json.loads(files.read_all(index, "an index"))["weight_map"]
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
        header = json.loads(files.read(file, 8, length), object_pairs_hook=_distinct)
        records = {name: record for name, record in header.items() if name != "__metadata__"}
        parts = [_checked(record) for record in records.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{where} is no safetensors file: its header is damaged ({ascii(str(error))[:60]})") from None
    names = unique_names([(name,) for name in records], [False] * len(records))
    begin, result, data = 8 + length, [], []
    for name, stored_as, (dtype, shape, first, last) in zip(names, records, parts, strict=True):
        if begin + last > files.size(file):
            raise UsageError(f"{where}: {name!r} ends beyond the end of the file; it is truncated")
        if math.prod(shape) * ITEM_SIZES.get(dtype, 0) != last - first and dtype in ITEM_SIZES:
            raise UsageError(f"{where}: the shape of {name!r} does not fit its {last - first:,} bytes; it is damaged")
        result.append(StoredTensor(name, dtype, shape, (dense_block(file, begin + first, shape),), stored_as=stored_as))
        data.append((first, last, name))
    data.sort()
    for (_, end, name), (start, last, other) in itertools.pairwise(data):
        if start < end and last > start:
            raise UsageError(f"{where}: {name!r} and {other!r} overlap; the file is damaged")
    return result


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _checked(record: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape and bytes of one tensor."""
    first, last = record["data_offsets"]
    shape = tuple(record["shape"])
    if any(type(n) is not int or not 0 <= n < 2**62 for n in (*shape, first, last)) or first > last or len(shape) > 64:
        raise ValueError("a shape or offset is no size")
    if math.prod(shape) >= 2**62:
        raise ValueError("a shape is too large")
    return DTYPES.get(record["dtype"], escape_unprintable(record["dtype"])[:20]), shape, first, last
