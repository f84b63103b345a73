"""The tensors and numbers of what ``torch.save`` pickled, from its records: nested dicts, lists, state dicts, optimizers.

The pickle is read by `unsilent.pickle_values`, so nothing in it is called. What torch would call to make a tensor is known here
by name: ``_rebuild_tensor_v2`` and its like take a storage, an offset, a size and strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from unsilent.checkpoints.stored_tensors import ITEM_SIZES
from unsilent.errors import UsageError
from unsilent.pickle_values import ByteString, Call, Float, Mapped, Name, Persistent
from unsilent.printable import escape_unprintable

MOST_LEAVES = 2_000_000
MOST_DEPTH = 60
_MOST_KEY_PARTS = 20
_TEXT_PER_BYTE = 32
_LEAST_TEXT = 10_000
"""Values, keys and characters of keys for each byte of a pickle, and for a pickle of no bytes."""
STORAGE_DTYPES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128", "QInt8Storage": "int8",
    "QUInt8Storage": "uint8", "QInt32Storage": "int32", "UntypedStorage": "uint8",
}  # fmt: skip
_WRAPPERS = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_TENSORS = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor", "torch._utils._rebuild_qtensor"}
_TENSOR_V3 = "torch._utils._rebuild_tensor_v3"
_SPARSE = "torch._utils._rebuild_sparse_tensor"
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"


class PickledTensor(NamedTuple):
    """A tensor as the pickle describes it.

    Attributes:
        storage: Name of the record with its bytes.
        offset: Of its first element, in elements.
        storage_size: Bytes of the storage, as the pickle says.
    """

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_size: int


Leaf = PickledTensor | Float | ByteString | int | float | bool
KeyPath = tuple[str, ...]


def leaves(root: Any, where: str, pickle_size: int) -> Iterator[tuple[KeyPath, Leaf]]:
    """All tensors and numbers with the keys that lead to them, in the pickle's order.

    Args:
        root: What the pickle holds.
        where: What errors call the file.
        pickle_size: Bytes of the pickle.

    Raises:
        UsageError: there are more values and keys than a pickle of that size has without naming one list many times.
    """
    text_left = _TEXT_PER_BYTE * pickle_size + _LEAST_TEXT
    values_left = MOST_LEAVES
    waiting: list[tuple[KeyPath, Any]] = [((), root)]
    while waiting:
        path, value = waiting.pop()
        leaf = as_leaf(value)
        if leaf is not None:
            yield path, leaf
            continue
        parts: list[tuple[KeyPath, Any]] = []
        for key, part in _parts(value):
            values_left -= 1
            text_left -= 1 + len(path) + len(key)
            if values_left < 0 or text_left < 0 or len(path) >= MOST_DEPTH:
                limit = f"{MOST_DEPTH} levels" if len(path) >= MOST_DEPTH else "the values that its size allows"
                raise UsageError(f"{where} nests more than {limit}; it is damaged, or no checkpoint")
            parts.append(((*path, key), part))
        waiting += reversed(parts)


def as_leaf(value: Any) -> Leaf | None:
    """The tensor or number that a value is; None for containers and all else."""
    if isinstance(value, (bool, int, float, Float, ByteString)):
        return value
    return _tensor(value) if isinstance(value, Call) else None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, by key."""
    if isinstance(value, Mapped):
        for key, part in value.items:
            yield key_text(key), part
    elif isinstance(value, (list, tuple)) and not isinstance(value, (Name, Persistent)):
        for place, part in enumerate(value):
            yield str(place), part
    elif isinstance(value, Call) and value.name == _SPARSE and isinstance(value.arguments, tuple):
        # Its layout, then a tuple of its tensors (COO: indices, values) and its size.
        yield from _parts(value.arguments[1] if len(value.arguments) > 1 else ())
    elif isinstance(value, Call):
        yield from ((key_text(key), part) for key, part in value.items)
        yield from ((str(place), part) for place, part in enumerate(value.elements))
        if isinstance(value.state, Mapped) and value.name != "collections.OrderedDict":
            yield from ((key_text(key), part) for key, part in value.state.items)


def key_text(key: Any) -> str:
    """A key as text; of a tuple, its parts joined by dots. Short for whatever a damaged file has as a key."""
    if isinstance(key, tuple) and not isinstance(key, (Name, Float, ByteString, Persistent)):
        return ".".join(_plain_text(part) for part in key[:_MOST_KEY_PARTS])
    return _plain_text(key)


def _plain_text(key: Any) -> str:
    """A key that is one value as text; of an object only what it is, as it may hold itself."""
    if isinstance(key, (Float, ByteString)):
        key = key.value
    if isinstance(key, Name):
        return f"{key.module}.{key.name}"[:500]
    plain = isinstance(key, (str, float, bytes)) or key is None or (isinstance(key, int) and key.bit_length() < 64)
    return str(key)[:500] if plain else type(key).__name__


def size_values(value: Any) -> tuple[int, ...]:
    """The numbers of a pickled ``torch.Size``, list or tuple of sizes; raises ``ValueError`` for anything else."""
    called = isinstance(value, Call) and value.name == "torch.Size" and isinstance(value.arguments, tuple)
    sizes = value.arguments[0] if called and value.arguments else value
    if not isinstance(sizes, (tuple, list)) or len(sizes) > 64 or any(type(n) is not int for n in sizes):
        raise ValueError("a shape or offset is none")
    if any(not 0 <= n < 2**62 for n in sizes) or math.prod(sizes) >= 2**62:
        raise ValueError("a shape or offset is too large")
    return tuple(sizes)


def _tensor(call: Call) -> PickledTensor | None:
    """The tensor that a call would make; None for any other call."""
    for _ in range(MOST_DEPTH):
        arguments = call.arguments
        if call.name not in _WRAPPERS and call.name != _SUBCLASS:
            break
        inner = arguments[0] if isinstance(arguments, tuple) and arguments else None
        if call.name == _SUBCLASS and isinstance(arguments, tuple) and len(arguments) > 2 and isinstance(inner, Name):
            inner = Call(inner, arguments[2])
        if not isinstance(inner, Call):
            return None
        call = inner
    if call.name not in (*_TENSORS, _TENSOR_V3):
        return None
    match arguments:
        case (
            Persistent(("storage", Name(_, kind), str(key), _, int(numel), *_)),
            int(offset),
            tuple(shape),
            tuple(strides),
            *rest,
        ):
            dtype = STORAGE_DTYPES.get(kind, "")
            size = numel * ITEM_SIZES.get(dtype, 1)
            if call.name == _TENSOR_V3:
                names = [value.name for value in rest if isinstance(value, Name) and value.module == "torch"]
                dtype = escape_unprintable(names[0])[:20] if names else ""
            sizes = (offset, numel, *shape, *strides)
            sound = all(type(n) is int and 0 <= n < 2**62 for n in sizes) and len(shape) == len(strides) <= 64
            if sound and math.prod(shape) < 2**62:
                return PickledTensor(key, dtype, offset, shape, strides, size)
    raise UsageError(f"a tensor is described in a way that torch.save never writes ({call.name}); the file is damaged")
