"""Reads the needed events of one rank's trace as arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.timeline.json_stream import Arguments, Event, TraceFile, kept_arguments

CPU_OP, ANNOTATION, RUNTIME, KERNEL, MEMORY = range(5)
_CATEGORIES = {
    "cpu_op": CPU_OP, "user_annotation": ANNOTATION, "cuda_runtime": RUNTIME, "cuda_driver": RUNTIME, "hip_runtime": RUNTIME,
    "python_function": ANNOTATION,
    "kernel": KERNEL, "gpu_memcpy": MEMORY, "gpu_memset": MEMORY, "mtia_runtime": RUNTIME, "mtia_ccp_events": KERNEL,
}  # fmt: skip
MOST_EVENTS, MOST_NAMES, MOST_RANKS = 2**25, 2**20, 2**20
_LONGEST_NAME = 200
_MOST_TIME = 1e17
"""Microseconds: 3,000 years."""
MODULE = "nn.Module: "
"""Prefix of the names of those Python functions that are used: calls of modules (``with_stack=True``)."""
GRADIENT = "torch::autograd::AccumulateGrad"
_HAS_DETAILS = re.compile(rf"gloo:|nccl:|{GRADIENT}$")
_RANK = re.compile(r"rank\D?(\d{1,7})(?!\d)", re.IGNORECASE)
_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "long int": 8, "long": 8, "int": 4, "short int": 2, "short": 2,
    "unsigned char": 1, "signed char": 1, "char": 1, "byte": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
T = TypeVar("T")


class Numbering(dict[T, int]):
    """Numbers keys in the order of their first use; ``shown`` holds the text of each."""

    def __init__(self, text: Callable[[T], str]) -> None:
        super().__init__()
        self._text = text
        self.shown: list[str] = []

    def __missing__(self, key: T) -> int:
        text = self._text(key)
        if len(self) >= MOST_NAMES:
            raise ValueError("too many names")
        self[key] = len(self)
        self.shown.append(text)
        return self[key]


def make_names() -> Numbering[Any]:
    """An empty numbering of event names, which raises ``TypeError`` for anything but text."""

    def text(name: Any) -> str:
        if not isinstance(name, str):
            raise TypeError
        return escape_unprintable(name[:_LONGEST_NAME])

    return Numbering(text)


@dataclass
class RankTrace:
    """The trace of one rank, as arrays with an element for each event.

    Attributes:
        name: Name of the file.
        rank, world_size: Rank, and number of ranks of the job; a world size of 0 is unknown.
        distributed: Facts on the job in the trace.
        base: Unix time in nanoseconds from which times are counted.
        anchors: Rows of Unix seconds, offset and bound of the rank's clock, float64[k, 3].
        start, duration: Microseconds, float64.
        event_name: Index of each event's name, int32.
        category: One of `CPU_OP` …, int8.
        thread: Index in ``threads``, int32.
        correlation: Number that a launch shares with the launched operation; -1: none, int64.
        node: Number that an operation of a forward pass shares with its backward pass; -1: none, int64.
        details: Arguments of collectives and gradients, by event.
        threads: Names of threads and streams.
        memory: Rows of microseconds, allocated bytes, bytes that were added (or freed, if negative) and their address,
            float64[k, 4]; for the device if there is one. Values missing in an event are 0.
        notes: Notes for the reader.
    """

    name: str
    rank: int
    world_size: int
    distributed: dict[str, Any]
    base: int
    anchors: NDArray[np.float64]
    start: NDArray[np.float64]
    duration: NDArray[np.float64]
    event_name: NDArray[np.int32]
    category: NDArray[np.int8]
    thread: NDArray[np.int32]
    correlation: NDArray[np.int64]
    node: NDArray[np.int64]
    details: dict[int, Arguments]
    threads: list[str]
    memory: NDArray[np.float64]
    notes: list[str] = field(default_factory=list)

    @property
    def end(self) -> NDArray[np.float64]:
        """End of each event in microseconds, float64."""
        return self.start + self.duration


def read_rank_trace(path: Path, names: Numbering[Any], is_only: bool) -> RankTrace | None:
    """The trace of one rank, or None if the file is a dump of the flight recorder.

    Args:
        path: Path of the file.
        names: Names of events, numbered over all ranks.
        is_only: Whether this is the only trace, which may lack a rank.

    Raises:
        UsageError: The file is not a trace.
    """
    trace = TraceFile(path)
    threads: Numbering[Any] = Numbering(lambda key: escape_unprintable(str(key[1])[:40]))
    parts, details, count = [_columns([], names, threads)], dict[int, Arguments](), 0
    memory = [np.empty((0, 5))]
    try:
        for chunk in trace.chunks():
            events = [
                event for event in chunk if event.ph == "X" and type(event.cat) is str and event.cat in _CATEGORIES
            ]
            events = [event for event in events if event.cat != "python_function" or str(event.name).startswith(MODULE)]
            parts.append(_columns(events, names, threads))
            for number, event in enumerate(events, count):
                if event.args.collective is not None or _HAS_DETAILS.match(event.name):
                    details[number] = kept_arguments(event.args)
            count += len(events)
            allocations = [event for event in chunk if event.name == "[memory]" and _is_memory(event)]
            memory.append(np.array([_memory_row(event) for event in allocations], float).reshape(-1, 5))
            if count + sum(map(len, memory)) > MOST_EVENTS:
                raise UsageError(
                    f"{trace.name} has more than {MOST_EVENTS:,} events that are of use; record fewer steps"
                )
    except UsageError:
        # Dumps of the flight recorder are JSON as well, and may lie in the folder of the traces.
        if {"pg_status", "entries"} <= trace.fields.keys():
            return None
        raise
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{trace.name} has a damaged name, time or thread among its first {count + 2**16:,} events; record it again"
        ) from None
    if not count:
        raise UsageError(
            f"{trace.name} has no event of PyTorch's profiler ({', '.join(list(_CATEGORIES)[:2])}, kernel …); "
            "give traces of torch.profiler"
        )
    start, duration, event_name, category, thread, correlation, node = map(np.concatenate, zip(*parts, strict=True))
    notes: list[str] = []
    distributed = trace.fields.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank = _rank(trace, distributed, is_only, notes)
    base, anchors = trace.fields.get("baseTimeNanoseconds", 0), _anchors(trace)
    if not _is_count(base, 2**63):
        raise UsageError(f"{trace.name}: its baseTimeNanoseconds is no time; record it again")
    world_size = distributed.get("world_size", 0)
    if not _is_count(world_size, MOST_RANKS):
        raise UsageError(f"{trace.name}: its distributedInfo names no possible number of ranks; record it again")
    return RankTrace(
        trace.name, rank, world_size, distributed, base, anchors, start, duration, event_name, category, thread, correlation,
        node, details, threads.shown, _of_device(np.concatenate(memory)), notes,
    )  # fmt: skip


def _columns(events: Sequence[Event], names: Numbering[Any], threads: Numbering[Any]) -> tuple[NDArray[Any], ...]:
    """The values of some events as arrays.

    Raises ``TypeError``, ``ValueError`` or ``OverflowError`` if an event is damaged.
    """
    start, duration = (np.array([getattr(event, key) for event in events], float) for key in ("ts", "dur"))
    if not ((np.abs(start) < _MOST_TIME) & (duration >= 0) & (duration < _MOST_TIME)).all():
        raise ValueError
    numbers = ([getattr(event.args, key) for event in events] for key in ("correlation", "node"))
    return (
        start, duration,
        np.array([names[event.name] for event in events], np.int32),
        np.array([_CATEGORIES[event.cat] for event in events], np.int8),
        np.array([threads[event.pid, event.tid] for event in events], np.int32),
        *(np.array([number if type(number) is int and 0 <= number < 2**62 else -1 for number in of], np.int64) for of in numbers),
    )  # fmt: skip


def _of_device(memory: NDArray[np.float64]) -> NDArray[np.float64]:
    """Memory events of the device, or of the host if there are none, without the column that tells them apart.

    The last column is 1 for events of a device.
    """
    return memory[memory[:, 4] == memory[:, 4].max(initial=0), :4]


def _memory_row(event: Event) -> tuple[Any, ...]:
    """A row for `RankTrace.memory`, and whether it belongs to a device."""
    of = event.args
    is_known = type(of.bytes) is int and abs(of.bytes) < 2**60 and _is_count(of.address, 2**53)
    return event.ts, of.allocated, *((of.bytes, of.address) if is_known else (0, 0)), of.device_type != 0


def _is_memory(event: Event) -> bool:
    """Whether an event has a valid time and number of allocated bytes."""
    is_timed = type(event.ts) in (int, float) and abs(event.ts) < _MOST_TIME
    return is_timed and _is_count(event.args.allocated, 2**60)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _rank(trace: TraceFile, distributed: dict[str, Any], is_only: bool, notes: list[str]) -> int:
    rank: Any = distributed.get("rank")
    if _is_count(rank, MOST_RANKS):
        return int(rank)
    if match := _RANK.search(trace.name):
        notes.append(f"{trace.name} does not say its rank; {int(match[1])} was taken from its name")
        return int(match[1])
    if is_only:
        notes.append(f"{trace.name} says neither its rank nor the number of ranks; it was read as rank 0")
        return 0
    raise UsageError(
        f"{trace.name} does not say its rank; expected distributedInfo in it or rankN in its name; rename it"
    )


def _anchors(trace: TraceFile) -> NDArray[np.float64]:
    """The measured clock offsets in a trace: rows of Unix seconds, offset and error bound in seconds."""
    try:
        rows = np.array(trace.fields.get("unsilent_clock") or np.empty((0, 3)), float)
        if rows.ndim == 2 and rows.shape[1] == 3 and np.isfinite(rows).all() and (np.abs(rows) < _MOST_TIME).all():
            return rows
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(
        f"{trace.name}: its unsilent_clock is damaged; expected rows of seconds, offset and bound; record it again"
    )


def payload_bytes(arguments: Arguments) -> int:
    """Bytes of the tensors that an event names, or -1 if they are unknown."""
    if type(arguments.elements) is int and isinstance(arguments.dtype, str):
        return _count_in_range(arguments.elements * _bytes(arguments.dtype))
    types, dimensions = arguments.input_type, arguments.input_dims
    if not isinstance(types, list) or not isinstance(dimensions, list) or len(types) != len(dimensions):
        return -1
    pairs = [(kind, size) for kind, size in zip(types, dimensions, strict=True) if isinstance(size, list) and size]
    total = 0
    for kind, size in pairs:
        if not isinstance(kind, str) or len(size) > 64 or not all(_is_count(length, 2**40) for length in size):
            return -1
        part = _count_in_range(math.prod(size) * _bytes(kind))
        if part < 0:
            return -1
        total += part
    return _count_in_range(total) if pairs else -1


def item_bytes(arguments: Arguments) -> int:
    """Bytes of one number of the tensors that an event names, or -1 if they are unknown or differ."""
    if isinstance(arguments.dtype, str):
        return _bytes(arguments.dtype)
    types = arguments.input_type if isinstance(arguments.input_type, list) else []
    sizes = {_bytes(name) for name in types if isinstance(name, str)} - {-1}
    return sizes.pop() if len(sizes) == 1 else -1


def _bytes(dtype: str) -> int:
    return _BYTES.get(dtype.removeprefix("c10::").lower(), -1)


def _count_in_range(count: int) -> int:
    return count if 0 <= count < 2**62 else -1
