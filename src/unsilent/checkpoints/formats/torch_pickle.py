"""The tensors and numbers in an object that ``torch.save`` pickled, such as a state dict.

The pickle is read by `unsilent.basics.pickle_values`, so no function in it is called. Functions that torch would call to make a
tensor are recognised by name: ``_rebuild_tensor_v2`` and similar ones take a storage, an offset, a size and strides. The
functions that ``torch.load(weights_only=True)`` calls are treated as follows:

    interpreted   Parameter, _rebuild_parameter(_with_state), _rebuild_tensor(_v2, _v3), _rebuild_qtensor,
                  _rebuild_sparse_tensor, _rebuild_nested_tensor, _rebuild_from_type_v2, storages, OrderedDict, Counter, set,
                  Size; device, dtypes, layouts and quantisation schemes hold no tensor and no number
    not read      classes of tensors and storages that are called themselves, complex, bytearray, bytes as text, layouts by
                  name, _rebuild_meta_tensor_no_storage, _rebuild_wrapper_subclass, _rebuild_device_tensor_from_*
    refused       a state that is set on a tensor or a container other than OrderedDict, and arguments that torch.save
                  does not write

An object that is not read is a leaf as well, `PickledObject`, so that it can be named. So is an object of a class that torch does
not call, except the layers of a model that was pickled as a whole. Its visible parts (items, elements, attributes) are listed as
well.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from unsilent.basics.errors import UsageError
from unsilent.basics.pickle_values import (
    DICTS,
    SETS,
    SIZE,
    ByteString,
    Call,
    Float,
    Mapped,
    Name,
    Persistent,
    PickleDamaged,
)  # fmt: skip
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.stored_tensors import ITEM_SIZES

MOST_LEAVES = 500_000
"""Largest number of tensors and numbers; an optimizer has about four for each of its parameters."""
MOST_DEPTH = 60
_MOST_KEY_PARTS = 20
_TEXT_PER_BYTE = 32
_LEAST_TEXT = 10_000
_MOST_TEXT = 2**26
"""Limits on values, and on characters of the keys that lead to them: per byte of a pickle, in addition, and in total."""
STORAGE_DTYPES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128", "QInt8Storage": "int8",
    "QUInt8Storage": "uint8", "QInt32Storage": "int32", "UntypedStorage": "uint8",
}  # fmt: skip
_WRAPPERS = {
    "torch.nn.parameter.Parameter", "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2",
}  # fmt: skip
_QUANTISED = "torch._utils._rebuild_qtensor"
_TENSOR_V3 = "torch._utils._rebuild_tensor_v3"
_TENSORS = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor", _QUANTISED, _TENSOR_V3}
_SPARSE = "torch._utils._rebuild_sparse_tensor"
_NESTED = "torch._utils._rebuild_nested_tensor"
_WITHOUT_VALUES = {"torch.device"}
_MODULES = "torch.nn.modules."
"""Prefix of the names of torch's layers, which are read by their attributes only, as the user's own layers are."""
_CONTENT = {"data", "real", "imag"}
"""Attributes of a tensor that give its values."""
_MOST_HASHED = 100_000
_MOST_HASHED_DEPTH = 40
"""Largest number of values, and of levels, of an object that is hashed."""


class PickledTensor(NamedTuple):
    """A tensor as described in the pickle.

    Attributes:
        storage: Name of the record with its bytes.
        offset: Position of its first element in the storage, in elements.
        storage_size: Size of the storage in bytes, according to the pickle.
        obstacle: Reason why its values differ from those of its bytes; empty if they do not.
    """

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_size: int
    obstacle: str = ""


class PickledObject(NamedTuple):
    """An object whose content is not read.

    Attributes:
        kind: Name of its class, for messages.
        fingerprint: Hash of its description in the pickle; empty if that is too large, or if tensors belong to it.
    """

    kind: str
    fingerprint: str


Leaf = PickledTensor | PickledObject | Float | ByteString | int | float | bool
KeyPath = tuple[str, ...]


def leaves(root: Any, where: str, pickle_size: int) -> Iterator[tuple[KeyPath, Leaf]]:
    """All tensors and numbers with the keys that lead to them, in the pickle's order.

    Args:
        root: The pickled object.
        where: Name of the file in errors.
        pickle_size: Size of the pickle in bytes.

    Raises:
        UsageError: there are more values and keys than a pickle of that size can have unless it refers to one list many times.
    """
    text_left = min(_TEXT_PER_BYTE * pickle_size + _LEAST_TEXT, _MOST_TEXT)
    values_left = MOST_LEAVES
    left_to_hash = [MOST_LEAVES]
    waiting: list[tuple[KeyPath, Any]] = [((), root)]
    while waiting:
        path, value = waiting.pop()
        leaf, contained = _interpret_value(value)
        if isinstance(leaf, PickledObject):
            leaf = leaf._replace(fingerprint=_hash(value, left_to_hash))
        if leaf is not None:
            yield path, leaf
        parts: list[tuple[KeyPath, Any]] = []
        for key, part in contained:
            values_left -= 1
            inner = (*path, key)
            text_left -= 1 + len(inner) + sum(map(len, inner))
            if values_left < 0 or text_left < 0 or len(path) >= MOST_DEPTH:
                limit = f"{MOST_DEPTH} levels" if len(path) >= MOST_DEPTH else "the values that its size allows"
                raise UsageError(f"{where} nests more than {limit}; it is damaged, or no checkpoint")
            parts.append((inner, part))
        waiting += reversed(parts)


Parts = Iterable[tuple[str, Any]]


def _interpret_value(value: Any) -> tuple[Leaf | None, Parts]:
    """Interpret a value as a tensor, number or other leaf (None for a container), and its parts by key."""
    if isinstance(value, (bool, int, float, Float, ByteString)):
        return value, ()
    if isinstance(value, Mapped):
        return None, _items(value)
    if isinstance(value, Persistent):
        return _storage(value) or PickledObject("something outside of the pickle", ""), ()
    if isinstance(value, Call):
        return _interpret_call(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, Name):
        return None, _items_by_number(value)
    return None, ()  # text, names and None


def _interpret_call(call: Call) -> tuple[Leaf | None, Parts]:
    """Interpret a pickled call or object as a leaf, or as a container of parts."""
    match call.function:
        # A class and its source code, as written by the legacy torch.save.
        case Persistent(("module", Name() as kind, *_)):
            call = replace(call, function=kind)
    name, arguments = call.name, call.arguments
    if name in _WRAPPERS | _TENSORS:
        return _tensor_and_parts(call)
    if name in (_SPARSE, _NESTED) and isinstance(arguments, tuple):
        _without_state(call)
        # A sparse tensor: its layout, then a tuple of its tensors (COO: indices, values) and its size.
        inner = arguments[1:2] if name == _SPARSE else (arguments,)
        return None, _items_by_number(inner[0]) if inner and isinstance(inner[0], tuple) else ()
    if name in DICTS:
        if not _is_metadata(call.state) or (name != "collections.OrderedDict" and call.state is not None):
            return PickledObject(f"the attributes of a {name}", ""), _items(call)
        return None, _items(call)
    if name in SETS | {SIZE}:
        _without_state(call)
        return None, _items_by_number(call.elements)
    if name in _WITHOUT_VALUES:
        return None, ()
    if name == "collections.defaultdict" and call.state is None and _is_names(arguments):
        return None, _items(call)
    attributes = call.state if isinstance(call.state, Mapped) else Mapped()
    parts = itertools.chain(_items(call), _items_by_number(call.elements), _items(attributes))
    is_seen = isinstance(call.function, Name) and arguments == () and isinstance(call.state, (Mapped, type(None)))
    if is_seen and (name.startswith(_MODULES) or not name.startswith(("torch.", "builtins."))):
        return None, parts
    return PickledObject(f"an object of {_plain_text(call.function)}", ""), parts


def _tensor_and_parts(call: Call) -> tuple[Leaf | None, Parts]:
    """The tensor that a call creates, and the numbers and attributes stored with it."""
    attributes: Any = None
    for _ in range(MOST_DEPTH):
        _without_state(call)
        wrapped = _call_of_wrapped_tensor(call)
        if wrapped is None:
            break
        call, attributes = wrapped[0], _attributes(wrapped[1], attributes)
    if call.name not in _TENSORS:
        inner = _interpret_call(call)[1] if call.name in (_SPARSE, _NESTED) else ()
        return PickledObject(f"a tensor made by {_plain_text(call.function)}", ""), inner
    leaf = _tensor(call)
    extra: list[tuple[str, Any]] = []
    if attributes is not None:
        extra.append(("attributes", attributes))
    if call.name == _QUANTISED:
        extra += _quantiser(call)
    return leaf, extra


def _call_of_wrapped_tensor(call: Call) -> tuple[Call, Any] | None:
    """The call that creates the tensor inside of a parameter or subclass, and its attributes; else None."""
    match call.name, call.arguments:
        case "torch._tensor._rebuild_from_type_v2", (Name() as function, _, tuple(arguments), state):
            return Call(function, arguments), state
        case "torch._utils._rebuild_parameter_with_state", (Call() as inner, _, hooks, state) if _are_no_hooks(hooks):
            return inner, state
        case "torch._utils._rebuild_parameter", (Call() as inner, _, hooks) if _are_no_hooks(hooks):
            return inner, None
        case "torch.nn.parameter.Parameter", (Call() as inner,) | (Call() as inner, _):
            return inner, None
    return None


def _quantiser(call: Call) -> Parts:
    match call.arguments[4]:
        case (Name(), scale, zero_point):
            return ("scale", scale), ("zero_point", zero_point)
        case (Name(), Call() as scales, Call() as zero_points, int(axis)):
            return ("scale", scales), ("zero_point", zero_points), ("axis", axis)
    raise _unknown(call)


def _attributes(state: Any, others: Any) -> Any:
    """The attributes of a tensor as a dict.

    Raises ``PickleDamaged`` if they would replace the tensor's values.
    """
    parts = state if isinstance(state, tuple) else (state,)
    items = [item for part in parts for item in (part.items if isinstance(part, (Mapped, Call)) else ())]
    names = {key for key, _ in items if type(key) is str}
    if any(not isinstance(part, (Mapped, type(None))) for part in parts) or _CONTENT & names:
        raise PickleDamaged("a tensor has a state that torch.save does not write")
    known = others.items if others is not None else []
    return Mapped([*known, *items]) if items or known else None


def _without_state(call: Call) -> None:
    has_items = call.items and call.name not in DICTS
    has_elements = call.elements and call.name not in SETS | {SIZE}
    if call.state is not None or has_items or has_elements:
        raise PickleDamaged(f"it changes what {call.name} made, which torch.save does not write")


def _is_metadata(state: Any) -> bool:
    """Whether a dict has no attributes, or only the ``_metadata`` of a state dict."""
    if state is None:
        return True
    if not isinstance(state, Mapped) or [key for key, _ in state.items] not in ([], ["_metadata"]):
        return False
    return all(_holds_plain(value, 0) for _, value in state.items)


def _holds_plain(value: Any, level: int) -> bool:
    """Whether a value is a dict of dicts of plain values."""
    if level == 2:
        return value is None or isinstance(value, (str, int, Float))
    return isinstance(value, (Mapped, Call)) and all(_holds_plain(part, level + 1) for _, part in value.items)


def _are_no_hooks(value: Any) -> bool:
    return value is None or (isinstance(value, Call) and value.name in DICTS and not value.items)


def _is_names(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, (Name, type(None))) for value in values)


def _items(value: Mapped | Call) -> Parts:
    return ((key_text(key), part) for key, part in value.items)


def _items_by_number(values: Sequence[Any]) -> Parts:
    return ((str(place), part) for place, part in enumerate(values))


def _hash(value: Any, left: list[int]) -> str:
    """The hash of a value's description in the pickle; empty if it contains tensors or is too large."""
    result = hashlib.sha256()
    try:
        _add_to_hash(result, value, left, [_MOST_HASHED], 0)
    except ValueError:
        return ""
    return result.hexdigest()


