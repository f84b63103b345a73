"""What-ifs against the same job simulated with the change."""

from __future__ import annotations

import numpy as np
import pytest

from timeline.ddp_jobs import LENGTHS, TRANSFER, ddp_job
from unsilent.errors import UsageError
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


def test_a_rank_may_be_sped_up_until_its_operation_takes_no_time():
    job = ddp_job(2, 4)
    (result,) = answer(Replay(job), ["rank:0=-2s"])
    assert (result.predicted > 0.9 * result.recorded).all()  # the other one is as slow as before


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("nothing", "asks for nothing"),
        ("scale:all_redcue=2", "did you mean"),
        ("scale:forward=-1", "factor from 0"),
        ("scale:forward=nan", "factor from 0"),
        ("scale:forward=1e99", "factor from 0"),
        ("rank:7=+1ms", "ranks 0 to 1"),
        ("rank:x=+1ms", "ranks 0 to 1"),
        ("rank:1=+20", "with the unit"),
        ("rank:1=+1e999ms", "with the unit"),
        ("network=finite", "did you mean"),
        ("buckts=3", "unknown"),
    ],
)
def test_what_names_nothing_is_refused(question, words):
    with pytest.raises(UsageError, match=words):
        answer(Replay(ddp_job(2, 3)), [question])
