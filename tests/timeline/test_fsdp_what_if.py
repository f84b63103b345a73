"""What-ifs of trainings under FSDP2, on traces whose steps are one thing after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kineto_traces import cpu_job, sharded_step, trace, write
from unsilent.errors import UsageError
from unsilent.timeline.job import FORWARD
from unsilent.timeline.load import load_job
from unsilent.timeline.replay import Replay
from unsilent.timeline.what_if import answer, parse_change

APART = 5
"""Microseconds between the ranks."""


def job(folder, **options):
    for rank in (0, 1):
        events = [one for step in range(3) for one in sharded_step(step, 1000 * step + APART * rank, **options)]
        write(folder / f"t{rank}.json", trace(events, rank))
    return load_job([folder])


@pytest.mark.parametrize(
    ("question", "saved"),
    [("reshard_after_forward=no", 195), ("reduce_dtype=bf16", 105), ("reduce_dtype=fp16", 105)],
)
def test_a_step_becomes_shorter_by_what_its_collectives_take_less(tmp_path, question, saved):
    """An all-gather, its launch and copies take 20 + 150 + 25 µs of a backward pass; a reduce-scatter 210, all by the byte."""
    (result,) = answer(Replay(job(tmp_path)), [question])
    assert 1e6 * (result.recorded - result.predicted) == pytest.approx(saved, abs=APART + 1)
    assert result.notes


def test_without_the_second_all_gather_ranks_do_not_wait_for_each_other_there(tmp_path):
    """Rank 1 is late before it, and rank 0 after it: with it both delays add up, without it they pass at the same time."""
    recorded = Replay(job(tmp_path))
    changed = parse_change("reshard_after_forward=no", recorded)
    o = recorded.job.operations
    late, delay = np.zeros(len(o)), 100e-6
    for rank, place in ((1, 0), (0, 2)):
        for step in range(3):
            name = np.array([one.endswith("AddmmBackward0") for one in o.names])[o.name]
            late[np.flatnonzero(name & (o.rank == rank) & (o.step == step))[place]] = delay

    def longer(replay, durations, gaps):
        plain, delayed = (replay.step_seconds(*replay.run(one, gaps)) for one in (durations, durations + late))
        return (delayed - plain)[1:]

    assert longer(recorded, recorded.durations, recorded.gaps) == pytest.approx(2 * delay, abs=APART * 1e-6)
    assert longer(changed.replay, changed.durations, changed.gaps) == pytest.approx(delay, abs=APART * 1e-6)


def test_a_size_beyond_those_that_were_recorded_is_flagged(tmp_path):
    gathers, reduces = answer(Replay(job(tmp_path)), ["reshard_after_forward=no", "reduce_dtype=bf16"])
    assert (gathers.is_extrapolated, reduces.is_extrapolated) == (False, True)
    assert any("outside the sizes" in note for note in reduces.notes)


@pytest.mark.parametrize(
    ("question", "words"),
    [("reshard_after_forward=yes", "Known: no"), ("reduce_dtype=bf61", "did you mean 'bf16'")],
)
def test_unknown_settings_are_refused(tmp_path, question, words):
    with pytest.raises(UsageError, match=words):
        answer(Replay(job(tmp_path)), [question])


@pytest.mark.parametrize("question", ["reshard_after_forward=no", "reduce_dtype=bf16"])
def test_jobs_without_sharded_parameters_have_no_such_settings(tmp_path, question):
    cpu_job(tmp_path)
    with pytest.raises(UsageError, match="under FSDP2"):
        answer(Replay(load_job([tmp_path])), [question])


def test_a_job_that_does_not_gather_again_is_said_to_have_the_setting(tmp_path):
    """All-gathers of the forward pass stay; none is in a backward pass."""
    recorded = job(tmp_path)
    o = recorded.operations
    gathers = np.array(["gather" in one for one in o.names])[o.name]
    phase = np.where(gathers, FORWARD, o.phase).astype(np.int8)
    with pytest.raises(UsageError, match="all-gathers in forward passes alone.*the setting already") as raised:
        answer(Replay(replace(recorded, operations=replace(o, phase=phase))), ["reshard_after_forward=no"])
    assert "under FSDP2" not in str(raised.value)


@pytest.mark.parametrize("question", ["reduce_dtype=bf16", "reduce_dtype=fp16"])
def test_gradients_that_are_reduced_in_16_bits_already_are_not_shortened(tmp_path, question):
    with pytest.raises(UsageError, match="already reduced in 16 bits"):
        answer(Replay(job(tmp_path, reduced="c10::BFloat16")), [question])
