"""Dependencies of operations: chains, launches, and waits that only a gap shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from timeline_arrays import operations
from unsilent.timeline.edges import cut_waits, make_edges
from unsilent.timeline.job import CHAIN, LAUNCH, WAIT, Lane

MAIN, GLOO_A, GLOO_B, STREAM, SIDE = range(5)
LANES = (
    Lane(0, "thread 1", False),
    Lane(0, "thread 2", False),
    Lane(0, "thread 3", False),
    Lane(0, "stream 7", True),
    Lane(0, "stream 20", True),
)
NO_LAUNCHES = np.zeros((0, 2), np.int32)


def made(rows, launches=(), lanes=LANES, names=("compute", "gloo:all_reduce")):
    """Edges of rows (lane, start, end, collective), as pairs by kind; and the operations."""
    whole = operations(
        [(lanes[lane].rank, lane, start, end, collective) for lane, start, end, collective in rows], names
    )
    edges = make_edges(whole, lanes, np.array(launches, np.int32).reshape(-1, 2))
    assert (whole.end[edges.source] <= whole.start[edges.target]).all()
    pairs = {
        kind: sorted(
            (int(s), int(t)) for s, t, k in zip(edges.source, edges.target, edges.kind, strict=True) if k == kind
        )
        for kind in (CHAIN, LAUNCH, WAIT)
    }
    assert sum(map(len, pairs.values())) == len(edges.source)
    return pairs, whole


def unexplained(whole, edges):
    """Seconds from the latest end of what each operation depends on to its start; 0 without any."""
    result = []
    for index in range(len(whole)):
        sources = edges.source[edges.target == index]
        result.append(whole.start[index] - whole.end[sources].max() if len(sources) else 0.0)
    return np.array(result)


def test_a_backward_pass_that_waits_for_its_buckets():
    """Main: compute, launch 0, compute, launch 1, (wait for both), copy, compute. Collectives in two threads of gloo."""
    rows = [
        (MAIN, 0.0, 1.0, -1),  # 0
        (MAIN, 1.0, 1.1, -1),  # 1 launches 3
        (MAIN, 1.1, 2.0, -1),  # 2
        (GLOO_A, 1.2, 3.0, 0),  # 3
        (MAIN, 2.0, 2.1, -1),  # 4 launches 5
        (GLOO_B, 2.2, 4.0, 1),  # 5
        (MAIN, 4.2, 4.3, -1),  # 6 after both
        (MAIN, 4.4, 5.0, -1),  # 7: nothing ended in the gap before it
    ]
    pairs, whole = made(rows, [(1, 3), (4, 5)])
    assert pairs == {
        CHAIN: [(0, 1), (1, 2), (2, 4), (4, 6), (6, 7)],
        LAUNCH: [(1, 3), (4, 5)],
        WAIT: [(3, 6), (5, 6)],
    }
    edges = make_edges(whole, LANES, np.array([(1, 3), (4, 5)], np.int32))
    assert unexplained(whole, edges)[6] == pytest.approx(0.2)
    for kind, last, gap in ((WAIT, 6, 2.1), (LAUNCH, 5, 0.0), (CHAIN, 2, 0.0)):
        kept = edges.kind != kind
        part = replace(edges, source=edges.source[kept], target=edges.target[kept], kind=edges.kind[kept])
        assert unexplained(whole, part)[last] == pytest.approx(gap)


def test_a_collective_that_ends_while_the_thread_works_is_no_wait():
    rows = [(MAIN, 0.0, 1.0, -1), (GLOO_A, 0.5, 1.5, 0), (MAIN, 1.2, 2.0, -1), (MAIN, 2.1, 3.0, -1)]
    assert made(rows)[0][WAIT] == []


def test_of_several_collectives_of_a_thread_the_last_counts():
    rows = [(MAIN, 0.0, 1.0, -1), (GLOO_A, 0.2, 1.2, 0), (GLOO_A, 1.2, 1.4, 1), (MAIN, 1.5, 2.0, -1)]
    assert made(rows)[0][WAIT] == [(2, 3)]


def test_what_is_launched_before_its_launcher_ends_follows_what_came_before():
    rows = [(MAIN, 0.0, 1.0, -1), (MAIN, 1.0, 2.0, -1), (STREAM, 1.5, 3.0, -1), (MAIN, 2.0, 2.5, -1)]
    assert made(rows, [(1, 2)])[0][LAUNCH] == [(0, 2)]
    assert made(rows, [(3, 2)])[0][LAUNCH] == []  # a launch that contradicts the recording


def test_streams_wait_for_streams_and_threads_only_where_they_synchronise():
    rows = [
        (MAIN, 0.0, 0.1, -1),  # 0
        (STREAM, 0.2, 1.0, -1),  # 1
        (SIDE, 1.1, 2.0, 0),  # 2: waited for the main stream
        (MAIN, 2.1, 2.2, -1),  # 3: a plain operation
        (STREAM, 2.1, 3.0, -1),  # 4: waited for the side stream
    ]
    assert made(rows)[0][WAIT] == [(1, 2), (2, 4)]
    rows.append((MAIN, 2.5, 3.2, -1))
    _, whole = made(rows, [(0, 1)])
    named = replace(whole, name=np.array([0, 0, 1, 0, 0, 2], np.int32), names=(*whole.names, "cudaDeviceSynchronize"))
    cut, launches = cut_waits(named, LANES, np.array([(0, 1), (3, 5)], np.int32))
    assert launches.tolist() == [[0, 1], [3, 5]]
    assert (cut.start[5], cut.duration[5]) == pytest.approx((3.0, 0.2))
    edges = make_edges(cut, LANES, NO_LAUNCHES)
    assert (4, 5) in set(zip(edges.source.tolist(), edges.target.tolist(), strict=True))


def test_cutting_a_wait_keeps_the_order_by_start():
    rows = [(MAIN, 0.0, 5.0, -1), (STREAM, 1.0, 3.0, -1), (STREAM, 3.0, 4.0, -1)]
    _, whole = made(rows)
    named = replace(whole, name=np.array([2, 0, 0], np.int32), names=(*whole.names, "hipStreamSynchronize"))
    cut, launches = cut_waits(named, LANES, np.array([(0, 1)], np.int32))
    assert cut.start.tolist() == [1.0, 3.0, 4.0]
    assert cut.lane.tolist() == [STREAM, STREAM, MAIN]
    assert cut.end.tolist() == [3.0, 4.0, 5.0]
    assert launches.tolist() == [[2, 0]]
    alone, _ = cut_waits(replace(named, lane=np.zeros(3, np.int32)), LANES, NO_LAUNCHES)
    assert alone.start.tolist() == whole.start.tolist()


def test_the_first_operation_of_a_thread_waited_for_what_ended_before():
    """As that of the backward pass's thread on a GPU."""
    lanes = (Lane(0, "thread 1", False), Lane(0, "thread 9", False))
    rows = [(0, 0.0, 1.0, -1), (0, 1.0, 2.0, -1), (1, 2.1, 3.0, -1), (0, 3.2, 4.0, -1)]
    assert made(rows, lanes=lanes)[0][WAIT] == [(1, 2), (2, 3)]


