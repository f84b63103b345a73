"""Value models that are Python functions of the old bits, in a file of the user: ``FILE.py:NAME``.

    @unsilent.value_model("clear-low-byte")
    def clear(words, random, dtype):
        return words & ~np.uint32(0xFF)

A file is code and runs if the user names it. A `Fault` contains only the function's name and the hash of the file, so a record
from an unknown source cannot make code run. Such a fault is applied by the function that was loaded in this process.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from unsilent.basics import name_and_parameters
from unsilent.basics.errors import UsageError, ValueModelError, unknown_name_error
from unsilent.basics.plainfiles import read_plain
from unsilent.basics.printable import escape_unprintable
from unsilent.basics.user_code import MOST_BYTES, file_module, user_module_name
from unsilent.faults.bitwise import Corrupted, Corruption, ValueModel
from unsilent.faults.codecs import Array
from unsilent.faults.fault_texts import FILE_AND_NAME
from unsilent.faults.models import FaultModel, pattern_from_parameters

NAME = re.compile(r"[A-Za-z][\w-]{0,59}", re.ASCII)
MOST_ARGUMENTS = 3
_LOADED: dict[str, ValueFunction] = {}
"""Functions loaded in this process, by the key (name and hash) that a `Fault` contains."""


@dataclass(frozen=True)
class ValueFunction:
    """A named function of the old bits, returned by `value_model`; calling it calls the function."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def value_model(name: str) -> Callable[[Callable[..., Any]], ValueFunction]:
    """Decorator that makes a function of the old bits a fault model called ``FILE.py:NAME``.

    The function is called as ``function(words)``, ``function(words, random)`` or ``function(words, random, dtype)``, depending on
    the number of its arguments: ``words`` are the bits of the corrupted elements as unsigned integers of their width, ``random``
    has 64 random bits for each of them (uint64[n], fixed by the fault) and ``dtype`` is a name like ``bfloat16``. The function
    returns the new words, an array of the same dtype and shape. They must depend on nothing else, so that a fault can be
    repeated: the function is called twice, and different results are an error.

    Raises:
        UsageError: the name has other characters than letters, digits, ``-`` and ``_``, or the function takes other arguments.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"value_model has the name {name!r}; expected letters, digits, - and _, a letter first")

    def register(function: Callable[..., Any]) -> ValueFunction:
        _argument_count(name, function)
        return ValueFunction(name, function)

    return register


@dataclass(frozen=True)
class FunctionValue(ValueModel):
    """Replace by what a Python function of the user makes of the old bits.

    Attributes:
        function: Name of the function and hash of its file, in the form that a `Fault` has.
    """

    function: str = field(repr=False)

    def operation_and_operands(self, corrupted: Corrupted, rng: np.random.Generator) -> Corruption:
        return "function", rng.integers(0, 2**64, size=corrupted.size, dtype=np.uint64)


def function_fault_model(text: str) -> FaultModel | None:
    """Parse a fault model ``FILE.py:NAME`` or ``FILE.py:NAME:count=3``; None for any other text.

    Runs the file. Raises ``UsageError``.
    """
    named = FILE_AND_NAME.fullmatch(text)
    if named is None:
        return None
    reference, value = f"{named['file']}:{named['name']}", load_value_function(named["file"], named["name"])

    @functools.wraps(pattern_from_parameters)
    def make(**parameters: Any) -> FaultModel:
        return FaultModel(reference, value, pattern_from_parameters(**parameters))

    rest = f"{named['name']}:{named['parameters'] or ''}"
    return name_and_parameters.build_named("fault model", rest, {named["name"]: make})


def load_value_function(file: str, name: str) -> FunctionValue:
    """Run a Python file and return its value model of this name; raises ``UsageError``."""
    key, path = f"{name}@{function_hash(file)}", Path(file).expanduser()
    known = sys.modules.get(user_module_name(path))  # the fingerprint of a campaign looks for the module there
    if key in _LOADED and known is not None and known.__file__ == str(path.resolve()):
        return FunctionValue(key)
    module = file_module(path, file, "value model")
    functions = {value.name: value for value in vars(module).values() if isinstance(value, ValueFunction)}
    if not functions:
        raise UsageError(f"{file} has no value model; decorate a function with @unsilent.value_model({name!r})")
    if name not in functions:
        raise unknown_name_error(f"value model of {file}", name, functions)
    _LOADED[key] = functions[name]
    return FunctionValue(key)


def function_hash(file: str) -> str:
    """Hash of the content of a file of value models, as 16 hex digits."""
    path = Path(file).expanduser()
    return xxhash.xxh3_64_hexdigest(read_plain(path, MOST_BYTES, f"{file} of --fault"))


def apply_function(key: str, words: Array, random: Array, dtype: str) -> Array:
    """The new words that a user's function makes of ``words``.

    The function is called twice: a fault can only be repeated, and judged by any engine, if the function is pure.

    Raises:
        ValueModelError: the function is not loaded, raises an error, returns anything but new words, or returns different words
            in the second call.
    """
    name = escape_unprintable(key.rpartition("@")[0])
    if key not in _LOADED:
        raise ValueModelError(
            f"the fault needs the value model {name}, which this process has not loaded; name its file: --fault FILE.py:{name}"
        )
    function = _LOADED[key].function
    count = _argument_count(name, function)
    try:
        result, again = (function(*(words.copy(), random.copy(), dtype)[:count]) for _ in range(2))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, which is not an outcome of a trial
        raise ValueModelError(f"value model {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, np.ndarray) or (result.dtype, result.shape) != (words.dtype, words.shape):
        got = f"{result.dtype} of shape {result.shape}" if isinstance(result, np.ndarray) else type(result).__name__
        raise ValueModelError(f"value model {name} returned {got}; expected {words.dtype} of shape {words.shape}")
    if not np.array_equal(result, again):
        raise ValueModelError(
            f"value model {name} returned different values for the same bits; it must be a pure function of its arguments, "
            "without state and without random numbers of its own: use the argument random"
        )
    return result


def _argument_count(name: str, function: Callable[..., Any]) -> int:
    """Number of arguments (of words, random and dtype) that a function takes; raises ``UsageError``."""
    parameters = inspect.signature(function).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if count != len(parameters) or not 1 <= count <= MOST_ARGUMENTS:
        raise UsageError(
            f"value model {name} takes {inspect.signature(function)}; expected (words, random, dtype) or the first"
        )
    return count
