"""A pickled numpy array of plain numbers, read without unpickling (`unsilent.basics.pickle_values`).

Only the structure that numpy writes for an array in protocols 3 to 5 is accepted.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.pickle_values import ByteString, Call, Name, PickleDamaged, read_pickle

_MOST_MEMORY = 20_000
"""Most memory for the objects of a pickled array, without its numbers; such a pickle has about 100 opcodes."""
_DTYPES = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)} | {"f4", "f8"}


class NotAnArray(ValueError):
    """The pickle does not hold an array; the message says what it holds."""


def read_array(content: bytes) -> NDArray[Any]:
    """The array in a pickle, read-only; raises ``NotAnArray``."""
    try:
        result, _ = read_pickle(content, _MOST_MEMORY)
    except PickleDamaged as error:
        raise NotAnArray(str(error)) from None
    return _array(result)


def _array(result: Any) -> NDArray[Any]:
    """The numpy array that a pickle's value describes; raises ``NotAnArray`` for any other value."""
    match result:
        case Call(
            Name("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"),
            (Name("numpy", "ndarray"), (0,), ByteString(b"b")),
            (1, tuple(shape), Call() as dtype, bool(fortran), ByteString(data)),
        ):
            columns_first = fortran
        case Call(
            Name("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer"),
            (ByteString(data), Call() as dtype, tuple(shape), "C" | "F" as order),
            None,
        ):
            columns_first = order == "F"
        case _:
            raise NotAnArray("it holds something other than an array")
    kind = _dtype(dtype)
    if any(type(n) is not int or n < 0 for n in shape) or prod(shape) * kind.itemsize != len(data):
        raise NotAnArray("its shape does not fit its data")
    array: NDArray[Any] = np.frombuffer(data, kind).reshape(shape, order="F" if columns_first else "C")
    return array


def _dtype(result: Call) -> np.dtype[Any]:
    match result:
        case Call(Name("numpy", "dtype"), (str(name), False, True), (3, "<" | ">" | "|" as order, *_)) if (
            name in _DTYPES
        ):
            return np.dtype(f"{order}{name}")
        case Call(Name("numpy", "dtype"), (str(name), *_)):
            raise NotAnArray(f"its numbers are of dtype {ascii(name)[:20]}")
        case _:
            raise NotAnArray("it holds something other than an array")