def _add_to_hash(result: Any, value: Any, *limits: Any) -> None:
    *left, depth = limits
    for each in left:
        each[0] -= 1
    if any(each[0] < 0 for each in left) or depth > _MOST_HASHED_DEPTH or isinstance(value, Persistent):
        raise ValueError("it has no hash")
    parts: list[Any] = []
    if isinstance(value, Mapped):
        parts = list(value.items)
    elif isinstance(value, Call):
        parts = [value.function, value.arguments, value.state, *value.items, None, *value.elements]
    elif isinstance(value, (list, tuple)) and not isinstance(value, (Name, Float, ByteString)):
        parts = list(value)
    else:
        text = repr(value.value if isinstance(value, (Float, ByteString)) else value)
        result.update(f"{len(text)}:{text}".encode("utf-8", "backslashreplace"))
        return
    result.update(f"{type(value).__name__}{len(parts)}(".encode())
    for part in parts:
        _add_to_hash(result, part, *left, depth + 1)


def key_text(key: Any) -> str:
    """A key as short text; the parts of a tuple are joined by dots."""
    if isinstance(key, tuple) and not isinstance(key, (Name, Float, ByteString, Persistent)):
        return ".".join(_plain_text(part) for part in key[:_MOST_KEY_PARTS])
    return _plain_text(key)


