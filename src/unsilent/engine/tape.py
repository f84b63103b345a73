"""The tape: a list of the operations in one evaluation of one batch, without the values they compute.

Memory that an operation writes into gets a new value, so no value on a tape is ever changed. The tape is functional,
although it holds the operations that ran, including in-place ones, and re-executing them gives the same bits.

A value is the content of a piece of memory between two writes to it; tensors are *windows* on values. A view needs no
operation of its own: it is another window on the same memory. Corruption is therefore tracked by storage, independent
of views.

Two tapes, or two operations, have the same structure if test results for one are valid for the other: kernels are
chosen by shapes, strides, data types, arguments and the alignment of memory, not by the numbers in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

Holders = dict[int, Tensor]
"""A tensor on the memory of each value, by value (its home window)."""


class Diverged(Exception):
    """Raised when a faulty run may differ from the operations on the tape; the message says where."""


class StorageWindow(NamedTuple):
    """Description of a tensor as a strided view of a value's memory.

    Strides and offset count elements.
    """

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def window_of(tensor: Tensor, value: int) -> StorageWindow:
    """The description of a tensor as a strided view of a value."""
    return StorageWindow(value, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def fits(tensor: Tensor, window: StorageWindow) -> bool:
    """Whether a tensor has the dtype, shape, strides and offset of a window."""
    return (
        tensor.shape == window.shape
        and tensor.dtype == window.dtype
        and tensor.stride() == window.stride
        and tensor.storage_offset() == window.offset
    )


def view_window(holder: Tensor, window: StorageWindow) -> Tensor:
    """The view ``window`` of the storage of ``holder``."""
    if holder.dtype == window.dtype:
        return holder.as_strided(window.shape, window.stride, window.offset)
    return _tensor_on(holder.untyped_storage(), holder, window)


def tensor_at_window(holder: Tensor, window: StorageWindow) -> Tensor:
    """The view ``window`` of the storage of ``holder``, or ``holder`` itself if it is that view.

    ``holder`` itself if it has that form.
    """
    return holder if fits(holder, window) else view_window(holder, window)


def private_copy(tensor: Tensor) -> Tensor:
    """A copy of the tensor together with its whole storage."""
    return _tensor_on(tensor.untyped_storage().clone(), tensor, window_of(tensor, -1))


def _tensor_on(storage: torch.UntypedStorage, like: Tensor, window: StorageWindow) -> Tensor:
    empty = torch.empty(0, dtype=window.dtype, device=like.device)
    return empty.set_(storage, window.offset, window.shape, window.stride)


def words_of_storage(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as integers.

    The integers are as wide as the size allows, because wide integers are compared faster.
    """
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    dtype, width = (torch.int64, 8) if size % 8 == 0 else (torch.int32, 4) if size % 4 == 0 else (torch.uint8, 1)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (size // width,), (1,))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether the storages of two tensors have the same bits.

    -0 differs from 0, and a NaN equals itself.
    """
    return torch.equal(words_of_storage(first), words_of_storage(second))


READBACK = "readback"


class Unrecordable(Exception):
    """Raised for an evaluation that cannot be put on a tape; the message says why."""


class ArgumentSlot(NamedTuple):
    """The position of a tensor among an operation's arguments.

    It is a position or keyword, and the index in a list there (-1: not in a list).
    """

    key: int | str
    inner: int


class Write(NamedTuple):
    """Memory that an operation writes into, as the number of its value before and after the write."""

    old: int
    new: int


@dataclass(slots=True, eq=False)
class Node:
    """One operation on a tape.

    If ``func`` is None, the node is a place at which Python reads ``reads[0]`` without an operation.
    """

    index: int
    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: tuple[ArgumentSlot, ...]
    reads: tuple[StorageWindow, ...]
    writes: tuple[Write, ...] = ()
    results: tuple[Any, ...] = ()
    """Flattened results: a `Window` for a tensor, the value itself for what Python receives (a number, None)."""
    written: frozenset[int] = frozenset()
    """Indices in ``reads`` of the values that the operation writes into."""
    shared_arguments: tuple[tuple[int, int], ...] = ()
    """Pairs of arguments that were the same tensor object: an operation may test whether query is key."""
    generator: tuple[Tensor, Tensor] | None = None
    """State of torch's generator before and after, if the operation draws random numbers."""
    new_values: tuple[int, ...] = ()
    """Values that this operation makes, including those that it writes."""
    seconds: float = 0.0
    values: frozenset[int] = field(init=False)
    """Values that the operation reads."""

    def __post_init__(self) -> None:
        self.values = frozenset(w.value for w in self.reads)


@dataclass(slots=True, eq=False)
class Value:
    """The content of some memory between two writes into it."""

    index: int
    producer: int | None
    """The operation that made the value; None if it existed before (a parameter, an input, a constant)."""
    nbytes: int
    storage_window: StorageWindow
    readers: list[int] = field(default_factory=list)
    last: int = -1
    """The last operation that reads the value; -1 if there is none."""
    output: bool = False


class FaultEntryPoint(NamedTuple):
    """A place for a fault on a tape: from operation ``position`` on, ``window`` is corrupted."""

    position: int
    window: StorageWindow


@dataclass(eq=False)
class Tape:
    """The operations of one evaluation, and the values they read and wrote.

    ``externals``: tensors that existed before, by value; parameters are the model's own tensors. ``output``: the result
    of the run. ``output_tensors``: the tensors in it, with their windows. ``device``: device of the generator states.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    externals: dict[int, Tensor] = field(default_factory=dict)
    by_storage: dict[int, int] = field(default_factory=dict)
    """Value of each external storage, by its data pointer."""
    unexplained: list[int] = field(default_factory=list)
    """Externals of unknown origin, which unseen operations may have computed from the parameters."""
    inputs: dict[str, FaultEntryPoint] = field(default_factory=dict)
    caches: dict[tuple[str, int], FaultEntryPoint] = field(default_factory=dict)
    """Entries of the key/value cache by name and number of the call."""
    output: Any = None
    output_tensors: list[tuple[Tensor, StorageWindow]] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def by_name(self) -> dict[str, int]:
        """The index of each operation by its name."""
        return {n.name: n.index for n in self.nodes if n.func is not None}


def default_generator_of(device: torch.device) -> torch.Generator:
    """The global generator that operations on a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def flatten(result: Any) -> Iterator[Any]:
    """The tensors and other values in an operation's result."""
    if isinstance(result, (tuple, list)):
        for part in result:
            yield from flatten(part)
    else:
        yield result


def restore_shared_arguments(node: Node, tensors: list[Tensor]) -> None:
    """Replace equal arguments by the same tensor object if they were one object in the recorded run."""
    for k, first in node.shared_arguments:
        tensors[k] = tensors[first]


ALIGNMENT = 64
"""Alignment in bytes; kernels may treat memory differently if it does not start at a multiple of this."""


def structure_of(tape: Tape) -> str:
    """A hash of the structure of a tape.

    Equal for batches of the same shape that run the same operations.
    """
    digest = xxhash.xxh3_128(repr((tape.device, sorted(tape.inputs.items()), sorted(tape.caches.items()))).encode())
    for node in tape.nodes:
        content = (node.name, *_call(node), node.reads, node.writes, node.results, node.new_values)
        digest.update(repr(content).encode())
    for value in tape.values:
        place = _alignment(tape, value.index)
        digest.update(repr((value.producer, value.nbytes, value.storage_window, value.output, place)).encode())
    digest.update(repr([window for _, window in tape.output_tensors]).encode())
    return digest.hexdigest()


def kind_of_operation(tape: Tape, node: Node, note: Callable[[int], Any]) -> object:
    """A key that is equal for operations which call the same kernel on memory with the same layout.

    ``note``: a function that returns other relevant properties of a value.
    """
    numbers = {v: i for i, v in enumerate(dict.fromkeys([w.value for w in node.reads] + [*node.new_values]))}
    values = [
        (tape.values[v].nbytes, tape.values[v].storage_window._replace(value=0), _alignment(tape, v), note(v))
        for v in numbers
    ]
    seen = (*node.reads, *node.results)
    windows = [w._replace(value=numbers.get(w.value, -1)) if isinstance(w, StorageWindow) else w for w in seen]
    writes = [(numbers[w.old], numbers[w.new]) for w in node.writes]
    return repr((*_call(node), windows, writes, values))


def _call(node: Node) -> tuple[object, ...]:
    drawn = node.generator is not None
    return str(node.func), node.args, node.kwargs, node.slots, node.written, node.shared_arguments, drawn


def _alignment(tape: Tape, value: int) -> int:
    external = tape.externals.get(value)
    return -1 if external is None else external.untyped_storage().data_ptr() % ALIGNMENT
