"""Record of the values and tensors that a loop's variables refer to at one moment.

A record does not restore anything. Comparing two records shows the changes in between, by name: ``losses`` (a list that has
grown), ``ema['fc.weight']`` (another tensor), ``trainer.step`` (a number). Objects are searched as by `find_objects`, nearest
first; objects of installed packages only if they have a ``state_dict``. Containers with more than `MOST_ELEMENTS` elements and
arrays of more than `MOST_BYTES` are not searched.
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
"""Largest number of objects whose parts one record contains."""
MOST_ELEMENTS = 1000
"""Largest number of elements of a container that is searched."""
MOST_BYTES = 1 << 16
"""Largest array whose content is recorded, in bytes."""
LENGTH = None
"""Key of the number of elements of a container."""
_PLAIN = (int, float, bool, str, bytes, complex, type(None))
_CLOSED = (ModuleType, CodeType, FrameType, *GENERATORS)


class Opaque:
    """Represents an iterator, whose position is unknown; unequal to every other record."""


class Length(int):
    """Number of elements in a container."""


class Kind(str):
    """Name of the type of an object that is neither a plain value nor a container."""


class Content(int):
    """Fingerprint of a tensor's content."""


Path = tuple[str, Any]
"""The name of an object and the key of a part of it."""


@dataclass(frozen=True)
class LoopRecord:
    """The values and tensors that variables refer to.

    Attributes:
        values: Plain values, references to tensors, lengths and kinds of objects, by path.
        tensors: Tensors with their own memory that can be kept, each once, with its name.
    """

    values: dict[Path, Any]
    tensors: list[tuple[str, Tensor]]

    def changed(self, now: LoopRecord) -> list[Path]:
        """Paths of all that was changed, added or removed, one per name.

        Parts of a changed object are left out.
        """
        by_name: dict[str, Path] = {}
        for path in dict.fromkeys((*self.values, *now.values)):
            if not _is_unchanged(self.values.get(path, Opaque), now.values.get(path, Opaque)):
                by_name.setdefault(name_of(path), path)
        return [path for name, path in by_name.items() if not by_name.keys() & _wholes(name)]

    def tensors_at(self, paths: Collection[Path]) -> list[Path]:
        """The paths that lead to tensors, or to objects that contain tensors."""
        names = {name_of(path) for path, value in self.values.items() if isinstance(value, weakref.ref)}
        names |= {whole for name in names for whole in _wholes(name)}
        return [path for path in paths if name_of(path) in names]

    def contents(self) -> LoopRecord:
        """The record with tensors replaced by their fingerprints."""
        values = {path: value for path, value in self.values.items() if not isinstance(value, Opaque)}
        for path, value in values.items():
            if isinstance(value, weakref.ref) and (tensor := value()) is not None:
                values[path] = Content(int(fingerprint([tensor])))
        return LoopRecord(values, self.tensors)


def name_of(path: Path) -> str:
    """The expression for a path in Python code."""
    holder, key = path
    if key is LENGTH:
        return holder
    return f"{holder[:-2]}[{key!r}]" if holder.endswith("[]") else f"{holder}{key}"


def _wholes(name: str) -> set[str]:
    """Names of all objects that may contain the part with this name."""
    return {name[:place] for place, mark in enumerate(name) if mark in ".[:"}


def record_loop(
    variables: Variables, left_out: Collection[int] = (), known: Variables = MappingProxyType({})
) -> LoopRecord:
    """Record the present values and tensors of variables.

    Args:
        left_out: Identities of objects that are ignored.
        known: Variables of the loop; functions that use them do not record them again.
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
    """Builds a `LoopRecord`.

    Attributes:
        values, tensors: Values and tensors of the record.
        parts: Parts still to be searched: the name of an object, its parts with their keys, and its distance from a variable.
    """

    def __init__(self, left_out: Collection[int], known: Variables) -> None:
        self._known = known
        self.values: dict[Path, Any] = {}
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.parts: deque[tuple[str, list[tuple[Any, Any]], int]] = deque()
        self._seen = set(left_out)

    def look_at(self, path: Path, value: Any, depth: int) -> None:
        """Record one object, and queue its parts."""
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
            self.parts.append(
                (f"{name}[]", [(_key_or_number(k, n), part) for n, (k, part) in enumerate(inside)], depth + 1)
            )

    def _inside(self, value: Any) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
        """Yield the parts of an object that is not a container, with the separator between the names."""
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


def _key_or_number(key: Any, number: int) -> Any:
    return key if isinstance(key, (int, str)) else number


def _is_kept(tensor: Tensor) -> bool:
    """Whether a tensor can be copied and restored: a dense one that is not the result of a differentiable operation."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.grad_fn is None and not tensor.is_meta and not tensor.is_inference()


def _is_unchanged(then: Any, now: Any) -> bool:
    if isinstance(then, weakref.ref) or isinstance(now, weakref.ref):
        return then is now  # a tensor has one reference as long as it exists
    if type(then) is not type(now) or isinstance(then, Opaque):
        return False
    return bool(then == now or (then != then and now != now))
