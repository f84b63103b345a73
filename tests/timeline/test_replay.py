"""Replays against the obvious one, and unexplained gaps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.replay_oracle import replay as obvious_replay
from timeline.jobs import drawn_jobs, eighths, make_job, two_ranks
from unsilent.basics.errors import UsageError
from unsilent.timeline.job import CHAIN, EDGE_KINDS, LAUNCH, PIPELINE
from unsilent.timeline.replay import Replay, leave_one_step_out, unexplained_gaps


@given(drawn_jobs(), st.data())
def test_replays_are_those_of_the_obvious_one(drawn, data):
    n = len(drawn.durations)
    durations = data.draw(st.lists(eighths, min_size=n, max_size=n))
    gaps = data.draw(st.lists(eighths, min_size=n, max_size=n))
    expected = obvious_replay(drawn.predecessors, drawn.collective, durations, gaps, drawn.release)
    start, end = Replay(drawn.job).run(np.array(durations), np.array(gaps))
    assert start.tolist() == expected[0]
    assert end.tolist() == expected[1]


@given(drawn_jobs())
def test_with_what_was_measured_a_replay_has_the_recorded_times(drawn):
    """That holds whatever the dependencies are: it tests the arithmetic alone."""
    replayed = Replay(drawn.job)
    assert replayed.gaps.tolist() == drawn.gaps
    assert replayed.durations.tolist() == drawn.durations
    start, end = replayed.run(replayed.durations, replayed.gaps)
    assert start.tolist() == drawn.job.operations.start.tolist()
    assert end.tolist() == drawn.job.operations.end.tolist()


@given(drawn_jobs())
def test_replays_of_several_durations_at_once_are_those_of_each(drawn):
    replayed = Replay(drawn.job)
    several = np.stack([replayed.durations, replayed.durations * 2, np.zeros_like(replayed.durations)], axis=1)
    start, end = replayed.run(several, replayed.gaps)
    for at in range(3):
        own_start, own_end = replayed.run(several[:, at], replayed.gaps)
        assert start[:, at].tolist() == own_start.tolist()
        assert end[:, at].tolist() == own_end.tolist()
        assert replayed.step_seconds(start, end)[:, at].tolist() == replayed.step_seconds(own_start, own_end).tolist()


@given(drawn_jobs(), st.sets(st.sampled_from(range(len(EDGE_KINDS)))))
def test_without_edges_the_unexplained_gap_is_never_smaller(drawn, left_out):
    every, fewer = unexplained_gaps(drawn.job), unexplained_gaps(drawn.job, tuple(left_out))
    assert np.all(fewer >= every)
    assert np.all(every >= 0)


def test_the_unexplained_gap_is_what_no_dependency_explains():
    job = make_job([0, 2, 6], [1, 2, 1], edges=[(0, 1, CHAIN), (1, 2, PIPELINE)])
    assert unexplained_gaps(job).tolist() == [0, 1, 2]
    assert unexplained_gaps(job, (PIPELINE,)).tolist() == [0, 1, 6]
    assert unexplained_gaps(job, (LAUNCH,)).tolist() == [0, 1, 2]


def test_steps_that_depend_on_no_other_last_from_their_first_start_to_their_last_end():
    replayed = Replay(two_ranks())
    start, end = replayed.run(replayed.durations, replayed.gaps)
    assert replayed.step_seconds(start, end).tolist() == [5, 5]
    assert replayed.durations.tolist() == [1, 1, 4, 1] * 2


def drifting(steps=(0, 1, 2)):
    """Two ranks that never wait for each other, with steps of 1 s and of 3 s; rank 1 begins 0.5 s late."""
    start = [0, 1, 2, 0.5, 3.5, 6.5]
    chains = [(at, at + 1, CHAIN) for at in (0, 1, 3, 4)]
    job = make_job(start, [1] * 3 + [3] * 3, edges=chains, step=[0, 1, 2] * 2, rank=[0] * 3 + [1] * 3)
    return replace(job, steps=tuple(steps))


def test_a_step_is_how_far_the_last_end_moves_whatever_lead_a_rank_has():
    replayed = Replay(drifting())
    assert replayed.step_seconds(*replayed.run(replayed.durations, replayed.gaps)).tolist() == [3, 3, 3]
    faster = np.array([0.0] * 3 + [3.0] * 3)  # a longer lead of rank 0
    assert replayed.step_seconds(*replayed.run(faster, replayed.gaps)).tolist() == [3, 3, 3]


def test_without_gaps_ranks_begin_the_first_step_as_recorded():
    replayed = Replay(drifting())
    start, end = replayed.run(replayed.durations, np.zeros(6))
    assert start[3] == 0.5
    assert replayed.step_seconds(start, end).tolist() == [3, 3, 3]


def test_a_step_after_some_that_were_not_recorded_counts_from_its_own_begin():
    replayed = Replay(drifting((0, 5, 6)))
    seconds = replayed.step_seconds(*replayed.run(replayed.durations, replayed.gaps))
    assert seconds.tolist() == [3, 5.5, 3]


six = st.lists(eighths, min_size=6, max_size=6).map(np.array)


@given(six, six, six)
def test_nothing_that_takes_longer_makes_steps_shorter(durations, gaps, added):
    replayed = Replay(drifting())
    usual, longer, later = (
        replayed.step_seconds(*replayed.run(durations + longer, gaps + later)).sum()
        for longer, later in ((0, 0), (added, 0), (0, added))
    )
    assert longer >= usual
    assert later >= usual


def test_operations_of_no_step_count_for_none():
    job = make_job([0, 1, 9], [1, 1, 5], step=[0, 0, -1])
    replayed = Replay(job)
    assert replayed.step_seconds(*replayed.run(replayed.durations, replayed.gaps)).tolist() == [2]


@pytest.mark.parametrize(
    ("edges", "collective"),
    [
        ([(0, 1, CHAIN), (1, 0, CHAIN)], [-1, -1, -1]),
        ([(0, 1, CHAIN), (1, 2, CHAIN)], [0, -1, 0]),
        ([(2, 2, CHAIN)], None),
    ],
)
def test_a_cycle_is_one_line(edges, collective):
    job = make_job([0, 1, 2], [1, 1, 1], edges=edges, collective=collective)
    with pytest.raises(UsageError, match=r"wait for each other.*expected") as raised:
        Replay(job)
    assert "\n" not in str(raised.value)


def test_a_step_is_predicted_from_the_other_ones():
    job = make_job([0, 3, 6], [1, 2, 6], step=[0, 1, 2])
    job.operations.lane[:] = 0
    assert leave_one_step_out(Replay(job)).tolist() == [3.0, 0.75, -0.75]


def test_the_first_step_has_no_gap_before_it_to_predict_others_from():
    job = make_job([0, 2, 4, 6], [1, 1, 1, 1], edges=[(at, at + 1, CHAIN) for at in range(3)], step=[0, 1, 2, 3])
    job.operations.lane[:] = 0
    assert leave_one_step_out(Replay(job)).tolist() == [0, 0, 0, 0]


def test_one_step_predicts_nothing():
    assert np.isnan(leave_one_step_out(Replay(make_job([0, 1], [1, 1])))).all()


def test_a_job_without_operations_is_one_line():
    job = make_job([0], [1])
    arrays = {name: value[:0] for name, value in vars(job.operations).items() if name != "names"}
    with pytest.raises(UsageError, match="no operations"):
        Replay(replace(job, operations=replace(job.operations, **arrays)))
