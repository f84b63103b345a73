"""Record of what the variables of a loop lead to at one moment: numbers, texts, lengths, and which tensors there are.

A record does not put anything back. Two of them tell what has changed in between, by name: ``losses`` (a list that has grown),
``ema['fc.weight']`` (another tensor), ``trainer.step`` (a number). Objects are searched as by `find_objects`, nearest first; of
installed packages only those that have a ``state_dict``. Not seen are elements of containers with more than `MOST_ELEMENTS`, and
arrays of more than `MOST_BYTES`.
"""

from __future__ import annotations

import functools
import io
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unsilent.guard.loop_state import (
    DEPTH,
    Variables,
    attributes_of,
    is_library_object,
    is_of_library,
    variables_of_function,
)
from unsilent.recovery.digests import fingerprint
from unsilent.workloads.trainings.randomness import GENERATORS

MOST_OBJECTS = 1000
"""Objects that one record looks into."""
MOST_ELEMENTS = 1000
"""Elements of a container that are looked at."""
MOST_BYTES = 1 << 16
"""Largest array whose content is recorded, in bytes."""
LENGTH = None
"""The key of how many elements a container has."""
_PLAIN = (int, float, bool, str, bytes, complex, type(None))
_CLOSED = (ModuleType, CodeType, FrameType, *GENERATORS)


class Opaque:
    """Stands for an iterator, whose place is not known: it differs from every other record."""


class Length(int):
    """Elements of a container."""


class Kind(str):
    """Stands for an object that is no value and no container: its type."""


class Content(int):
    """Stands for the content of a tensor."""


Path = tuple[str, Any]
"""The name of an object and the key of a part of it."""


@dataclass(frozen=True)
class LoopRecord:
    """Values and tensors that variables lead to.

    Attributes:
        values: Plain values, references to tensors, lengths, kinds of objects; by path.
        tensors: Tensors with memory of their own to be kept, each once, with its name.
    """

    values: dict[Path, Any]
    tensors: list[tuple[str, Tensor]]

    def changed(self, now: LoopRecord) -> list[Path]:
        """Paths of all that is not as it was, also of what is new or gone, but not of parts of these; one for each name."""
        by_name: dict[str, Path] = {}
        for path in dict.fromkeys((*self.values, *now.values)):
            if not _same(self.values.get(path, Opaque), now.values.get(path, Opaque)):
                by_name.setdefault(name_of(path), path)
        return [path for name, path in by_name.items() if not by_name.keys() & _wholes(name)]

    def tensors_at(self, paths: Collection[Path]) -> list[Path]:
        """The paths among these where there are tensors, or objects with tensors in them."""
        names = {name_of(path) for path, value in self.values.items() if isinstance(value, weakref.ref)}
        names |= {whole for name in names for whole in _wholes(name)}
        return [path for path in paths if name_of(path) in names]

    def contents(self) -> LoopRecord:
        """The record with fingerprints of tensors in the place of references."""
        values = {
            path: Content(int(fingerprint([t])))
            if isinstance(value, weakref.ref) and (t := value()) is not None
            else value
            for path, value in self.values.items()
            if not isinstance(value, Opaque)
        }
        return LoopRecord(values, self.tensors)


def name_of(path: Path) -> str:
    """The name as a program would write it."""
    holder, key = path
    if key is LENGTH:
        return holder
    return f"{holder[:-2]}[{key!r}]" if holder.endswith("[]") else f"{holder}{key}"


def _wholes(name: str) -> set[str]:
    """Names of what a part with this name may be inside of."""
    return {name[:place] for place, mark in enumerate(name) if mark in ".[:"}


def record_loop(
    variables: Variables, left_out: Collection[int] = (), known: Variables = MappingProxyType({})
) -> LoopRecord:
    """The record of what variables lead to now.

    Args:
        left_out: Identities of objects that are not looked at.
        known: Variables of the loop: functions that use them do not make others of them.
    """
    walk = _Walk(left_out, known)
    walk.parts.append(("", list(variables.items()), 0))
    for _ in range(MOST_OBJECTS):
        if not walk.parts:
            break
        holder, parts, depth = walk.parts.popleft()
        for key, value in parts:
            walk.look_at((holder, key), value, depth)
    return LoopRecord(walk.values, list(walk.tensors.values()))


