"""What-ifs against the same job simulated with the change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from timeline.ddp_jobs import LENGTHS, TRANSFER, ddp_job
from unsilent.basics.errors import UsageError
from unsilent.timeline.job import COMPUTE, HOST
from unsilent.timeline.replay import Replay
from unsilent.timeline.what_if import answer


def seconds(job):
    replay = Replay(job)
    return replay.step_seconds(*replay.run(replay.durations, replay.gaps))


@pytest.mark.parametrize(
    ("question", "late", "transfer"),
    [
        ("rank:1=+20ms", {(1, "loader"): 0.02}, TRANSFER),
        ("rank:2=+0.01s", {(2, "loader"): 0.01}, TRANSFER),
        ("scale:optimizer=2", {(rank, "optimizer"): LENGTHS["optimizer"] for rank in range(3)}, TRANSFER),
        ("scale:forward=0.5", {(rank, "forward"): -LENGTHS["forward"] / 2 for rank in range(3)}, TRANSFER),
        ("scale:all_red*=3", {}, 3 * TRANSFER),
        ("scale:collective=20", {}, 20 * TRANSFER),
        ("network=infinite", {}, 0.0),
    ],
)
def test_a_change_costs_what_it_costs_in_a_job_that_has_it(question, late, transfer):
    (result,) = answer(Replay(ddp_job(3, 5)), [question])
    np.testing.assert_allclose(
        result.predicted[1:], seconds(ddp_job(3, 5, late=late, transfer=transfer))[1:], rtol=1e-9
    )


def test_without_stragglers_all_ranks_take_the_mean():
    job = ddp_job(4, 5, late={(1, "forward"): 0.04})
    (result,) = answer(Replay(job), ["straggler=none"])
    same = ddp_job(4, 5, late={(rank, "forward"): 0.01 for rank in range(4)})
    np.testing.assert_allclose(result.predicted[1:], seconds(same)[1:], rtol=1e-9)
    assert (result.ratios < 1).all()


def test_a_late_rank_that_is_faster_makes_steps_shorter():
    (result,) = answer(Replay(ddp_job(2, 6, late={(1, "forward"): 0.02})), ["rank:1=-20ms"])
    np.testing.assert_allclose(result.recorded - result.predicted, 0.02, atol=2e-3)


def test_a_rank_may_be_sped_up_until_its_operation_takes_no_time_which_is_said():
    job = ddp_job(2, 4)
    less, most = answer(Replay(job), ["rank:0=-20ms", "rank:0=-2s"])
    assert (most.predicted > 0.9 * most.recorded).all()  # the other one is as slow as before
    assert not less.notes
    assert most.notes == (
        "rank 0 itself takes 113 ms of a step (mean), less than it is to be faster by: the answer is that of a rank that takes "
        "no time",
    )


@pytest.mark.parametrize(
    "question", ["network=infinite", "rank:0=-10s", "rank:1=-5ms", "rank:0=0.5", "scale:collective=0.5"]
)
def test_what_is_faster_makes_no_step_longer_on_average(question):
    """Ranks that never wait for each other, of which one is ahead."""
    job = ddp_job(2, 6, late={(1, "forward"): 0.02})
    alone = job.operations.collective.copy()
    alone[job.operations.step != 2] = -1
    (result,) = answer(Replay(replace(job, operations=replace(job.operations, collective=alone))), [question])
    assert result.predicted.mean() <= result.recorded.mean() * (1 + 1e-12)


def test_collectives_whose_other_ranks_were_not_found_are_counted():
    job = ddp_job(2, 4)
    found = job.operations.collective.copy()
    found[job.operations.step == 2] = -1
    (result,) = answer(Replay(replace(job, operations=replace(job.operations, collective=found))), ["network=infinite"])
    (note,) = result.notes
    assert note.startswith("4 of 16 collectives")


def test_a_network_is_not_asked_about_where_no_collective_was_found_on_two_ranks():
    job = ddp_job(2, 3)
    found = np.where(job.operations.rank == 0, job.operations.collective, -1)
    for one in (replace(job, operations=replace(job.operations, collective=found)), ddp_job(1, 3)):
        with pytest.raises(UsageError, match="no collective on two ranks"):
            answer(Replay(one), ["network=infinite"])


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("nothing", "is not a question that is known"),
        ("scale:all_redcue=2", "did you mean"),
        ("scale:forward=-1", "factor from 0"),
        ("scale:forward=nan", "factor from 0"),
        ("scale:forward=1e99", "factor from 0"),
        ("scale:copy=0.1", "no operation of the kind copy in a step; they have compute, collective$"),
        ("scale:other=2", "no operation of the phase other in a step; they have loader, forward, backward, optimizer$"),
        ("rank:7=+1ms", "have ranks 0, 1$"),
        ("rank:x=+1ms", "have ranks 0, 1$"),
        ("rank:1=+20", "with the unit"),
        ("rank:1=+1e999ms", "with the unit"),
        ("network=finite", "network is 'finite'; expected infinite$"),
        ("straggler=some", "straggler is 'some'; expected none$"),
        ("buckts=3", "unknown"),
    ],
)
def test_what_names_nothing_is_refused(question, words):
    with pytest.raises(UsageError, match=words):
        answer(Replay(ddp_job(2, 3)), [question])


def test_what_a_rank_does_not_compute_is_not_scaled():
    job = ddp_job(2, 3)
    kind = np.where((job.operations.rank == 1) & (job.operations.kind == COMPUTE), HOST, job.operations.kind)
    with pytest.raises(UsageError, match="rank 1 computes nothing"):
        answer(Replay(replace(job, operations=replace(job.operations, kind=kind))), ["rank:1=0.5"])


def test_an_empty_system_is_refused():
    with pytest.raises(UsageError, match="--system is ''"):
        answer(Replay(ddp_job(2, 3)), ["buckets=1"], "")
