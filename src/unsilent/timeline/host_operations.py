"""Converts the nested events of a thread to operations that follow each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.timeline.job import BACKWARD, FORWARD, LOADER, OPTIMIZER, OTHER

LEAST_GAP = 20.0
"""Least gap between operations, in microseconds, that becomes an operation of its own."""
_ANNOTATED = (
    ("enumerate(DataLoader)", LOADER), ("DistributedDataParallel.forward", FORWARD), ("Optimizer.", OPTIMIZER),
)  # fmt: skip
EVALUATES = "autograd::engine::evaluate_function"
"""Prefix of the names of operations that execute a node of a backward pass."""
_BACKWARD = (EVALUATES, "torch.distributed.ddp.reducer", "torch::distributed::reducer")
Floats = NDArray[np.float64]


class Flat(NamedTuple):
    """Operations of a thread in the order of time, without overlaps.

    Attributes:
        start, end: Microseconds, float64.
        event: Number of the outermost event that the operation is part of, or of the event that was cut out; -1: time between
            events. int64.
        outer: Number of the outermost event, also for events that were cut out; -1: time between events. int64.
    """

    start: Floats
    end: Floats
    event: NDArray[np.int64]
    outer: NDArray[np.int64]


def flatten(
    start: Floats, end: Floats, is_cut: NDArray[np.bool_], until: Floats, elsewhere: Floats, boundaries: Floats
) -> Flat:
    """Operations without overlaps, made of nested events.

    The outermost events become operations, and some events inside them are cut out as operations of their own.

    The time between two outermost events is also an operation if nothing ended ``elsewhere`` meanwhile, as the thread then
    waited for no other one.

    Args:
        start, end: Times of events, microseconds.
        is_cut: Events that become operations of their own.
        until: Time at which the thread continued after each event, which is later than its end if the thread waited for an
            operation that the event launched.
        elsewhere: Ends of operations of other threads, in order.
        boundaries: Times that no operation between events spans. There are no such operations before the first and after the
            last one.
    """
    order = np.lexsort((-end, start))
    start, end, is_cut, until = start[order], end[order], is_cut[order], until[order]
    latest = np.maximum.accumulate(end)
    is_outer = np.append(True, start[1:] >= latest[:-1])[: len(start)]
    group = np.cumsum(is_outer) - 1
    first = np.flatnonzero(is_outer)
    last = np.append(first[1:], len(start))[: len(first)] - 1
    outer_start, outer_end = start[first], latest[last]
    cut = np.flatnonzero(is_cut)
    cut = cut[np.append(start[cut[1:]] >= end[cut[:-1]], True)[: len(cut)]]  # the innermost ones
    # The rest of an event is the time from its begin, or from the end of a cut event and its wait, to the next cut or its end.
    begins, ends = np.append(outer_start, until[cut]), np.append(outer_end, start[cut])
    parts = np.append(first, first[group[cut]])
    by_begin, by_end = np.argsort(begins, kind="stable"), np.argsort(ends, kind="stable")
    rest = Flat(begins[by_begin], ends[by_end], order[parts[by_begin]], order[parts[by_begin]])
    between = _times_without_waiting(outer_start, outer_end, elsewhere, np.sort(boundaries))
    flats = (rest, Flat(start[cut], end[cut], order[cut], order[first[group[cut]]]), between)
    joined = [np.concatenate(column) for column in zip(*flats, strict=True)]
    is_long = joined[1] > joined[0]
    sequence = np.flatnonzero(is_long)[np.lexsort((joined[1][is_long], joined[0][is_long]))]
    return Flat(*(column[sequence] for column in joined))


def _times_without_waiting(outer_start: Floats, outer_end: Floats, elsewhere: Floats, boundaries: Floats) -> Flat:
    """Times between outermost events in which the thread did not wait for another thread."""
    begun, ended = (np.searchsorted(times, boundaries, "right") for times in (outer_start, outer_end))
    outside = boundaries[begun == ended]
    starts, ends = np.sort(np.append(outer_start, outside)), np.sort(np.append(outer_end, outside))
    start, end = ends[:-1], starts[1:]
    is_own = np.searchsorted(elsewhere, start, "right") == np.searchsorted(elsewhere, end, "right")
    if len(boundaries):
        is_own &= (start >= boundaries[0]) & (end <= boundaries[-1]) & (end - start >= LEAST_GAP)
    gaps = np.flatnonzero(is_own & (len(boundaries) > 0))
    nothing = np.full(len(gaps), -1, np.int64)
    return Flat(start[gaps], end[gaps], nothing, nothing)


def annotated_phase(name: str) -> int:
    """Phase of the step that an annotation of this name encloses."""
    return next((phase for prefix, phase in _ANNOTATED if name.startswith(prefix)), OTHER)


def is_backward(name: str) -> bool:
    """Whether an outermost operation belongs to a backward pass."""
    return name.startswith(_BACKWARD)


def phases(times: Floats, start: Floats, end: Floats, phase: NDArray[np.int8]) -> NDArray[np.int8]:
    """The phase at each time, from annotations with their starts and ends.

    If several enclose a time, the backward pass counts first, then the optimizer, the loader and the forward pass.
    """
    result = np.full(len(times), OTHER, np.int8)
    for number in (FORWARD, LOADER, OPTIMIZER, BACKWARD):
        spans = np.flatnonzero(phase == number)
        spans = spans[np.argsort(start[spans])]
        if len(spans):
            before = np.searchsorted(start[spans], times, "right") - 1
            is_in = (before >= 0) & (np.maximum.accumulate(end[spans])[before] > times)
            result[is_in] = number
    return result