def _plain_text(key: Any) -> str:
    """A key that is a single value as text; for an object only a description, because it may contain itself."""
    if isinstance(key, (Float, ByteString)):
        key = key.value
    if isinstance(key, Name):
        return f"{key.module}.{key.name}"[:500]
    plain = isinstance(key, (str, float, bytes)) or key is None or (isinstance(key, int) and key.bit_length() < 64)
    return str(key)[:500] if plain else type(key).__name__


def size_values(value: Any) -> tuple[int, ...]:
    """The sizes in a pickled ``torch.Size``, list or tuple.

    Raises ``ValueError`` for anything else.
    """
    sizes = value.elements if isinstance(value, Call) and value.name == SIZE else value
    if not isinstance(sizes, (tuple, list)) or len(sizes) > 64 or any(type(n) is not int for n in sizes):
        raise ValueError("a shape or offset is none")
    if any(not 0 <= n < 2**62 for n in sizes) or math.prod(sizes) >= 2**62:
        raise ValueError("a shape or offset is too large")
    return tuple(sizes)


def _storage(value: Persistent) -> PickledTensor | None:
    """A storage as a one-dimensional tensor; None if the value is not a storage."""
    match value.id:
        case ("storage", Name(_, kind), str(key), _, int(numel), *_) if type(numel) is int and 0 <= numel < 2**59:
            dtype = STORAGE_DTYPES.get(kind, "")
            return PickledTensor(key, dtype, 0, (numel,), (1,), numel * ITEM_SIZES.get(dtype, 1))
    return None


