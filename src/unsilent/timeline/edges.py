"""Finds dependencies between recorded operations from the order in which threads and streams ran them.

An operation depends on the one before it in its lane, and on the operation that launched it. If it begins after a gap in its
lane, it may have waited: a thread for another thread (for example gloo's, as no recorded operation waits for its collectives),
a synchronising call for streams of the device, and a stream for other streams. For each other lane, the last operation that
ended in the gap counts as waited for. No edge contradicts the recording: except for rounding, its source had ended when its
target began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unsilent.timeline.job import CHAIN, COLLECTIVE, LAUNCH, WAIT, Edges, Lane, Operations

Indices = NDArray[np.int32]
ROUNDING = 1e-9
"""Seconds by which an operation may begin before the end of one that it waited for, due to rounding in clock conversion."""
_SYNCHRONISES = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize")


def make_edges(operations: Operations, lanes: Sequence[Lane], launches: Indices) -> Edges:
    """Dependencies between the operations of each rank.

    Args:
        operations: Operations of all ranks. Those that wait for a device have been shortened by `cut_waits`.
        lanes: Threads and streams of the operations.
        launches: Launches: pairs of indices of the launching and the launched operation, int32[k, 2].
    """
    order = np.lexsort((operations.end, operations.start, operations.lane)).astype(np.int32)
    bounds = np.searchsorted(operations.lane[order], np.arange(len(lanes) + 1))
    by_lane = [order[begin:end] for begin, end in pairwise(bounds)]
    previous = np.full(len(operations), -1, np.int32)
    for lane_operations in by_lane:
        previous[lane_operations[1:]] = lane_operations[:-1]
    followers = np.flatnonzero(previous >= 0).astype(np.int32)
    parts = [(CHAIN, (previous[followers], followers)), (LAUNCH, _launch_edges(operations, launches, previous))]
    parts += [(WAIT, pair) for pair in _wait_edges(operations, lanes, by_lane)]
    return Edges(
        np.concatenate([source for _, (source, _) in parts]),
        np.concatenate([target for _, (_, target) in parts]),
        np.concatenate([np.full(len(source), kind, np.int8) for kind, (source, _) in parts]),
    )


def cut_waits(operations: Operations, lanes: Sequence[Lane], launches: Indices) -> tuple[Operations, Indices]:
    """Operations and launches, with each call that waits for a device shortened to the time after its wait.

    The wait becomes a gap that an edge explains. As a part of the duration, it would not become shorter with a faster device.
    """
    start, is_device = operations.start.copy(), np.array([lane.is_device for lane in lanes], bool)[operations.lane]
    calls = _synchronises(operations) & ~is_device
    for rank in np.unique(operations.rank[calls]):
        calls_of_rank = np.flatnonzero(calls & (operations.rank == rank))
        ends = np.sort(operations.end[is_device & (operations.rank == rank)])
        ended = np.searchsorted(ends, operations.end[calls_of_rank], side="right")
        last = np.append(-np.inf, ends)[ended]
        start[calls_of_rank] = np.clip(last, start[calls_of_rank], operations.end[calls_of_rank])
    order = np.lexsort((start, operations.rank))
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order))
    arrays = {
        field.name: getattr(operations, field.name)[order] for field in fields(operations) if field.name != "names"
    }
    arrays |= {"start": start[order], "duration": (operations.end - start)[order]}
    return replace(operations, **arrays), position[launches]


def _synchronises(operations: Operations) -> NDArray[np.bool_]:
    return np.array([bool(_SYNCHRONISES.search(name)) for name in operations.names], bool)[operations.name]


def _launch_edges(operations: Operations, launches: Indices, previous: Indices) -> tuple[Indices, Indices]:
    """Edges from each launching operation to the launched one.

    If the launching operation was still running, the edge comes from the one before it in its thread.
    """
    source, target = launches[:, 0], launches[:, 1]
    is_running = operations.end[source] > operations.start[target]
    source = np.where(is_running, previous[source], source)
    is_right = (source >= 0) & (operations.end[source] <= operations.start[target])
    return source[is_right], target[is_right]


def _wait_edges(
    operations: Operations, lanes: Sequence[Lane], by_lane: Sequence[Indices]
) -> Iterator[tuple[Indices, Indices]]:
    """Edges to operations after a gap in their lane, from operations of other lanes that ended in the gap.

    Each pair of lanes gives one result.
    """
    is_collective, calls = operations.kind == COLLECTIVE, _synchronises(operations)
    carries_out = [
        not lane.is_device and is_collective[lane_operations].all()
        for lane, lane_operations in zip(lanes, by_lane, strict=True)
    ]
    by_rank: dict[int, list[int]] = {}
    for number, lane in enumerate(lanes):
        by_rank.setdefault(lane.rank, []).append(number)
    for number, (lane, targets) in enumerate(zip(lanes, by_lane, strict=True)):
        if not len(targets) or carries_out[number]:
            continue  # a thread of gloo takes up what was launched
        for source_lane in by_rank[lane.rank]:
            sources = by_lane[source_lane]
            if source_lane == number or not len(sources) or (lane.is_device and not lanes[source_lane].is_device):
                continue
            source, target = _last_in_gaps(operations, targets, sources)
            is_wait = (
                calls[target] if lanes[source_lane].is_device and not lane.is_device else np.ones(len(target), bool)
            )
            yield source[is_wait], target[is_wait]


def _last_in_gaps(operations: Operations, targets: Indices, sources: Indices) -> tuple[Indices, Indices]:
    """Pairs of the source that ended last in each gap of a lane and the operation after that gap."""
    ends = operations.end[sources]
    after = np.searchsorted(operations.start[targets], ends - ROUNDING)
    begins = np.append(-np.inf, operations.end[targets])[after]
    is_in_gap = (after < len(targets)) & (begins <= ends)
    sources, after = sources[is_in_gap], after[is_in_gap]
    is_last = np.append(after[1:] != after[:-1], True)[: len(after)]
    return sources[is_last], targets[after[is_last]]