class _Walk:
    """A record in the making.

    Attributes:
        values, tensors: Of the record.
        parts: Parts still to be looked at: the name of an object, its parts with their keys, how far it is from a variable.
    """

    def __init__(self, left_out: Collection[int], known: Variables) -> None:
        self._known = known
        self.values: dict[Path, Any] = {}
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.parts: deque[tuple[str, list[tuple[Any, Any]], int]] = deque()
        self._seen = set(left_out)

    def look_at(self, path: Path, value: Any, depth: int) -> None:
        """Record one part, and remember what it consists of for later."""
        if isinstance(value, _PLAIN):
            self.values[path] = value
        elif id(value) in self._seen or isinstance(value, _CLOSED):
            pass
        elif isinstance(value, Tensor):
            if _is_kept(value):  # also what is met again: the place itself may get another one
                self.values[path] = weakref.ref(value)
                self.tensors.setdefault(id(value), (name_of(path), value))
        else:
            self._seen.add(id(value))
            name = name_of(path)
            if isinstance(value, np.ndarray):
                if value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
                    self.values[path] = value.tobytes()
            elif isinstance(value, (array, bytearray)):
                if memoryview(value).nbytes <= MOST_BYTES:
                    self.values[path] = bytes(value)
            elif isinstance(value, (list, tuple, deque, dict, set, frozenset)):
                self._look_into_container(path, value, depth)
            elif isinstance(value, Iterator) and is_library_object(value):
                if not isinstance(value, io.IOBase):
                    self.values[path] = Opaque()
            else:
                self.values[path] = Kind(type(value).__qualname__)
                inside = self._inside(value) if depth < DEPTH else ()
                self.parts.extend((f"{name}{mark}", parts, depth + 1) for mark, parts in inside)

    def _look_into_container(self, path: Path, value: Any, depth: int) -> None:
        name = name_of(path)
        self.values[name, LENGTH] = Length(len(value))
        if len(value) > MOST_ELEMENTS or depth >= DEPTH:
            return
        if isinstance(value, (set, frozenset)):
            self.values[path] = frozenset(part for part in value if isinstance(part, _PLAIN))
        else:
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            self.parts.append((f"{name}[]", [(_key(k, n), part) for n, (k, part) in enumerate(inside)], depth + 1))

    def _inside(self, value: Any) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
        """The parts of an object that is no container, with what stands between its name and theirs."""
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            if not (isinstance(value, FunctionType) and is_of_library(value.__code__.co_filename)):
                parts = list(variables_of_function(value).items())
                yield ": ", [(key, part) for key, part in parts if self._known.get(key, self) is not part]
        elif isinstance(value, nn.Module):
            yield ".", [*value.named_parameters(), *value.named_buffers()]
            yield ".", [(key, part) for key, part in attributes_of(value).items() if not key.startswith("_")]
        elif not is_library_object(value):
            yield ".", list(attributes_of(value).items())
        elif not isinstance(value, type) and hasattr(type(value), "state_dict"):
            yield ".", [(key, part) for key, part in attributes_of(value).items() if not isinstance(part, _PLAIN)]


def _key(key: Any, number: int) -> Any:
    return key if isinstance(key, (int, str)) else number


def _is_kept(tensor: Tensor) -> bool:
    """Whether it is memory that can be copied and put back, and no result in a graph."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.grad_fn is None
        and not tensor.is_meta
        and not tensor.is_inference()
    )


def _same(then: Any, now: Any) -> bool:
    if isinstance(then, weakref.ref) or isinstance(now, weakref.ref):
        return then is now  # a tensor has one reference as long as it is there
    return (
        type(then) is type(now) and not isinstance(then, Opaque) and bool(then == now or (then != then and now != now))
    )