def _tensor(call: Call) -> PickledTensor:
    """The tensor that a call of a supported torch function creates.

    Raises ``UsageError`` if the function is not supported.
    """
    match call.arguments:
        case (Persistent() as named, int(offset), tuple(shape), tuple(strides), *rest):
            storage = _storage(named)
            sizes = (offset, *shape, *strides)
            sound = all(type(n) is int and 0 <= n < 2**62 for n in sizes) and len(shape) == len(strides) <= 64
            if storage is None or not sound or math.prod(shape) >= 2**59:
                raise _unknown(call)
            dtype = storage.dtype
            match call.name, rest:
                case "torch._utils._rebuild_tensor", []:
                    metadata = None
                case "torch._utils._rebuild_tensor_v2", [bool(), hooks, *more] if (
                    _are_no_hooks(hooks) and len(more) <= 1
                ):
                    metadata = more[0] if more else None
                case "torch._utils._rebuild_tensor_v3", [bool(), hooks, Name("torch", name), *more] if (
                    _are_no_hooks(hooks) and len(more) <= 1
                ):
                    dtype, metadata = escape_unprintable(name)[:20], more[0] if more else None
                case "torch._utils._rebuild_qtensor", [tuple(), bool(), hooks] if _are_no_hooks(hooks):
                    metadata = None
                case _:
                    raise _unknown(call)
            obstacle = _obstacle(metadata, call)
            return storage._replace(dtype=dtype, offset=offset, shape=shape, strides=strides, obstacle=obstacle)
    raise _unknown(call)


def _obstacle(metadata: Any, call: Call) -> str:
    """The reason why a tensor's values differ from its bytes, such as a conjugate view; empty if they do not."""
    if metadata is None:
        return ""
    if not isinstance(metadata, Mapped) or any(type(value) is not bool for _, value in metadata.items):
        raise _unknown(call)
    flags = escape_unprintable(", ".join(key_text(key)[:20] for key, value in metadata.items if value))
    advice = "save it again after resolve_conj() and resolve_neg()"
    return f"its values are not its bytes ({flags}); {advice}" if flags else ""


def _unknown(call: Call) -> UsageError:
    return UsageError(f"a tensor is described in a way that torch.save never writes ({call.name}); the file is damaged")
