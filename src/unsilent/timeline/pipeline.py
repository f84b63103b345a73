"""Dependencies between the operations of a step with data and pipeline parallelism.

On each worker, computations follow each other, and so do messages of the same kind. A computation waits for its input, and its
output is then sent. A receive is posted once the worker's thread reaches it. After the last computation, gradients are reduced,
clipped and applied. Between workers, a send and its receive wait for each other, and so do all ranks of a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.timeline.job import (
    BACKWARD,
    CHAIN,
    COLLECTIVE,
    COMPUTE,
    FORWARD,
    HOST,
    LAUNCH,
    OPTIMIZER,
    OTHER,
    PIPELINE,
)  # fmt: skip

ALONE, STEP = "", "step"
WITHIN, ACROSS = "one data-parallel rank", "one stage"


class OperationType(NamedTuple):
    """A type of operation: name, kind and phase as in `Operations`, and lane as in `LANES`.

    ``waits`` selects the operations of one step with this name and number that wait for each other; for messages, see
    `_pair_messages`.
    """

    name: str
    kind: int
    phase: int
    lane: int = 0
    waits: str = ALONE


LANES = ("compute", "forward send", "forward receive", "backward send", "backward receive", "data parallel")
TYPES = (
    OperationType("forward-compute", COMPUTE, FORWARD),
    OperationType("backward-compute", COMPUTE, BACKWARD),
    OperationType("forward-send", COLLECTIVE, FORWARD, 1),
    OperationType("forward-recv", COLLECTIVE, FORWARD, 2),
    OperationType("backward-send", COLLECTIVE, BACKWARD, 3),
    OperationType("backward-recv", COLLECTIVE, BACKWARD, 4),
    OperationType("params-all-gather", COLLECTIVE, OTHER, 5, ACROSS),
    OperationType("grads-reduce-scatter", COLLECTIVE, OTHER, 5, ACROSS),
    OperationType("gc", HOST, OTHER),
    OperationType("layernorm-grads-all-reduce", COLLECTIVE, OTHER),
    OperationType("embedding-grads-all-reduce", COLLECTIVE, OTHER, 0, WITHIN),
    OperationType("separate-grads-all-reduce", COLLECTIVE, OTHER, 0, ACROSS),
    OperationType("optimizer-clip-main-grad", COLLECTIVE, OPTIMIZER, 0, STEP),
    OperationType("optimizer", COMPUTE, OPTIMIZER),
)  # fmt: skip
"""Reductions over ranks of tensor parallelism (layernorm) have one recorded rank, so they wait for no other rank."""
(FORWARD_COMPUTE, BACKWARD_COMPUTE, FORWARD_SEND, FORWARD_RECEIVE, BACKWARD_SEND, BACKWARD_RECEIVE, GATHER, SCATTER,
 GC, LAYERNORM, EMBEDDING, SEPARATE, CLIP, OPTIMIZE) = range(len(TYPES))  # fmt: skip
CLOCK_ERROR = 5e-5
"""Seconds by which times that should be equal may differ."""

Edge = tuple[int, int, int]


class Pattern(NamedTuple):
    """The operations that each data-parallel rank runs in each step, as arrays ordered by stage.

    Attributes:
        stage, type: Stage and type of each operation, int64.
        number: Recorded number of each operation among those with its worker and type.
        chunk, model_chunk: Part of the model on the worker, and in the model; -1: none.
        start, end: Typical seconds since the step's begin, float64.
    """

    stage: NDArray[np.int64]
    type: NDArray[np.int64]
    number: NDArray[np.int64]
    chunk: NDArray[np.int64]
    model_chunk: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]


def dependencies(pattern: Pattern) -> tuple[list[Edge], list[list[int]]]:
    """The dependencies between the operations of a pipeline step, and its pairs of send and receive.

    A dependency is (source, target, kind).

    Raises:
        UsageError: Messages do not match the computations.
    """
    edges: list[Edge] = []
    messages: dict[tuple[int, int], list[int]] = {}
    overlapped = bool(np.any(pattern.type == SEPARATE))
    last_chunk = int(pattern.model_chunk.max())
    for stage in range(int(pattern.stage.max()) + 1):
        worker = _Worker(pattern, stage)
        edges += worker.chains()
        edges += worker.gathers_and_scatters(overlapped)
        edges += worker.after_last_computation(overlapped)
        for kind in (FORWARD_SEND, FORWARD_RECEIVE, BACKWARD_SEND, BACKWARD_RECEIVE):
            outer = 0 if kind in (FORWARD_RECEIVE, BACKWARD_SEND) else last_chunk
            matched = worker.matched_messages(kind, outer)
            edges += worker.message_edges(kind, matched)
            messages[stage, kind] = [
                message for message, computation in matched if pattern.model_chunk[computation] != outer
            ]
    return edges, _pair_messages(messages, int(pattern.stage.max()) + 1)


def _pair_messages(messages: dict[tuple[int, int], list[int]], stages: int) -> list[list[int]]:
    """Pairs of a send of one stage and its receive on the neighbouring stage, matched by their order."""
    pairs = []
    for send, receive, to in ((FORWARD_SEND, FORWARD_RECEIVE, 1), (BACKWARD_SEND, BACKWARD_RECEIVE, -1)):
        for stage in range(stages):
            peer = (stage + to) % stages
            sent, received = messages[stage, send], messages[peer, receive]
            if len(sent) != len(received):
                raise UsageError(
                    f"stage {stage} sends {len(sent):,} messages ({TYPES[send].name}) and stage {peer} receives "
                    f"{len(received):,}; expected as many; check that the trace is complete"
                )
            pairs += [list(pair) for pair in zip(sent, received, strict=True)]
    return pairs


class _Worker:
    """Operations of one stage, in the order of their starts."""

    def __init__(self, pattern: Pattern, stage: int) -> None:
        self.pattern, self.stage = pattern, stage
        of_stage = np.arange(*np.searchsorted(pattern.stage, (stage, stage + 1)))
        of_stage = of_stage[np.lexsort((pattern.type[of_stage], pattern.number[of_stage], pattern.start[of_stage]))]
        self._by_type = [of_stage[pattern.type[of_stage] == kind].tolist() for kind in range(len(TYPES))]
        computes = (FORWARD_COMPUTE, BACKWARD_COMPUTE)
        self.computations: list[int] = of_stage[np.isin(pattern.type[of_stage], computes)].tolist()
        self.data_parallel: list[int] = of_stage[np.isin(pattern.type[of_stage], (GATHER, SCATTER))].tolist()
        if not self.computations:
            raise UsageError(
                f"stage {stage} computes nothing; expected {TYPES[0].name} and {TYPES[1].name} of each stage"
            )

    def of(self, kind: int) -> list[int]:
        """Operations of the given type in the order of their starts."""
        operations: list[int] = self._by_type[kind]
        return operations

    def chains(self) -> Iterator[Edge]:
        """Edges between operations that run one after the other."""
        kinds = (FORWARD_SEND, FORWARD_RECEIVE, BACKWARD_SEND, BACKWARD_RECEIVE)
        for lane in (self.computations, self.data_parallel, *map(self.of, kinds)):
            yield from ((a, b, CHAIN) for a, b in pairwise(lane))

    def gathers_and_scatters(self, overlapped: bool) -> Iterator[Edge]:
        """Dependencies between gathers of parameters, computations, and scatters of gradients."""
        last_gather, first_forward = self._last_of_chunk(GATHER), self._first_of_chunk(FORWARD_COMPUTE)
        yield from ((last_gather[part], first_forward[part], PIPELINE) for part in last_gather.keys() & first_forward)
        if overlapped:
            last_backward, first_scatter = self._last_of_chunk(BACKWARD_COMPUTE), self._first_of_chunk(SCATTER)
            yield from (
                (last_backward[part], first_scatter[part], PIPELINE) for part in last_backward.keys() & first_scatter
            )

    def _last_of_chunk(self, kind: int) -> dict[int, int]:
        """The last operation of the given type in each part of the model."""
        return {int(self.pattern.chunk[operation]): operation for operation in self.of(kind)}

    def _first_of_chunk(self, kind: int) -> dict[int, int]:
        return {int(self.pattern.chunk[operation]): operation for operation in reversed(self.of(kind))}

    def after_last_computation(self, overlapped: bool) -> Iterator[Edge]:
        """Dependencies that chain the last computation, the reductions of gradients, and the update."""
        last = max(self.computations, key=lambda operation: self.pattern.end[operation])
        scatters = self.of(SCATTER)
        parts = (self.of(GC), self.of(LAYERNORM), self.of(EMBEDDING), [] if overlapped else scatters, self.of(SEPARATE),
                 self.of(CLIP), self.of(OPTIMIZE))  # fmt: skip
        chain = [last, *(operation for part in parts for operation in part)]
        yield from ((a, b, CHAIN) for a, b in pairwise(chain))
        if overlapped and scatters:
            after = [operation for operation in chain[1:] if self.pattern.type[operation] != GC]
            yield from ((scatters[-1], operation, CHAIN) for operation in after[:1])

    def matched_messages(self, kind: int, outer: int) -> list[tuple[int, int]]:
        """Pairs of a message of the given type and the computation that receives or produces it.

        Some recorders list messages that were never sent: messages before the first or after the last computation, and messages
        of the part ``outer`` of the model, which has no neighbour to receive from or to send to.
        """
        start, end = self.pattern.start, self.pattern.end
        is_receive = kind in (FORWARD_RECEIVE, BACKWARD_RECEIVE)
        computed = self.of(FORWARD_COMPUTE if kind in (FORWARD_SEND, FORWARD_RECEIVE) else BACKWARD_COMPUTE)
        messages = self.of(kind)
        if computed and is_receive:
            latest = max(start[operation] for operation in computed) + CLOCK_ERROR
            messages = [message for message in messages if start[message] <= latest]
        elif computed:
            earliest = min(end[operation] for operation in computed) - CLOCK_ERROR
            messages = [message for message in messages if end[message] >= earliest]
        inner = [operation for operation in computed if self.pattern.model_chunk[operation] != outer]
        if len(messages) == len(inner):
            computed = inner
        elif len(messages) == len(computed) - 1:  # the first one to receive, or the last one to send, has no partner
            computed = computed[1:] if is_receive else computed[:-1]
        if len(messages) != len(computed):
            raise UsageError(
                f"stage {self.stage} has {len(messages):,} operations {TYPES[kind].name}; expected {len(inner):,}, or "
                f"{len(computed):,} with those of the outer parts of the model; check that the trace is complete"
            )
        return list(zip(messages, computed, strict=True))

    def message_edges(self, kind: int, matched: Sequence[tuple[int, int]]) -> Iterator[Edge]:
        """Dependencies between messages of a type and their computations.

        A send waits for its computation, and a computation for its receive, which waits until it is posted.

        A receive is posted after the last of the computations before the receiving one that had typically ended when the
        receive started.
        """
        if kind in (FORWARD_SEND, BACKWARD_SEND):
            yield from ((computation, message, PIPELINE) for message, computation in matched)
            return
        ends = np.maximum.accumulate(self.pattern.end[self.computations])
        place = {operation: at for at, operation in enumerate(self.computations)}
        ended = np.searchsorted(ends, self.pattern.start[[m for m, _ in matched]] + CLOCK_ERROR, "right")
        for (message, computation), before in zip(matched, ended.tolist(), strict=True):
            yield message, computation, PIPELINE
            if before := min(before, place[computation]):
                yield self.computations[before - 1], message, LAUNCH
