"""Lifetimes of the values of an evaluation: from the operation that writes a value to the last one that reads it.

A value is one state of one storage: an operation that writes into a storage ends its previous value. Views are the same
value; an operation that returns a view or uninitialised memory moves no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from unsilent.basics.nested import tensors_in
from unsilent.faults import Region
from unsilent.faults.naming import OPERANDS, SiteName
from unsilent.sites.caches import KvCacheObserver, kv_cache_entries
from unsilent.sites.calls import OperationNamer
from unsilent.sites.corrupting import corruptible, has_plain_memory
from unsilent.sites.dispatch_mode import DispatchMode
from unsilent.sites.memory import dtype_name
from unsilent.sites.operands import gives_uninitialised, is_view, operand_number, operands_of, written_by
from unsilent.sites.survey import own_elements


class Read(NamedTuple):
    """One read of a value, or of a part of it, by an operation.

    ``operand``: region in which a fault corrupts only this operation's read; None if there is no such site.
    """

    operation: int
    elements: int
    operand: Region | None


@dataclass(eq=False)
class StoredValue:
    """A value: its site, the number of the operation that wrote it (-1: none), and its reads in order."""

    site: str
    written: int
    elements: int
    reads: list[Read] = field(default_factory=list)
    is_cached: bool = False


class Window(NamedTuple):
    """A time span, between the ends of two operations, in which a fault in a value reaches the same readers.

    ``operand``: region that such a fault corrupts, if not the value for all its readers. ``part``: share of the value's elements.
    """

    begin: int
    end: int
    operand: Region | None = None
    part: float = 1.0


def windows(value: StoredValue) -> Iterator[Window]:
    """The time spans in which a value is still needed; a fault after some reads affects only later ones.

    If several reads of the whole value remain, a fault is assumed to affect all readers.
    """
    if not value.reads:
        return
    first = value.reads[0].operation
    yield Window(value.written, first)
    later = [read for read in value.reads if read.operation > first]
    if any(read.elements < value.elements for read in later):  # each reads its own part
        for read in later:
            part = 1.0 if read.operand is not None else min(1.0, read.elements / value.elements)
            yield Window(first, read.operation, read.operand, part)
        return
    ends = [first, *(read.operation for read in later)]
    for read, (begin, end) in zip(later, pairwise(ends), strict=True):
        if end > begin:
            yield Window(begin, end, read.operand if end == ends[-1] else None)


class LifetimeObserver(DispatchMode):
    """Records the values of one evaluation of one batch, and the bytes that each operation moves.

    Args:
        model: Model whose modules give the names.
        held: Sites and tensors of parameters and inputs.
        step: Number of the batch.

    Attributes:
        moved: Values that each operation reads or writes, each with its number of bytes.
        values: Values by site and occurrence; a parameter or operation that runs once has no occurrence.
    """

    def __init__(self, model: nn.Module, held: Iterable[tuple[str, Tensor]], step: int) -> None:
        self._calls = OperationNamer(model)
        super().__init__(self._calls)
        self._caches = KvCacheObserver(model, self._cache)
        self._step = step
        self._now: dict[int, StoredValue] = {}
        self.moved: list[list[tuple[StoredValue, int]]] = []
        self.values: dict[tuple[str, int | None], StoredValue] = {}
        for site, tensor in held:
            if has_plain_memory(tensor):
                value = self._now.setdefault(_storage(tensor), StoredValue(site, -1, tensor.numel()))
                self.values[site, None] = value

    def _around(self, stack: ExitStack) -> None:
        super()._around(stack)
        stack.enter_context(self._caches)

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._calls.next_name(func)
        result = func(*args, **kwargs)
        if not (gives_uninitialised(func) or is_view(func, args, kwargs, result)):
            self._moved(name, func, args, kwargs, result)
        return result

    def _moved(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        number, moved = len(self.moved), list[tuple[StoredValue, int]]()
        operands = operands_of(args, kwargs)
        roles = {operand_number(func, operand): operand for operand in reversed(OPERANDS[1:])}
        for place, tensor in enumerate(operands):
            value = self._now.get(_storage(tensor)) if has_plain_memory(tensor) else None
            if value is not None:
                operand = self._operand(name, roles.get(place), tensor)
                elements = tensor.numel() if operand is None else operand.eligible_count
                value.reads.append(Read(number, elements, operand))
                moved.append((value, tensor.nbytes))
        inputs = {_storage(tensor) for tensor in operands if has_plain_memory(tensor)}
        rewritten = {_storage(tensor) for tensor in written_by(func, args, kwargs) if has_plain_memory(tensor)}
        for place, tensor in enumerate(tensors_in(result)):
            if not has_plain_memory(tensor) or (storage := _storage(tensor)) in inputs - rewritten:
                continue
            site = SiteName("op", name, "fwd", f"out.{place}" if place else "out").text
            value = self._now[storage] = StoredValue(site, number, tensor.numel())
            self.values[site, None] = value
            moved.append((value, tensor.nbytes))
        self.moved.append(moved)

    def _operand(self, name: str, operand: str | None, tensor: Tensor) -> Region | None:
        if operand is None or not corruptible(tensor):
            return None
        site = SiteName("op", name, "fwd", operand).text
        return Region(site, dtype_name(tensor.dtype), tuple(tensor.shape), own_elements(tensor), self._step)

    def _cache(self, number: int, cache: Any) -> None:
        for name, tensor in kv_cache_entries(cache).items():
            value = self._now.get(_storage(tensor))
            if value is not None:
                value.is_cached = True
                self.values[f"kv:{name}", number] = value

    def finish(self, output: Any) -> None:
        """Record the values in the final output as needed until the end."""
        for tensor in tensors_in(output):
            value = self._now.get(_storage(tensor)) if has_plain_memory(tensor) else None
            if value is not None:
                value.reads.append(Read(len(self.moved) - 1, tensor.numel(), None))

    def ends(self, seconds_per_byte: Callable[[StoredValue], float]) -> NDArray[np.float64]:
        """End times of all operations, from the time to move their data; [0] is the start, float64[operations + 1]."""
        durations = [sum(seconds_per_byte(value) * size for value, size in moved) for moved in self.moved]
        return np.concatenate([[0.0], np.cumsum(durations)])


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def seconds(ends: Sequence[float] | NDArray[np.float64], window: Window) -> float:
    """Duration of a window in seconds."""
    return float(ends[window.end + 1] - ends[window.begin + 1])
