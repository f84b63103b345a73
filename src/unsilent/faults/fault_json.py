"""Reading a `Fault` from untrusted JSON.

Invariant: a fault that `read_fault` returns can be applied to a tensor of its dtype and shape without an index out of
bounds. Any other record raises a ``UsageError`` of one line with the value that was found and the one that was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NoReturn

import numpy as np

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.faults.codecs import CODECS, Array, Codec, codec
from unsilent.faults.record import LABELS, LAYOUTS, OPERATIONS, TIMING_FIELDS, Fault
from unsilent.faults.sampling import Ints

_KNOWN = ("version", *(f.name for f in fields(Fault)))
_REQUIRED = ("version", *(f.name for f in fields(Fault) if f.default is MISSING))
_LARGEST = 2**63 - 1
_LONGEST = 4096  # most characters of a name
_DEEPEST = 64  # most dimensions


def read_fault(record: Mapping[str, Any]) -> Fault:
    """Check a record and build the fault; raises ``UsageError``."""
    if not isinstance(record, Mapping):
        _refuse("it", record, "an object with keys " + ", ".join(_REQUIRED))
    for key in record:
        if key not in _KNOWN:
            raise unknown_name_error("key in a fault record", str(key)[:60], _KNOWN)
    if missing := [key for key in _REQUIRED if key not in record]:
        raise UsageError(f"fault record lacks {', '.join(missing)}; expected {', '.join(_REQUIRED)}")
    if type(record["version"]) is not int or record["version"] != Fault.VERSION:
        _refuse("version", record["version"], f"{Fault.VERSION}, the only one this release reads")
    names = {key: _name(record, key) for key in ("site", "dtype", "operation")}
    if names["dtype"] not in CODECS:
        raise unknown_name_error("dtype", names["dtype"][:60], CODECS)
    if names["operation"] not in OPERATIONS:
        raise unknown_name_error("operation in a fault record", names["operation"][:60], OPERATIONS)
    shape = _shape(record["shape"])
    elements = _indices("elements", record["elements"], math.prod(shape))
    if elements.size > 1 and (steps := np.diff(elements)).min() <= 0:
        at = int(np.argmax(steps <= 0))
        result = f"{elements[at + 1]} after {elements[at]}"
        raise UsageError(f"fault record: elements has {result}; expected distinct positions in ascending order")
    rest = _rest(record)
    if (names["operation"] == "function") != ("function" in rest):
        _refuse(
            "function", record.get("function"), "the name and hash of a value model, for the operation function alone"
        )
    layout = codec(rest.get("held", names["dtype"]))
    operands = _operands(record["operands"], names["operation"], layout, math.prod(shape))
    if operands.size != elements.size:
        raise UsageError(
            f"fault record: {operands.size} operands for {elements.size} elements; expected one per element"
        )
    if not names["site"].startswith("op:") and ("reach" in rest or rest.get("layout", LAYOUTS[0]) != LAYOUTS[0]):
        _refuse("site", names["site"], "an operation, op:…, for a fault with reach or layout")
    return Fault(names["site"], names["dtype"], shape, elements, names["operation"], operands, **rest)


def _rest(record: Mapping[str, Any]) -> dict[str, Any]:
    readers = {"held": _held, "function": _function, "reach": _reach, **dict.fromkeys(LABELS, None)}
    by_name: dict[str, Any] = {}
    if "layout" in record:
        by_name["layout"] = _name(record, "layout")
        if by_name["layout"] not in LAYOUTS:
            raise unknown_name_error("layout in a fault record", by_name["layout"][:60], LAYOUTS)
    for key, read in readers.items():
        if record.get(key) is not None:
            by_name[key] = _name(record, key) if read is None else read(record)
    for key in TIMING_FIELDS:
        value = record.get(key)
        if value is None and not (key == "rank" and key in record):
            continue
        if type(value) is not int or not 0 <= value <= _LARGEST:
            _refuse(key, value, "a whole number, 0 or more")
        by_name[key] = value
    first, last = by_name.get("first_step"), by_name.get("last_step")
    if first is not None and last is not None and last < first:
        raise UsageError(f"fault record: last_step {last} is before first_step {first}; expected {first} or more")
    return by_name


def _held(record: Mapping[str, Any]) -> str:
    name = _name(record, "held")
    if name not in CODECS:
        raise unknown_name_error("dtype in a fault record", name[:60], CODECS)
    return name


def _function(record: Mapping[str, Any]) -> str:
    text = _name(record, "function")
    if not re.fullmatch(r"[A-Za-z][\w-]{0,59}@[0-9a-f]{16}", text, re.ASCII):
        _refuse("function", text, "NAME@HASH, with 16 hex digits")
    return text


def _reach(record: Mapping[str, Any]) -> Ints:
    """The output positions that see a fault; the run checks them against the shape of the output."""
    if record["reach"] == []:
        return np.empty(0, dtype=np.int64)  # nothing uses the element
    reach = _indices("reach", record["reach"], _LARGEST)
    if reach.size > 1 and np.diff(reach).min() <= 0:
        _refuse("reach", "not ascending", "distinct positions in ascending order")
    return reach


def _refuse(key: str, result: Any, expected: str) -> NoReturn:
    try:
        text = repr(result)
    except (ValueError, RecursionError):  # an integer with thousands of digits, or very deep nesting
        text = f"a {type(result).__name__}"
    text = text if len(text) <= 60 else text[:57] + "..."
    raise UsageError(f"fault record: {key} is {text}; expected {expected}")


def _name(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or not value.isprintable():
        _refuse(key, value, f"a printable text of 1 to {_LONGEST} characters")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > _DEEPEST:
        _refuse("shape", value, f"a list of at most {_DEEPEST} lengths")
    if any(type(n) is not int or not 0 <= n <= _LARGEST for n in value) or math.prod(value) > _LARGEST:
        _refuse("shape", value, "whole numbers, 0 or more, with a product below 2^63")
    return tuple(value)


def _indices(key: str, value: Any, size: int) -> Ints:
    expected = f"a list of at least one position in 0-{size - 1}" if size else "an element, but the tensor has none"
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        _refuse(key, value, expected)
    low, high = min(value), max(value)
    if low < 0 or high >= size:
        _refuse(key, low if low < 0 else high, expected)
    return np.array(value, dtype=np.int64)


def _operands(value: Any, operation: str, layout: Codec, size: int) -> Array:
    if operation == "copy_from":
        return _indices("operands", value, size)
    if not isinstance(value, list) or not value or set(map(type, value)) != {str}:
        _refuse("operands", value, "a list of hex strings")
    if operation == "scale":
        return np.array([_factor(text) for text in value], dtype=np.float64)
    digits, word = layout.bits // 4, layout.word_dtype
    if operation == "function":
        digits, word = 16, np.dtype(np.uint64)
    pattern = re.compile(rf"0x[0-9a-f]{{{digits}}}")
    for text in value:
        if not pattern.fullmatch(text):
            _refuse("operands", text, f"0x and {digits} hex digits")
    return np.array([int(text, 16) for text in value], dtype=word)


def _factor(text: str) -> float:
    try:
        if re.fullmatch(r"-?(0x[01]\.[0-9a-f]{1,13}p[+-]\d{1,4}|inf)", text, re.ASCII):
            return float.fromhex(text)
    except OverflowError:
        pass
    _refuse("operands", text, "a factor such as 0x1.0000000000000p+1")
