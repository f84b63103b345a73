"""A recorded job: the operations of all ranks as arrays, and the dependencies between them.

Readers of all trace formats produce it. An operation begins once all operations that it depends on have ended, and takes its
duration. Operations with the same collective number wait for each other: none of them ends before the last one has begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COMPUTE, COLLECTIVE, COPY, HOST = range(4)
KINDS = ("compute", "collective", "copy", "host")
"""Kinds of operations: computation (on a device, or on the host if training runs there), part in a collective or in a message
between two ranks, memory copy, and other work of the host."""

OTHER, LOADER, FORWARD, BACKWARD, OPTIMIZER = range(5)
PHASES = ("other", "loader", "forward", "backward", "optimizer")
"""Parts of a step."""

CHAIN, LAUNCH, WAIT, PIPELINE = range(4)
EDGE_KINDS = ("chain", "launch", "wait", "pipeline")
"""Reasons why an operation waits for another one: it follows in the same thread or stream; it was launched by the other one;
its thread or stream waited for the other one; or it needs the other one's result or message."""


class Lane(NamedTuple):
    """A thread or a stream of a device, which runs one operation at a time.

    Attributes:
        rank: Rank that it belongs to.
        name: Displayed name, for example ``thread 123`` or ``stream 7``.
        is_device: Whether it is a stream of a device.
    """

    rank: int
    name: str
    is_device: bool


@dataclass(frozen=True)
class Operations:
    """Operations of all ranks as arrays with n elements each, ordered by rank and start.

    Attributes:
        rank: Rank, int32.
        lane: Index in `Job.lanes`, int32. Operations of a lane do not overlap.
        name: Index in ``names``, int32.
        kind: One of `KINDS`, int8.
        phase: One of `PHASES`, int8.
        step: Index in `Job.steps`, int32; -1: outside of steps.
        start: Seconds since the job's begin, float64.
        duration: Seconds, float64.
        collective: Number of the collective or message, int32; -1: none.
        size: Bytes of a collective's payload on this rank, int64; -1: unknown.
        item_bytes: Bytes of one number of that payload, int8; -1: unknown.
        names: Names of operations.
    """

    rank: NDArray[np.int32]
    lane: NDArray[np.int32]
    name: NDArray[np.int32]
    kind: NDArray[np.int8]
    phase: NDArray[np.int8]
    step: NDArray[np.int32]
    start: NDArray[np.float64]
    duration: NDArray[np.float64]
    collective: NDArray[np.int32]
    size: NDArray[np.int64]
    item_bytes: NDArray[np.int8]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def end(self) -> NDArray[np.float64]:
        """End of each operation in seconds since the job's begin, float64[n]."""
        return self.start + self.duration


@dataclass(frozen=True)
class Edges:
    """Dependencies as arrays with m elements each: ``target`` begins once ``source`` has ended.

    Attributes:
        source, target: Indices of operations, int32.
        kind: One of `EDGE_KINDS`, int8.
    """

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    kind: NDArray[np.int8]

    @classmethod
    def none(cls) -> Edges:
        """An empty set of dependencies."""
        return cls(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int8))


class Gradients(NamedTuple):
    """Steps, times and sizes of a rank's gradients, in the order in which they became ready.

    Attributes:
        step: Index in the steps of the recording, int32.
        ready: Seconds since the recording's begin, float64.
        size: Bytes; -1: unknown, int64.
    """

    step: NDArray[np.int32]
    ready: NDArray[np.float64]
    size: NDArray[np.int64]


class Parts(NamedTuple):
    """Named parts of a rank's forward passes, with the times of their forward and backward passes.

    Attributes:
        name: Index in `Operations.names`, int32[k].
        times: Seconds since the recording's begin: begin and end of each part, and of its backward pass, float64[k, 4].
    """

    name: NDArray[np.int32]
    times: NDArray[np.float64]

    @classmethod
    def none(cls) -> Parts:
        """An empty set of parts."""
        return cls(np.empty(0, np.int32), np.empty((0, 4)))


@dataclass(frozen=True)
class Job:
    """The recorded operations of a job.

    Attributes:
        operations: Operations of all ranks.
        edges: Dependencies between operations.
        lanes: Threads and streams.
        steps: Number of each complete step, as counted in the trace.
        stages: Pipeline stage by rank; empty if there is no pipeline.
        world_size: Number of ranks of the job, some of which may not have been recorded.
        notes: Notes for the reader about the trace, one sentence each.
        step_times: Begin and end of each step in seconds, by rank, float64[steps, 2]; empty if they follow only from
            operations.
        gradients: Times at which gradients became ready, by rank; empty if the trace does not contain them.
        memory: Rows by rank, for ranks that recorded memory: seconds since the job's begin, allocated bytes, bytes that were
            added (or freed, if negative) and their address, float64[k, 4]. The last two are 0 if the trace lacks them.
        parts: Named parts of forward passes, for ranks with memory.
    """

    operations: Operations
    edges: Edges
    lanes: tuple[Lane, ...]
    steps: tuple[int, ...]
    stages: dict[int, int] = field(default_factory=dict)
    world_size: int = 0
    notes: tuple[str, ...] = ()
    step_times: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    memory: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    parts: dict[int, Parts] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that were recorded."""
        return tuple(int(rank) for rank in np.unique(self.operations.rank))
