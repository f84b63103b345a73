"""What-ifs of trainings under FSDP2, on traces whose steps are one thing after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kineto_traces import cpu_job, event, gloo, sharded_step, trace, write
from unsilent.basics.errors import UsageError
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


def units_step(step, ts, sizes=(32, 64, 96, 128), again=4, launch=30):
    """A step under FSDP2 over gloo with units of these bytes, in which one thing follows the other.

    An all-gather takes 100 µs and 1 for each byte, a reduce-scatter 50 and 2; ``again``: units gathered in the backward pass.
    """
    events, now = list[dict](), ts
    outer = []

    def add(name, length):
        nonlocal now
        events.append(event(name, now, length))
        now += length

    def collective(call, name, size, seconds):
        nonlocal now
        add(call, launch)
        events.append(gloo(name, now, seconds, size))
        now += seconds + 1

    for size in sizes:
        collective("c10d::_allgather_base_", "all_gather", size, 100 + size)
        add("aten::addmm", 40)
    for place, size in enumerate(reversed(sizes)):
        begin = now
        add("aten::mul", 5)
        if place < again:
            collective("c10d::_allgather_base_", "all_gather", size, 100 + size)
        add("aten::mm", 80)
        collective("c10d::_reduce_scatter_base_", "reduce_scatter", size, 50 + 2 * size)
        outer.append(event("autograd::engine::evaluate_function: AddmmBackward0", begin, now - begin))
    add("aten::add_", 60)
    return [event(f"ProfilerStep#{step}", ts, now - ts, "user_annotation"), *events, *outer]


def units_job(folder, **options):
    """Three such steps of two ranks, 10,000 µs apart."""
    for rank in (0, 1):
        events = [one for step in range(3) for one in units_step(step, 10_000 * step, **options)]
        write(folder / f"t{rank}.json", trace(events, rank))
    return Replay(load_job([folder]))


@pytest.mark.parametrize(
    ("again", "question", "saved"),
    [
        (4, "fsdp wrap=2", 2 * 130 + 2 * 130 + 2 * 80),
        (4, "fsdp wrap=3", 2 * 130 + 2 * 130 + 2 * 80),
        (4, "fsdp wrap=4", 3 * 130 + 3 * 130 + 3 * 80),
        (3, "fsdp wrap=2", 130 + 130 + 80),  # the first unit keeps its parameters, and stays alone
        (0, "fsdp wrap=2", 2 * 130 + 2 * 80),
    ],
)
def test_units_wrapped_as_one_save_latencies_and_launches(tmp_path, again, question, saved):
    """A gather less saves its 100 µs and its launch, a reduce-scatter less 50 µs and its launch, of 30 µs each; bytes stay."""
    (result,) = answer(units_job(tmp_path, again=again), [question])
    assert 1e6 * (result.recorded - result.predicted) == pytest.approx(saved, abs=1)
    assert any("stay as they were recorded" in note for note in result.notes)


def test_a_unit_is_reduced_once_the_last_of_those_wrapped_with_it_is_done(tmp_path):
    """The reduce-scatter of the units 3 and 4 comes after the backward pass of 3, the all-gather of both before that of 4."""
    replay = units_job(tmp_path)
    changed = parse_change("fsdp wrap=2", replay)
    o = replay.job.operations
    own = (o.rank == 0) & (o.step == 1)
    taken = {
        name: (1e6 * changed.durations[own & (o.name == o.names.index(name))]).round().tolist()
        for name in ("gloo:all_gather", "gloo:reduce_scatter")
    }
    assert taken["gloo:all_gather"] == [196, 0, 324, 0, 324, 0, 196, 0]
    assert taken["gloo:reduce_scatter"] == [0, 498, 0, 242]


def test_a_wrapped_size_beyond_those_that_were_recorded_is_flagged(tmp_path):
    """Of two units of 40 bytes and one of 200, two as one have 80, three 280."""
    replay = units_job(tmp_path, sizes=(40, 40, 200))
    inside, beyond = answer(replay, ["fsdp wrap=2", "fsdp wrap=3"])
    assert (inside.is_extrapolated, beyond.is_extrapolated) == (False, True)
    assert any("280 B are outside the sizes" in note for note in beyond.notes)


@pytest.mark.parametrize(
    "question", ["fsdp wrap=1", "fsdp wrap=two", "fsdp wrap=1025", "fsdp prefetch=0", "fsdp prefetch=-1"]
)
def test_numbers_of_units_that_make_no_sense_are_refused(tmp_path, question):
    with pytest.raises(UsageError, match="expected a whole number from [12] to 1,024"):
        answer(units_job(tmp_path), [question])


def test_a_misspelled_question_on_units_is_met_with_the_right_one(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'fsdp wrap'"):
        answer(units_job(tmp_path), ["fsdp wrp=2"])


def test_units_that_cannot_be_told_are_not_wrapped(tmp_path):
    with pytest.raises(UsageError, match="4 reduce-scatters, and 4 and 2 all-gathers.*expected one of each"):
        answer(units_job(tmp_path, again=2), ["fsdp wrap=2"])


@pytest.mark.parametrize("question", ["fsdp wrap=2", "fsdp prefetch=2"])
def test_a_job_without_units_is_refused(tmp_path, question):
    cpu_job(tmp_path)
    with pytest.raises(UsageError, match="FSDP2"):
        answer(Replay(load_job([tmp_path])), [question])


def test_over_gloo_gathering_ahead_hides_nothing(tmp_path):
    (result,) = answer(units_job(tmp_path), ["fsdp prefetch=3"])
    assert (result.predicted == result.recorded).all()
    assert any("waits for each all-gather" in note for note in result.notes)


def streams_step(step, ts):
    """A backward pass of three units on a device: all-gathers of 150 µs, kernels of 100.

    The third all-gather is launched at 400, as the second unit begins, 70 µs after the second one has ended.
    """
    arguments = {"Collective name": "_allgather_base", "In msg nelems": 8, "dtype": "Float", "Process Group Name": "0",
                 "Process Group Ranks": "[0, 1]", "Group size": 2}  # fmt: skip
    rows = [(20, 20, 30, 150), (40, 20, 180, 150), (60, 7, 180, 100), (340, 7, 350, 100), (400, 20, 410, 150),
            (420, 7, 560, 100)]  # fmt: skip
    events = [
        event(f"ProfilerStep#{step}", ts, 700, "user_annotation"),
        event("autograd::engine::evaluate_function: X", ts + 10, 430),
        event("cudaStreamSynchronize", ts + 450, 220, "cuda_runtime"),
    ]
    for number, (launched, stream, start, length) in enumerate(rows, 10 * step):
        is_gather = stream == 20
        name = "ncclDevKernel_AllGather(x)" if is_gather else "gemm"
        events += [
            event("cudaLaunchKernel", ts + launched, 10, "cuda_runtime", correlation=number),
            event(
                name, ts + start, length, "kernel", stream, 0, correlation=number, **(arguments if is_gather else {})
            ),
        ]
    return events


@pytest.mark.parametrize(("ahead", "saved"), [(1, 0), (2, 80), (3, 80)])
def test_on_a_device_an_all_gather_is_launched_units_ahead(tmp_path, ahead, saved):
    """Launched with the second one, the third follows it at 330 and ends at 480 instead of 560; then the last kernel begins."""
    for rank in (0, 1):
        events = [one for step in range(3) for one in streams_step(step, 700 * step)]
        write(tmp_path / f"t{rank}.json", trace(events, rank))
    (result,) = answer(Replay(load_job([tmp_path])), [f"fsdp prefetch={ahead}"])
    assert 1e6 * (result.recorded - result.predicted) == pytest.approx(saved, abs=1)
    assert any("one unit ahead" in note for note in result.notes)
