"""Loop state besides model and optimizer: random generators, schedulers and variables such as counters.

They are searched where a step can reach them: local variables of the frame that runs the loop, arguments, closures and
``self`` of functions, and the globals that their code names. Objects are searched a few attributes deep, nearest first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unsilent.guard.loop_code import global_names, names_taken_over
from unsilent.workloads.trainings.randomness import GENERATORS

DEPTH = 4
"""Largest number of attributes, elements and closures between a variable of the loop and a generator that is found."""
MOST_OBJECTS = 5000
"""Largest number of objects in one search; the nearest ones come first."""
MOST_ELEMENTS = 100
"""Largest number of elements of a list or a dictionary that are searched."""
_LEAVES = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, ModuleType, CodeType, FrameType)
_FOLDERS = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], Path(__file__).parents[1])
_LIBRARIES = tuple(str(Path(path).resolve()) for path in _FOLDERS)

Variables = Mapping[str, Any]


class LoopVariables(NamedTuple):
    """The variables that a loop's body can reach, those that carry values between iterations, and their owner."""

    reachable: Variables = MappingProxyType({})
    taken_over: Variables = MappingProxyType({})
    owner: Any = None


def variables_of_loop(frame: FrameType | None) -> LoopVariables:
    """Variables of the first frame outside of libraries, starting at ``frame`` and going to its callers."""
    here = frame
    while here is not None and is_of_library(here.f_code.co_filename):
        here = here.f_back
    here = here or frame
    if here is None:
        return LoopVariables()
    code, local_variables = here.f_code, here.f_locals
    result = {**_globals_named(code, here.f_globals), **local_variables}
    taken = names_taken_over(code, here.f_lasti)
    taken_over = {name: value for name, value in result.items() if name in taken}
    if here.f_code.co_flags & CO_OPTIMIZED and sys.version_info < (3, 13):
        here.f_locals.clear()  # the frame keeps this copy, which would hold tensors of this step during the next one
    return LoopVariables(result, taken_over, code)


def variables_of_function(function: Callable[..., Any]) -> Variables:
    """Variables that a function can reach: its bound object, attributes, closure, defaults and globals."""
    if isinstance(function, functools.partial):
        return {**_arguments_by_number(function.args), **function.keywords, **variables_of_function(function.func)}
    if isinstance(function, MethodType):
        owner = function.__self__
        return {**variables_of_function(function.__func__), **attributes_of(owner), "self": owner}
    if not isinstance(function, FunctionType):
        return {**attributes_of(function), "self": function}
    result = {f"{function.__name__}.{key}": value for key, value in vars(function).items()}
    result.update(_globals_named(function.__code__, function.__globals__))
    result.update(_arguments_by_number(function.__defaults__ or ()))
    result.update(function.__kwdefaults__ or {})
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            result[name] = cell.cell_contents
    return result


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object by name, from its ``__dict__`` and the ``__slots__`` of its classes."""
    attributes = getattr(value, "__dict__", None)
    result = dict(attributes) if isinstance(attributes, Mapping) else {}
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for name, slot in list(vars(kind).items()):
            if isinstance(slot, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it has no value yet
                    result.setdefault(name, slot.__get__(value))
    return result


def is_put_back(value: Any, optimizers: Sequence[Optimizer]) -> bool:
    """Whether the value is a random generator, a scheduler of one of the optimizers, or a loss scaler."""
    if isinstance(value, LRScheduler):
        return value.optimizer in optimizers
    return isinstance(value, (*GENERATORS, GradScaler))


def find_objects(variables: Variables, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Wanted objects that are reachable from variables, by name; without the global random generators."""
    by_name: dict[str, Any] = {}
    waiting = deque((name, value, 0) for name, value in variables.items())
    seen = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}
    looked_at = 0
    while waiting and looked_at < MOST_OBJECTS:
        name, value, depth = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES) or _is_of_library(value):
            continue
        seen.add(id(value))
        looked_at += 1
        if wanted(value):
            by_name[name] = value
        elif depth < DEPTH:
            waiting.extend((child, inside, depth + 1) for child, inside in _inside(name, value))
    return by_name


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object with their names."""
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        yield from ((f"{name}: {key}", part) for key, part in variables_of_function(value).items())
    elif isinstance(value, GeneratorType):
        if value.gi_frame is not None:
            yield from ((f"{name}: {key}", part) for key, part in value.gi_frame.f_locals.items())
    elif isinstance(value, Mapping):
        if len(value) <= MOST_ELEMENTS:
            yield from ((f"{name}[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        if len(value) <= MOST_ELEMENTS:
            yield from ((f"{name}[{number}]", part) for number, part in enumerate(list(value)))
    else:
        yield from ((f"{name}.{key}", part) for key, part in attributes_of(value).items())


def _is_of_library(value: Any) -> bool:
    """Whether the value is a function or class from outside of the user's code."""
    if isinstance(value, FunctionType):
        return is_of_library(value.__code__.co_filename)
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if file is None:  # code of a notebook, or built into the interpreter
            return value.__module__.partition(".")[0] in sys.stdlib_module_names
        return is_of_library(file)
    return False


def is_library_object(value: Any) -> bool:
    """Whether the value is a class from outside of the user's code or its instance; false for namespaces."""
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return False
    return _is_of_library(value if isinstance(value, type) else type(value))


@functools.lru_cache(maxsize=1024)
def is_of_library(file: str) -> bool:
    """Whether a source file is part of Python, of an installed package, or of this one."""
    return not file or str(Path(file).resolve()).startswith(_LIBRARIES)


def _globals_named(code: CodeType, table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: table[name] for name in sorted(global_names(code)) if name in table}


def _arguments_by_number(values: tuple[Any, ...]) -> dict[str, Any]:
    return {f"argument {number}": value for number, value in enumerate(values)}
