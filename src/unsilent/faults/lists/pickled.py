"""A pickled numpy array of plain numbers, read without unpickling: the opcodes are interpreted here and call nothing.

`pickletools.genops` takes a pickle apart into opcodes and arguments. The few of them that numpy writes for an array build tuples
and named tuples below; any other opcode, and anything but the known structure at the end, is refused. Protocols 3 to 5.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"\x80"
_MOST_OPCODES = 200
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
    "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_DTYPES = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)} | {"f4", "f8"}


class NotAnArray(ValueError):
    """What a pickle holds instead; one phrase."""


class _Name(NamedTuple):
    module: str
    name: str


class _Call(NamedTuple):
    function: Any
    arguments: Any
    state: Any = None


_MARK = _Name("", "mark")


def read_array(content: bytes) -> NDArray[Any]:
    """The array, read-only; raises ``NotAnArray``."""
    try:
        result = _built(pickletools.genops(content))
    except NotAnArray:
        raise
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise NotAnArray(f"damaged: {ascii(str(error))[:60]}") from None
    return _array(result)


def _built(opcodes: Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> Any:
    """What the opcodes leave on the stack, made of plain values, names and calls that nobody makes."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for count, (opcode, argument, _) in enumerate(opcodes):
        name = opcode.name
        if count > _MOST_OPCODES:
            raise NotAnArray("it continues after the end of an array")
        if name == "STOP":
            (result,) = stack
            return result
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name == "GLOBAL":
            stack.append(_Name(*argument.split(" ", 1)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name not in ("PROTO", "FRAME"):
            _combine(name, stack)
    raise NotAnArray("it is cut off")


def _combine(name: str, stack: list[Any]) -> None:
    """An opcode that makes one of several values on the stack."""
    if name == "MARK":
        stack.append(_MARK)
    elif name == "TUPLE":
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        stack[start:] = [tuple(stack[start + 1 :])]
    elif name in _TUPLES:
        size = _TUPLES[name]
        stack[-size:] = [tuple(stack[-size:])]
    elif name in ("STACK_GLOBAL", "REDUCE", "BUILD"):
        below, top = stack[-2:]
        if name == "STACK_GLOBAL":
            made: Any = _Name(below, top)
        elif name == "REDUCE":
            made = _Call(below, top)
        elif isinstance(below, _Call):
            made = below._replace(state=top)
        else:
            raise NotAnArray("it sets the state of an object that is not an array")
        stack[-2:] = [made]
    else:
        raise NotAnArray(f"it holds {name}")


def _array(result: Any) -> NDArray[Any]:
    """The array that numpy would make of it, where that is all there is."""
    match result:
        case _Call(
            _Name("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"),
            (_Name("numpy", "ndarray"), (0,), b"b"),
            (1, tuple(shape), _Call() as dtype, bool(fortran), bytes(data)),
        ):
            columns_first = fortran
        case _Call(
            _Name("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer"),
            (bytes(data) | bytearray(data), _Call() as dtype, tuple(shape), "C" | "F" as order),
            None,
        ):
            columns_first = order == "F"
        case _:
            raise NotAnArray("it holds something other than an array")
    kind = _dtype(dtype)
    if any(type(n) is not int or n < 0 for n in shape) or prod(shape) * kind.itemsize != len(data):
        raise NotAnArray("its shape does not fit its data")
    array: NDArray[Any] = np.frombuffer(bytes(data), kind).reshape(shape, order="F" if columns_first else "C")
    return array


def _dtype(result: _Call) -> np.dtype[Any]:
    match result:
        case _Call(_Name("numpy", "dtype"), (str(name), False, True), (3, "<" | ">" | "|" as order, *_)) if (
            name in _DTYPES
        ):
            return np.dtype(f"{order}{name}")
        case _Call(_Name("numpy", "dtype"), (str(name), *_)):
            raise NotAnArray(f"its numbers are of dtype {ascii(name)[:20]}")
        case _:
            raise NotAnArray("it holds something other than an array")
