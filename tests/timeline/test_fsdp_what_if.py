"""What-ifs of trainings under FSDP2, on traces whose steps are one thing after the other."""

from __future__ import annotations

import pytest

from kineto_traces import cpu_job, sharded_step, trace, write
from unsilent.errors import UsageError
from unsilent.timeline.load import load_job
from unsilent.timeline.replay import Replay
from unsilent.timeline.what_if import answer

APART = 5
"""Microseconds between the ranks."""


def job(folder):
    for rank in (0, 1):
        events = [one for step in range(3) for one in sharded_step(step, 1000 * step + APART * rank)]
        write(folder / f"t{rank}.json", trace(events, rank))
    return load_job([folder])


@pytest.mark.parametrize(
    ("question", "saved"),
    [("reshard_after_forward=no", 150), ("reduce_dtype=bf16", 105), ("reduce_dtype=fp16", 105)],
)
def test_a_step_becomes_shorter_by_what_its_collectives_take_less(tmp_path, question, saved):
    """The thread waits 150 µs for the all-gather in its backward pass; the reduce-scatter takes 210 µs, all by the byte."""
    (result,) = answer(Replay(job(tmp_path)), [question])
    assert 1e6 * (result.recorded - result.predicted) == pytest.approx(saved, abs=APART + 1)
    assert result.notes


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
