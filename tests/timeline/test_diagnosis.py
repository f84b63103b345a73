"""Where the time of steps went, who held them back, and their critical paths, on jobs whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeline.ddp_jobs import LENGTHS, TRANSFER, ddp_job
from unsilent.basics.interval import Interval
from unsilent.report.model import Table
from unsilent.timeline.change import Answer
from unsilent.timeline.diagnosis import critical_path, diagnose
from unsilent.timeline.job import COLLECTIVE, FORWARD, OPTIMIZER, Edges
from unsilent.timeline.load import load_job
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
    assert headline.startswith(
        "Not all parts of steps were compared. The rank that other ranks wait for longest is rank 1: "
    )


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
    report = diagnose(replace(job, edges=none), ["rank:0=+5ms"]).report()
    assert "rank:0=+5ms: not predicted, as replays are not to be trusted" in report.findings
    assert not report.further_json["results"]["what_if"][0]["is_trusted"]
    assert report.headline.endswith("replays are not to be trusted.")
    assert not any("M_W" in finding for finding in report.findings)


def without_partners(job):
    """The job, with collectives of which no other rank was found."""
    operations = job.operations
    return replace(job, operations=replace(operations, collective=np.full_like(operations.collective, -1)))


def test_a_collective_without_a_partner_is_no_gap_of_the_host():
    split = split_steps(without_partners(ddp_job(3, 6, late={(1, "late backward"): 0.02})))
    assert (split.transfer > 0).all()
    assert (split.waiting == 0).all()
    np.testing.assert_allclose(split.gap, 0, atol=1e-12)


def test_who_waits_for_whom_is_not_claimed_where_no_collective_was_matched():
    report = diagnose(without_partners(ddp_job(2, 4))).report()
    assert "wait for longest" not in report.headline
    assert "which rank waited for which is not known" in report.headline
    assert "or waiting in collectives whose other ranks were not found" in report.findings[0]
    assert "waiting for late ranks" not in report.findings[0]


def test_no_rank_is_said_to_be_waited_for_where_none_waits():
    assert "No rank waited for another one" in diagnose(ddp_job(2, 4)).report().headline


def test_one_rank_is_compared_with_no_other():
    report = diagnose(replace(ddp_job(1, 6), world_size=8)).report()
    assert report.headline == (
        "Only the trace of rank 0 was read, so late ranks cannot be seen. A step takes 119 ms, from its begin to the begin of "
        "the next one (mean of 6 steps)."
    )
    assert report.findings[0].startswith("time of rank 0: ")
    assert "in exposed transfers, or waiting for 7 ranks that were not recorded" in report.findings[0]
    shown = " ".join(report.findings)
    assert "late ranks" not in shown
    assert "straggler" not in shown
    titles = {part.title.split(":")[0] for one in report.sections for part in one.parts if isinstance(part, Table)}
    assert "operations" in titles
    assert not {"workers", "data-parallel ranks"} & titles


def test_long_names_are_shortened_in_the_middle():
    job = ddp_job(2, 6)
    names = tuple(f"{name}_{'x' * 100}_end" for name in job.operations.names)
    report = diagnose(replace(job, operations=replace(job.operations, names=names))).report()
    texts = [
        cell
        for one in report.sections
        for part in one.parts
        if isinstance(part, Table)
        for row in part.rows
        for cell in row.cells
    ]
    shown = [one for one in texts if isinstance(one, str) and one.startswith("forward_")]
    assert shown
    assert all(len(one) <= 60 and one.endswith("_end") for one in shown)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_straggler_free_mean_of_two_ranks_is_said_to_keep_half_of_a_delay(ranks):
    notes = diagnose(ddp_job(ranks, 6)).report().notes
    assert any("half" in note for note in notes) is (ranks == 2)


def test_steps_that_overlap_are_said_to():
    job = ddp_job(1, 6)
    assert not any("overlap" in note for note in diagnose(job).report().notes)
    times = np.arange(6)[:, None] * 0.126 + np.array([0.0, 0.126])
    operations = job.operations
    late = np.where(operations.kind == COLLECTIVE, 0.126, 0.0)  # a device that is a step behind its host
    job = replace(job, operations=replace(operations, start=operations.start + late), step_times={0: times})
    notes = diagnose(job).report().notes
    assert any("steps overlap" in note and "a step begins every 126 ms" in note for note in notes)


@pytest.mark.parametrize(
    ("job", "verdict"),
    [(ddp_job(2, 20, late={(1, "forward"): 0.05}), "straggler"), (ddp_job(2, 20, noise=0.01), "not_separable"),
     (ddp_job(2, 4), "not_compared"), (ddp_job(1, 20), "not_compared")],
)  # fmt: skip
def test_the_json_object_has_a_verdict(job, verdict):
    assert diagnose(job).report().further_json["results"]["verdict"] == verdict


def answers(doubt=""):
    """A diagnosis with the answers of a replay and of the model of DDP."""
    steps, ratio = np.ones(4), Interval(0.55, 0.4, 1.2, 0.95, 4, "bootstrap")
    by_replay = Answer("rank:0=+1ms", 0.1 * steps, 0.12 * steps)
    by_model = Answer("buckets=1", 0.09 * steps, 0.05 * steps, is_extrapolated=True, of_model=ratio, doubt=doubt)
    return replace(diagnose(ddp_job(2, 20)), answers=[by_replay, by_model])


def test_an_answer_of_the_model_of_ddp_is_not_said_to_be_a_replay():
    _, replayed, modelled, *_ = answers().report().findings
    assert replayed == "rank:0=+1ms: a step would take 120 ms instead of 100 ms, by replay"
    assert modelled == (
        "buckets=1: a step would take 50 ms instead of 90 ms, by the model of DDP (0.4 to 1.2 times as long with 95 % confidence"
        ": whether it is faster or slower is not established) (beyond the sizes that the cost was fitted to)"
    )


def test_what_a_doubtful_model_says_is_withheld():
    report = answers(doubt="the model of DDP misses the recorded steps").report()
    assert report.findings[2] == "buckets=1: not predicted, as the model of DDP misses the recorded steps"
    first, second = report.further_json["results"]["what_if"]
    assert (first["is_trusted"], second["is_trusted"]) == (True, False)


def test_the_slowdown_is_said_to_leave_out_gaps():
    assert "In a replay without idle gaps, a step takes" in diagnose(ddp_job(2, 20)).report().headline


def test_rounding_errors_of_times_are_not_shown_as_gaps():
    result = diagnose(load_job([Path(__file__).parent / "data"]))
    assert any(0 < group.unexplained_share < 1e-9 for group in result.slowdown.classes)
    (shown,) = (
        part
        for section in result.report().sections
        for part in section.parts
        if isinstance(part, Table) and part.title.startswith("operations")
    )
    (place,) = (number for number, column in enumerate(shown.columns) if column.name.startswith("unexplained gaps"))
    shares = [row.cells[place] for row in shown.rows]
    assert 0 in shares
    assert all(share == 0 or share >= 1e-9 for share in shares)
