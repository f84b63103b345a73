"""Where the time of steps went, who held them back, and their critical paths, on jobs whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeline.ddp_jobs import LENGTHS, TRANSFER, ddp_job
from unsilent.timeline.critical_path import critical_path
from unsilent.timeline.diagnosis import diagnose
from unsilent.timeline.job import FORWARD, OPTIMIZER, Edges
from unsilent.timeline.step_split import split_steps, step_bounds
from unsilent.timeline.stragglers import PARTS, excesses


def test_the_parts_of_a_step_add_up():
    split = split_steps(ddp_job(3, 6, late={(1, "forward"): 0.02}, noise=0.1))
    whole = split.compute + split.transfer + split.waiting + split.gap
    np.testing.assert_allclose(whole, split.end - split.begin)
    np.testing.assert_allclose(split.waiting_for.sum(1), split.waiting)


def test_ranks_wait_for_the_late_one_and_not_for_the_transfer():
    split = split_steps(ddp_job(3, 6, late={(1, "late backward"): 0.02}))
    np.testing.assert_allclose(split.waiting_for[[0, 2], 1], 0.02)
    np.testing.assert_allclose(split.waiting_for[1], 0)
    np.testing.assert_allclose(split.transfer, TRANSFER)  # that of the first one is hidden behind the backward pass
    np.testing.assert_allclose(split.compute[0], sum(LENGTHS.values()) + 2e-5)
    np.testing.assert_allclose(split.gap, 0, atol=1e-12)


@given(
    st.integers(2, 5),
    st.sampled_from(PARTS),
    st.integers(0, 4),
    st.floats(0.03, 0.2),
    st.floats(0, 0.08),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_delay_of_three_noise_floors_is_found(ranks, part, rank, delay, noise, seed):
    rank %= ranks
    job = ddp_job(ranks, 20, late={(rank, part): delay}, noise=noise, seed=seed)
    first = excesses(job)[0]
    if delay >= 3 * next(one.floor for one in excesses(job) if (one.rank, one.part) == (rank, part)):
        assert (first.rank, first.part) == (rank, part)
        assert first.is_separable
        assert first.seconds == pytest.approx(delay, abs=first.floor)


def test_no_rank_is_named_where_none_is_late():
    named = [
        one
        for seed in range(60)
        for one in excesses(ddp_job(2 + seed % 3, 20, noise=0.08, seed=seed))
        if one.is_separable
    ]
    assert not named


def test_too_few_steps_or_ranks_are_not_compared():
    assert excesses(ddp_job(1, 20)) == []
    assert excesses(ddp_job(2, 4)) == []


def test_the_critical_path_goes_through_the_late_rank():
    job = ddp_job(3, 4, late={(2, "late backward"): 0.02})
    path = critical_path(job, 2)
    names = [
        (int(job.operations.rank[link.operation]), job.operations.names[job.operations.name[link.operation]])
        for link in path
    ]
    assert names[0] == (2, "loader")
    assert (2, "all_reduce") in names
    begin = float(job.operations.start[path[0].operation])
    end = max(job.operations.end[job.operations.step == 2])
    assert sum(link.seconds + link.gap for link in path) == pytest.approx(end - begin)


def test_several_passes_in_a_step_are_not_compared_by_parts():
    job = ddp_job(2, 20, late={(1, "forward"): 0.05})
    phase = job.operations.phase.copy()
    phase[job.operations.name == 4] = FORWARD  # what comes after the backward pass
    job = replace(job, operations=replace(job.operations, phase=phase))
    assert excesses(job) == []
    headline = diagnose(job).report().headline
    assert headline.startswith("Not all parts of steps were compared. Other ranks wait longest for rank 1: ")


def test_a_rank_that_waits_more_than_it_is_awaited_is_not_named():
    job = ddp_job(2, 20, late={(1, "forward"): 0.05})
    operations = job.operations
    start = operations.start.copy()
    late = (operations.rank == 0) & (operations.phase == OPTIMIZER)
    start[late] += 0.2  # by the recording rank 0 is slower there, though nobody waits for it
    bounds = {rank: np.stack(step_bounds(job, rank), 1) for rank in (0, 1)}
    bounds[0][:, 1] += 0.5
    job = replace(job, operations=replace(operations, start=start), step_times=bounds)
    assert not any(one.is_separable for one in excesses(job) if one.rank == 0)


def test_steps_begin_where_the_recording_says():
    job = ddp_job(2, 4)
    times = {0: np.array([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0]])}
    begin, end = step_bounds(replace(job, step_times=times), 0)
    assert begin.tolist() == [0, 1, 2, 3]
    assert end.tolist() == [1, 2, 3, 4]


def test_replays_that_the_traces_do_not_explain_are_doubted():
    job = ddp_job(2, 20)
    none = Edges(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int8))
    report = diagnose(replace(job, edges=none)).report()
    assert report.headline.endswith("replays are not to be trusted.")
    assert not any("M_W" in finding for finding in report.findings)
