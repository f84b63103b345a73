"""A recorded job: the operations of all ranks as arrays, and the dependencies between them.

Readers make it, of whatever trace. An operation begins once all operations that it depends on have ended, and takes its duration.
Operations with the same collective number wait for each other: none of them ends before the last one has begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COMPUTE, COLLECTIVE, COPY, HOST = range(4)
KINDS = ("compute", "collective", "copy", "host")
"""Kinds of operations: computes (on a device, or on the host where it trains there), takes part in a collective or a message
between two ranks, copies memory, or keeps the host busy."""

OTHER, LOADER, FORWARD, BACKWARD, OPTIMIZER = range(5)
PHASES = ("other", "loader", "forward", "backward", "optimizer")
"""Parts of a step."""

CHAIN, LAUNCH, WAIT, PIPELINE = range(4)
EDGE_KINDS = ("chain", "launch", "wait", "pipeline")
"""Why an operation waits for another one: it follows in the same thread or stream; it was launched by it; its thread or stream
waited for it; or it needs what it computed or sent."""


class Lane(NamedTuple):
    """A thread or a stream of a device, which runs one operation at a time.

    Attributes:
        rank: Rank that it belongs to.
        name: Name for people, like ``thread 123`` or ``stream 7``.
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
        step: Index in `Job.steps`, int32; -1: of none.
        start: Seconds since the job's begin, float64.
        duration: Seconds, float64.
        collective: Number of the collective or message, int32; -1: of none.
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
        edges: Their dependencies.
        lanes: Threads and streams.
        steps: Number of each complete step, as the trace counts.
        stages: Pipeline stage by rank; empty where there is no pipeline.
        world_size: Ranks of the job, of which some may not have been recorded.
        notes: Notes for the reader about the trace, one sentence each.
        step_times: Begin and end of each step in seconds, by rank, float64[steps, 2]; empty where operations alone tell.
        gradients: When they were ready, by rank; empty where the trace does not tell.
        memory: Rows by rank: seconds since the job's begin, allocated bytes, bytes that were added (or freed, if negative) and
            their address, float64[k, 4]; of ranks that recorded them. The last two are 0 where the trace does not say them.
        parts: Named parts of forward passes, of ranks with memory.
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
