"""Nested events of a thread as operations that follow each other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unsilent.timeline.host_operations import flatten, phases
from unsilent.timeline.job import FORWARD, OPTIMIZER, OTHER


def flat(events, cuts=(), elsewhere=(), boundaries=(), waits=None):
    """Operations (start, end, event, outermost event) of events (start, end)."""
    start, end = (np.array([row[at] for row in events], float) for at in (0, 1))
    is_cut = np.isin(np.arange(len(events)), list(cuts))
    until = np.array([(waits or {}).get(at, one) for at, one in enumerate(end)], float)
    result = flatten(start, end, is_cut, until, np.array(elsewhere, float), np.array(boundaries, float))
    return [tuple(map(float, row)) for row in zip(*result, strict=True)]


NESTED = [(0, 100), (10, 40), (20, 30), (50, 90), (150, 200)]


def test_nested_events_are_one_operation():
    assert flat(NESTED) == [(0, 100, 0, 0), (150, 200, 4, 4)]


def test_a_launch_is_cut_out():
    assert flat(NESTED, cuts=[2]) == [(0, 20, 0, 0), (20, 30, 2, 0), (30, 100, 0, 0), (150, 200, 4, 4)]


def test_a_wait_for_what_was_launched_belongs_to_no_operation():
    assert flat(NESTED, cuts=[1], waits={1: 48}) == [(0, 10, 0, 0), (10, 40, 1, 0), (48, 100, 0, 0), (150, 200, 4, 4)]


def test_the_innermost_of_nested_launches_is_cut_out():
    assert flat(NESTED, cuts=[1, 2, 3])[1] == (20, 30, 2, 0)


def test_a_launch_alone_is_an_operation():
    assert flat([(0, 10), (5, 10)], cuts=[0]) == [(0, 10, 0, 0)]


def test_time_between_events_is_an_operation_of_a_step_unless_something_else_ended_in_it():
    assert flat(NESTED, boundaries=[0, 300]) == [
        (0, 100, 0, 0), (100, 150, -1, -1), (150, 200, 4, 4), (200, 300, -1, -1),
    ]  # fmt: skip
    assert flat(NESTED, boundaries=[0, 300], elsewhere=[120]) == [(0, 100, 0, 0), (150, 200, 4, 4), (200, 300, -1, -1)]
    assert flat(NESTED, boundaries=[0, 200]) == [(0, 100, 0, 0), (100, 150, -1, -1), (150, 200, 4, 4)]


def test_a_boundary_divides_the_time_between_events():
    assert flat(NESTED, boundaries=[0, 125, 200])[1:3] == [(100, 125, -1, -1), (125, 150, -1, -1)]


def test_a_boundary_within_an_event_divides_nothing():
    assert flat(NESTED, boundaries=[0, 70, 200])[:2] == [(0, 100, 0, 0), (100, 150, -1, -1)]


def test_no_events():
    assert flat([]) == []
    assert flat([], boundaries=[0, 50, 80]) == [(0, 50, -1, -1), (50, 80, -1, -1)]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=25),
    st.sets(st.integers(0, 24)),
    st.lists(st.integers(0, 90), max_size=5),
)
def test_operations_never_overlap_and_cover_the_events(rows, cuts, elsewhere):
    """Also for events that overlap without being nested, as damaged traces have."""
    events = [(start, start + length) for start, length in rows]
    found = flat(events, cuts, sorted(elsewhere))
    assert all(one[1] <= two[0] for one, two in pairwise(found))
    moments = {moment for start, end in events for moment in range(start, end)}
    assert {moment for start, end, *_ in found for moment in range(int(start), int(end))} == moments


def test_the_phase_of_a_moment():
    start, end = np.array([0.0, 40.0, 50.0]), np.array([30.0, 90.0, 60.0])
    phase = np.array([FORWARD, OPTIMIZER, OTHER], np.int8)
    times = np.array([-1.0, 0.0, 29.0, 30.0, 55.0, 90.0])
    assert phases(times, start, end, phase).tolist() == [OTHER, FORWARD, FORWARD, OTHER, OPTIMIZER, OTHER]
