"""Slowdowns: against the obvious replay, against planted causes, and against the published values of real traces."""

from __future__ import annotations

import numpy as np
import pytest

from oracles.replay_oracle import replay as obvious_replay
from timeline.jobs import make_job, two_ranks
from timeline.pipelines import Pipeline
from timeline.test_tables import REAL, SHARED
from unsilent.basics.errors import UsageError
from unsilent.render.report_json import report_json
from unsilent.report.shown import Shown
from unsilent.timeline.job import CHAIN, COLLECTIVE
from unsilent.timeline.slowdown import measure_slowdown
from unsilent.timeline.tables import read_operation_table


def slow_worker(data_rank, stage, direction, micro_batch, step):
    return (2 if (data_rank, stage) == (1, 0) else 1) * (1.0 if direction == "forward" else 2.0) + step / 64


def slow_stage(data_rank, stage, direction, micro_batch, step):
    return (1.5 if stage == 2 else 1) * (1.0 if direction == "forward" else 2.0)


def read(tmp_path, **options):
    return read_operation_table(Pipeline(**options).write(tmp_path / "trace-x.parquet"))


def test_the_slowdown_is_that_of_the_obvious_replay(tmp_path):
    job = read(tmp_path, steps=2, micro_batches=2, seconds=slow_worker)
    operations, n = job.operations, len(job.operations)
    predecessors = [job.edges.source[job.edges.target == at].tolist() for at in range(n)]
    own = []
    for at in range(n):
        number = operations.collective[at]
        start = operations.start[operations.collective == number].max() if number >= 0 else operations.start[at]
        own.append(float(operations.end[at] - start))
    free = []
    for at in range(n):
        alike = [own[other] for other in range(n) if operations.name[other] == operations.name[at]]
        free.append(float(np.median(alike) if operations.kind[at] == COLLECTIVE else np.mean(alike)))
    release = [float(operations.start[operations.step == step].min()) for step in operations.step]
    seconds = []
    for durations in (own, free):
        starts, ends = obvious_replay(predecessors, operations.collective.tolist(), durations, [0.0] * n, release)
        of_step = [[at for at in range(n) if operations.step[at] == step] for step in range(2)]
        seconds.append([max(ends[at] for at in one) - min(starts[at] for at in one) for one in of_step])
    result = measure_slowdown(job)
    assert result.without_gaps.tolist() == pytest.approx(seconds[0])
    assert result.straggler_free.tolist() == pytest.approx(seconds[1])
    assert result.slowdown.estimate == pytest.approx(np.mean(seconds[0]) / np.mean(seconds[1]))
    assert result.slowdown.low <= result.slowdown.estimate <= result.slowdown.high


def test_a_slow_worker_is_ranked_first_and_explains_the_slowdown(tmp_path):
    result = measure_slowdown(read(tmp_path, data_ranks=4, stages=3, micro_batches=8, seconds=slow_worker))
    first, second = result.workers[:2]
    assert (first.rank, first.data_rank, first.stage) == (1, 1, 0)
    assert first.slowdown > second.slowdown + 0.2
    assert result.slow_workers.ranks == (1,)
    assert result.slow_workers.share > 0.9
    assert result.last_stage.share < 0.1
    assert result.stages[0].name == "stage 0"
    assert result.data_ranks[0].name == "data-parallel rank 1"
    assert result.slow_workers.seconds < 0.8 * result.without_gaps.mean()


def test_a_slow_last_stage_explains_the_slowdown(tmp_path):
    result = measure_slowdown(read(tmp_path, data_ranks=4, stages=3, micro_batches=8, seconds=slow_stage))
    assert result.stages[0].name == "stage 2"
    assert result.last_stage.share > 0.7
    assert result.slow_workers.share < 0.3
    assert {one.name for one in result.classes[:2]} == {"forward-compute", "backward-compute"}


def test_where_all_are_alike_nothing_is_slow(tmp_path):
    result = measure_slowdown(read(tmp_path, data_ranks=2, stages=2))
    assert result.slowdown.estimate == pytest.approx(1)
    assert result.slowdown_with_gaps.estimate == pytest.approx(1)
    assert (result.slow_workers.share, result.last_stage.share) == (None, None)
    assert result.unexplained_share == pytest.approx(0)
    assert min(result.unexplained_without.values()) > 0.01
    assert result.prediction_errors.tolist() == pytest.approx([0, 0, 0])


