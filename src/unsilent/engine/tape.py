"""The tape: one evaluation of one batch as a list of operations on values, without the values themselves.

Memory that an operation writes into gets a new value, so nothing on a tape is ever mutated: it is functional, although it
holds the very operations that ran, in-place ones included, and re-executing them gives the very same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsilent.engine.tape_values import StorageWindow

READBACK = "readback"


class Unrecordable(Exception):
    """Raised for an evaluation that cannot be put on a tape; the message says why."""


class ArgumentSlot(NamedTuple):
    """Where an argument takes a tensor: position or keyword, and the place in a list there (-1: not in a list)."""

    key: int | str
    inner: int


class Write(NamedTuple):
    """Memory that an operation writes into: value before, value after."""

    old: int
    new: int


@dataclass(slots=True, eq=False)
class Node:
    """One operation. ``func`` None: not an operation but a place where Python reads ``reads[0]`` back unseen."""

    index: int
    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: tuple[ArgumentSlot, ...]
    reads: tuple[StorageWindow, ...]
    writes: tuple[Write, ...] = ()
    results: tuple[Any, ...] = ()
    """Flattened results: a `Window` for a tensor, the value itself for what Python gets to see (a number, None)."""
    written: frozenset[int] = frozenset()
    """Places in ``reads`` of those that it writes into."""
    shared_arguments: tuple[tuple[int, int], ...] = ()
    """Arguments that were the very same tensor: an operation may ask whether query is key."""
    generator: tuple[Tensor, Tensor] | None = None
    """State of torch's generator before and after, where the operation draws random numbers."""
    new_values: tuple[int, ...] = ()
    """Values that exist since this operation, written ones included."""
    seconds: float = 0.0
    values: frozenset[int] = field(init=False)
    """Values it reads."""

    def __post_init__(self) -> None:
        self.values = frozenset(w.value for w in self.reads)


@dataclass(slots=True, eq=False)
class Value:
    """The content of some memory from one write to the next."""

    index: int
    producer: int | None
    """The operation that made it; None: it was there before (a parameter, an input, a constant)."""
    nbytes: int
    storage_window: StorageWindow
    readers: list[int] = field(default_factory=list)
    last: int = -1
    """The last operation that reads it, -1 if none."""
    output: bool = False


class FaultEntryPoint(NamedTuple):
    """Where a fault enters: from operation ``position`` on, ``window`` is corrupted."""

    position: int
    window: StorageWindow


@dataclass(eq=False)
class Tape:
    """The operations of one evaluation, and the values they read and wrote.

    ``externals``: tensors that were there before, by value; parameters are the live ones. ``output``: what the run
    returned, ``output_tensors``: the tensors in it, and the windows that they are. ``device``: where the generator states belong.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    externals: dict[int, Tensor] = field(default_factory=dict)
    by_storage: dict[int, int] = field(default_factory=dict)
    """Value of each external storage, by its data pointer."""
    unexplained: list[int] = field(default_factory=list)
    """Externals that appeared from nowhere: what operations that cannot be seen may have made of the parameters."""
    inputs: dict[str, FaultEntryPoint] = field(default_factory=dict)
    caches: dict[tuple[str, int], FaultEntryPoint] = field(default_factory=dict)
    """Entries of the key/value cache by name and number of the call."""
    output: Any = None
    output_tensors: list[tuple[Tensor, StorageWindow]] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def by_name(self) -> dict[str, int]:
        """Operations by name."""
        return {n.name: n.index for n in self.nodes if n.func is not None}


def default_generator_of(device: torch.device) -> torch.Generator:
    """The global generator that operations on a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def flatten(result: Any) -> Iterator[Any]:
    """The parts of an operation's result."""
    if isinstance(result, (tuple, list)):
        for part in result:
            yield from flatten(part)
    else:
        yield result


def restore_shared_arguments(node: Node, tensors: list[Tensor]) -> None:
    """Arguments that were one tensor are one again."""
    for k, first in node.shared_arguments:
        tensors[k] = tensors[first]
