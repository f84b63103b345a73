"""What-ifs of trainings under DDP, against the slow simulation of a step."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kineto_traces import ddp_job_files
from timeline.ddp_jobs import ddp_job as job_without_gradients
from timeline.test_ddp_model import slow_prediction
from unsilent.basics.errors import UsageError
from unsilent.timeline.ddp.model import MIB, assign_buckets, server_cost
from unsilent.timeline.ddp.traces import ddp_job
from unsilent.timeline.diagnosis import diagnose
from unsilent.timeline.load import load_job
from unsilent.timeline.replay import Replay
from unsilent.timeline.what_if import answer

TRACES = Path(__file__).parent / "data"
SYSTEM = """
[[level]]
name = "gpu"
count = 2
bandwidth = "0.1GB/s"
latency = "200us"
"""


@pytest.fixture(scope="module")
def job():
    """A recorded training whose tensors are said to be 512 times as large, so that buckets can differ."""
    small = load_job([TRACES])
    size = small.operations.size
    operations = replace(small.operations, size=np.where(size > 0, 512 * size, size))
    gradients = {rank: one._replace(size=512 * one.size) for rank, one in small.gradients.items()}
    return replace(small, operations=operations, gradients=gradients)


@pytest.fixture
def system(tmp_path):
    path = tmp_path / "pair.toml"
    path.write_text(SYSTEM)
    return str(path)


def read(folder, **options):
    return load_job([ddp_job_files(folder, **options)])


def slow(job, caps=None, share=1.0, cost=None):
    ddp = ddp_job(job)
    buckets = ddp.buckets if caps is None else assign_buckets(ddp.steps.sizes.tolist(), [MIB * cap for cap in caps])
    line = cost or ddp.cost
    return slow_prediction(ddp.steps, buckets, line.latency, share * line.per_byte)


@pytest.mark.parametrize(
    ("question", "change"),
    [
        ("buckets=25", {"caps": [25]}),
        ("buckets=1,2", {"caps": [1, 2]}),
        ("gradients=fp16", {"share": 0.5}),
        ("gradients=bf16", {"share": 0.5}),
    ],
)
def test_steps_take_what_the_slow_simulation_says(job, question, change):
    (result,) = answer(Replay(job), [question])
    assert result.predicted == pytest.approx(slow(job, **change))
    assert result.recorded == pytest.approx(slow(job))
    assert any("recorded mean" in note for note in result.notes)


def test_a_server_costs_what_its_links_do(job):
    (result,) = answer(Replay(job), ["server=1"])
    assert result.predicted == pytest.approx(slow(job, cost=server_cost(ddp_job(job).cost, 2, 1)))
    assert any("server" in note for note in result.notes)


def test_another_reduction_program_costs_what_the_machine_says(job, system):
    question = "reduction=reduce-scatter over all devices; all-gather over all devices"
    (result,) = answer(Replay(job), [question], system)
    seconds = result.predicted - result.recorded
    assert seconds == pytest.approx(0, abs=1e-9)  # on one level, both are the same ring


def test_sizes_beyond_those_of_the_fit_are_flagged(tmp_path):
    job = read(tmp_path, buckets=((MIB, MIB), (MIB,)))
    within, beyond = answer(Replay(job), ["buckets=1", "buckets=3"])
    assert [one.is_extrapolated for one in (within, beyond)] == [False, True]
    assert [any("outside the sizes" in note for note in one.notes) for one in (within, beyond)] == [False, True]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("buckets=0", "expected whole MiB from 1"),
        ("buckets=0.5", "is '0.5'; expected whole MiB from 1"),
        ("buckets=10000000", "from 1 to 1,048,576, like 25"),
        ("buckets=1,,2", "whole MiB"),
        ("gradients=fp32", "gradients is 'fp32'; expected fp16 or bf16"),
        ("server=0", "expected a whole number from 1 to 1,048,576"),
        ("reduction=all-reduce over all devices", "--system"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(job, question, words):
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        answer(Replay(job), [question])
    assert "\n" not in str(error.value)


def test_an_unknown_program_names_the_known_ones(job, system):
    with pytest.raises(UsageError, match="did you mean 'all-reduce over all devices'"):
        answer(Replay(job), ["reduction=all-reduce over all device"], system)


def test_jobs_without_gradients_have_no_buckets():
    with pytest.raises(UsageError, match="no training under DDP"):
        answer(Replay(job_without_gradients(2, 3)), ["buckets=25"])


@pytest.mark.parametrize("question", ["gradients=bf16", "gradients=fp16"])
def test_gradients_that_have_16_bits_already_are_not_shortened(tmp_path, question):
    with pytest.raises(UsageError, match="already reduced in 16 bits"):
        answer(Replay(read(tmp_path, dtype="c10::BFloat16")), [question])


@pytest.mark.parametrize("question", ["server=2", "buckets=1", "gradients=fp16"])
def test_a_job_of_one_rank_is_refused_in_one_line(tmp_path, question):
    with pytest.raises(UsageError, match="one rank") as error:
        answer(Replay(read(tmp_path, ranks=1)), [question])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("question", ["server=1", "buckets=2", "gradients=bf16"])
def test_a_cost_that_does_not_grow_with_size_is_flagged(tmp_path, question):
    (result,) = answer(Replay(read(tmp_path, seconds=lambda size: 100)), [question])
    assert result.is_extrapolated
    assert any("larger collectives do not take longer" in note for note in result.notes)


def test_limits_hold_what_the_fitted_cost_varies_by(tmp_path):
    (steady,) = answer(Replay(read(tmp_path / "steady")), ["buckets=3"])
    assert steady.of_model.high - steady.of_model.low < 0.02
    times = itertools.cycle([10, 12, 200, 15, 160, 11])
    job = read(tmp_path / "noisy", seconds=lambda size: 150 if size > MIB else next(times))
    (result,) = answer(Replay(job), ["buckets=3"])
    assert result.of_model.low <= result.of_model.estimate <= result.of_model.high
    assert result.of_model.high - result.of_model.low > 0.02


def test_a_model_that_misses_the_recorded_steps_predicts_nothing(tmp_path):
    """A system whose collectives take 100 times as long as the recorded ones."""
    (tmp_path / "slow.toml").write_text(SYSTEM.replace("0.1GB/s", "0.001GB/s"))
    result = diagnose(read(tmp_path / "job"), ["buckets=1"], str(tmp_path / "slow.toml"))
    assert "misses single recorded steps" in result.answers[0].doubt
    report = result.report()
    assert any(one.startswith("buckets=1: not predicted, as the model of DDP misses") for one in report.findings)
    assert not report.further_json["results"]["what_if"][0]["is_trusted"]
    assert "buckets=1" not in str(report.estimates.rows)


def test_one_rank_of_two_is_said(tmp_path):
    (result,) = answer(Replay(read(tmp_path, ranks=1, world_size=2)), ["buckets=1"])
    assert any("1 of 2 ranks was read" in note for note in result.notes)


def test_a_mean_that_was_fitted_is_no_evidence_for_single_steps(tmp_path):
    """Collectives of one size whose times vary twenty-fold: the fit has their mean, and the model misses each step."""
    times = itertools.cycle([100, 500, 120, 480])
    job = read(tmp_path, buckets=((MIB,),), seconds=lambda _: next(times))
    assert abs(ddp_job(job).error) < 0.05
    (result,) = answer(Replay(job), ["gradients=fp16"])
    assert "misses single recorded steps" in result.doubt
    assert any("differ from the cost fitted to them" in note for note in result.notes)