def test_gaps_are_left_out_of_the_one_slowdown_and_kept_in_the_other():
    """Rank 1 begins its second operation 3 s late."""
    job = make_job(
        [0, 1, 0, 4], [1, 1, 1, 1], edges=[(0, 1, CHAIN), (2, 3, CHAIN)], rank=[0, 0, 1, 1], name=[0, 1, 0, 1]
    )
    result = measure_slowdown(job)
    assert result.slowdown.estimate == 1
    assert result.recorded.tolist() == [5]
    assert result.slowdown_with_gaps.estimate == 1
    assert result.unexplained_share == pytest.approx(3 / (5 * 2))
    assert np.isnan(result.prediction_errors).all()
    assert np.isnan(result.slowdown.low)


def test_ranks_without_stages_are_compared_with_each_other():
    result = measure_slowdown(two_ranks())
    assert [one.rank for one in result.workers] == [1, 0]
    assert result.workers[0].stage is None
    assert result.stages == ()
    assert result.last_stage is None
    assert result.slowdown.estimate == pytest.approx(5 / 3.5)  # both compute 2.5 s


def test_without_stages_only_the_same_place_is_compared():
    """Each rank has two threads with an operation of one name, which takes 1 s in the one and 3 s in the other."""
    job = make_job([0, 0, 0, 0], [1, 3, 1, 3], rank=[0, 0, 1, 1])
    assert measure_slowdown(job).slowdown.estimate == 1


def test_a_worker_far_behind_in_its_clock_gets_no_negative_transfer(tmp_path):
    """Below -10 ms a transfer time is a fault of the clocks and counts as 0, as published."""
    job = make_job([0, 1], [0.5, 1], collective=[0, 0], rank=[0, 1])
    assert measure_slowdown(job).straggler_free.tolist() == [0.5]


@pytest.mark.parametrize(
    ("step", "message"),
    [([0, 0], "a step take no time"), ([0, 1], "a step take no time"), ([-1, -1], "no complete step")],
)
def test_a_job_without_a_step_that_takes_time_is_one_line(step, message):
    with pytest.raises(UsageError, match=message):
        measure_slowdown(make_job([0, 0], [0, step[1]], step=step))


def test_many_replays_at_once_are_cut_into_parts(tmp_path, monkeypatch):
    job = read(tmp_path, data_ranks=3, stages=2, seconds=slow_worker)
    whole = measure_slowdown(job)
    monkeypatch.setattr("unsilent.timeline.slowdown.MOST_VALUES", 1)
    parts = measure_slowdown(job)
    assert whole.workers == parts.workers
    assert whole.classes[0].slowdown == parts.classes[0].slowdown


def test_a_result_is_shown(tmp_path):
    result = measure_slowdown(read(tmp_path, data_ranks=2, stages=3, seconds=slow_worker))
    assert isinstance(result, Shown)
    report = result.report()
    assert "times as long as" in report.headline
    assert report.headline in repr(result)
    assert result.write_html(tmp_path / "x.html").read_text().startswith("<!doctype html>")
    results = report_json(report)["results"]
    assert results["slowdown"]["estimate"] == result.slowdown.estimate
    assert results["workers"][0]["rank"] == 1


PUBLISHED = {"ST": (1.1787021836556841, 0.031404269124045224, 1.2193563788811714),
             "AR": (1.9730450967262543, 1.0017012777290497, -0.00121196404622606)}  # fmt: skip
"""S, M_W and M_S, from the results beside the traces."""


@REAL
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_slowdowns_are_reproduced(name):
    result = measure_slowdown(read_operation_table(SHARED / f"trace-{name}.parquet"))
    slowdown, workers, stage = PUBLISHED[name]
    assert result.slowdown.estimate == pytest.approx(slowdown, rel=0.01)
    assert result.slow_workers.share == pytest.approx(workers, abs=0.01)
    assert result.last_stage.share == pytest.approx(stage, abs=0.013)
    if name == "AR":
        assert result.workers[0].rank == 0
        assert result.workers[0].slowdown > 1.9 > 1.1 > result.workers[1].slowdown
