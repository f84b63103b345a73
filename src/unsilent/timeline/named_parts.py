"""Parts of forward passes that a script or a module has named, with their backward passes, as autograd's numbers show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unsilent.timeline.host_operations import EVALUATES
from unsilent.timeline.job import Parts
from unsilent.timeline.rank_trace import ANNOTATION, CPU_OP, RankTrace


def named_parts(trace: RankTrace, names: Sequence[str]) -> Parts:
    """Annotations in which operations of a forward pass ran whose backward passes all followed later; microseconds.

    An operation of a forward pass has the number of the node that it makes for the backward pass; operations within it that make
    none, and those before it in its thread, may have the same number, so that the last one with a number counts.
    """
    evaluates = np.array([name.startswith(EVALUATES) for name in names], bool)[trace.event_name]
    has_node = (trace.category == CPU_OP) & (trace.node >= 0)
    backward = np.flatnonzero(has_node & evaluates)
    nodes, place = np.unique(trace.node[backward], return_inverse=True)
    begin, end = np.full(len(nodes), np.inf), np.full(len(nodes), -np.inf)
    np.minimum.at(begin, place, trace.start[backward])
    np.maximum.at(end, place, trace.end[backward])
    forward = np.flatnonzero(has_node & ~evaluates & np.isin(trace.node, nodes))
    place = np.searchsorted(nodes, trace.node[forward])
    forward, place = (events[trace.start[forward] < begin[place]] for events in (forward, place))
    order = np.argsort(trace.start[forward], kind="stable")
    maker = np.full(len(nodes), -1, np.int64)
    maker[place[order]] = forward[order]  # of equal numbers, the last one stays
    begin, end, maker = begin[maker >= 0], end[maker >= 0], maker[maker >= 0]
    order = np.argsort(trace.start[maker], kind="stable")
    begin, end, maker = begin[order], end[order], maker[order]
    named = np.flatnonzero(trace.category == ANNOTATION)
    first = np.searchsorted(trace.start[maker], trace.start[named])
    last = np.searchsorted(trace.start[maker], trace.end[named])
    events_with_parts, times = list[int](), list[tuple[float, ...]]()
    for event, low, high in zip(named.tolist(), first.tolist(), last.tolist(), strict=True):
        makers = np.flatnonzero(trace.thread[maker[low:high]] == trace.thread[event]) + low
        if len(makers) and begin[makers].min() >= trace.end[event]:
            events_with_parts.append(event)
            times.append((trace.start[event], trace.end[event], begin[makers].min(), end[makers].max()))
    return Parts(trace.event_name[events_with_parts], np.array(times, float).reshape(-1, 4))