def test_ranks_do_not_wait_for_each_other_but_by_collectives():
    lanes = (
        Lane(0, "thread 1", False),
        Lane(0, "thread 2", False),
        Lane(1, "thread 1", False),
        Lane(1, "thread 2", False),
    )
    rows = [
        (0, 0.0, 1.0, -1),
        (1, 1.0, 2.0, 0),
        (0, 2.5, 3.0, -1),
        (2, 0.0, 1.0, -1),
        (3, 1.0, 2.2, 0),
        (2, 2.5, 3.0, -1),
    ]
    pairs, _ = made(rows, lanes=lanes)
    assert pairs[WAIT] == [(1, 2), (4, 5)]


def test_no_operations_have_no_edges():
    whole = operations([(0, 0, 0.0, 1.0, -1)])
    arrays = {name: getattr(whole, name)[:0] for name in vars(whole) if name != "names"}
    assert len(make_edges(replace(whole, **arrays), LANES, NO_LAUNCHES).source) == 0


def test_edges_cost_linear_time():
    """A million operations in seconds: what grows with the square would take hours."""
    count = 250_000
    rows = np.arange(count) * 1e-3
    whole = operations([(0, MAIN, 0.0, 1.0, -1)])
    lane = np.tile([MAIN, GLOO_A, STREAM, SIDE], count).astype(np.int32)
    start = np.repeat(rows, 4) + np.tile([0, 2e-4, 4e-4, 6e-4], count)
    arrays = {name: np.zeros(4 * count, getattr(whole, name).dtype) for name in vars(whole) if name != "names"}
    arrays |= {"lane": lane, "start": start, "duration": np.full(4 * count, 1e-4)}
    arrays["kind"] = (lane == GLOO_A).astype(np.int8)
    edges = make_edges(replace(whole, **arrays), LANES, NO_LAUNCHES)
    assert (edges.kind == CHAIN).sum() == 4 * (count - 1)
    assert (edges.kind == WAIT).sum() == 3 * count - 2
