"""Traces of the profiler as operations: of threads and streams, with launches, phases, steps and collectives."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kineto_traces import BASE, STORED, cpu_job, cpu_step, event, gloo, gpu_step, sharded_step, trace, write
from unsilent.basics.errors import UsageError
from unsilent.timeline import json_stream
from unsilent.timeline.job import COLLECTIVE, COMPUTE, KINDS, PHASES
from unsilent.timeline.json_stream import ARGUMENT_NAMES
from unsilent.timeline.kineto import read_traces
from unsilent.timeline.load import job_of_recording
from unsilent.timeline.rank_trace import make_names, read_rank_trace
from unsilent.timeline.replay import unexplained_gaps

MI300 = Path(__file__).resolve().parents[3] / "shared" / "data" / "timeline" / "mi300-resnet-rank0of8.json.gz"


def rows(recording, rank=0, step=0):
    """Operations of a rank and step: lane, name, kind, phase, begin and duration in µs, collective."""
    o = recording.operations
    return [
        (recording.lanes[o.lane[at]].name, o.names[o.name[at]].rpartition(": ")[2], KINDS[o.kind[at]], PHASES[o.phase[at]],
         round(o.start[at] * 1e6), round(o.duration[at] * 1e6), int(o.collective[at]))
        for at in np.flatnonzero((o.rank == rank) & (o.step == step))
    ]  # fmt: skip


def check_order(recording):
    """Operations are ordered, those of a lane do not overlap, and launches begin before what they launch."""
    o = recording.operations
    assert (np.lexsort((o.start, o.rank)) == np.arange(len(o))).all()
    for lane in range(len(recording.lanes)):
        own = np.flatnonzero(o.lane == lane)
        assert (o.start[own][1:] >= o.end[own][:-1] - 1e-9).all()
        assert (o.rank[own] == recording.lanes[lane].rank).all()
    assert (o.start[recording.launches[:, 0]] <= o.start[recording.launches[:, 1]] + 1e-9).all()
    assert (o.duration >= 0).all()


def test_a_step_on_cpus(tmp_path):
    cpu_job(tmp_path)
    recording = read_traces([tmp_path])
    check_order(recording)
    assert rows(recording) == [
        ("thread 1", "aten::stack", "compute", "loader", 20, 20, -1),
        ("thread 1", "aten::linear", "compute", "forward", 70, 100, -1),
        ("thread 1", "(between operations)", "host", "forward", 170, 30, -1),
        ("thread 1", "AddmmBackward0", "compute", "backward", 210, 90, -1),
        ("thread 1", "torch::autograd::AccumulateGrad", "compute", "backward", 310, 30, -1),
        ("thread 1", "c10d::allreduce_", "host", "backward", 340, 20, -1),
        ("thread 1", "torch::autograd::AccumulateGrad", "compute", "backward", 360, 10, -1),
        ("gloo thread 2", "gloo:all_reduce", "collective", "backward", 370, 230, 0),
        ("thread 1", "c10d::allreduce_", "host", "other", 380, 20, -1),
        ("gloo thread 3", "gloo:all_reduce", "collective", "other", 410, 290, 1),
        ("thread 1", "torch.distributed.ddp.reducer::copy_bucket_to_grad", "compute", "backward", 710, 20, -1),
        ("thread 1", "(between operations)", "host", "optimizer", 740, 60, -1),
        ("thread 1", "aten::add_", "compute", "optimizer", 800, 90, -1),
        ("thread 1", "(between operations)", "host", "other", 900, 100, -1),
    ]
    assert recording.steps == (3, 4)
    assert recording.world_size == 2
    assert recording.notes == ()
    o, names = recording.operations, recording.operations.names
    pairs = [(names[o.name[a]], int(o.size[b])) for a, b in recording.launches if o.rank[a] == 0]
    assert sorted(pairs) == [
        ("c10d::allreduce_", 16),
        ("c10d::allreduce_", 16),
        ("c10d::allreduce_", 64),
        ("c10d::allreduce_", 64),
    ]
    assert sorted(o.collective[o.kind == COLLECTIVE].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    ready = recording.gradients[1]
    assert ready.step.tolist() == [0, 1]
    assert ready.size.tolist() == [16, 16]
    assert ready.ready == pytest.approx([430e-6, 1430e-6])


def test_time_in_which_a_thread_waits_is_no_operation(tmp_path):
    """The thread waits from 400 to 710, where collectives ended; a sleep as long in a rank alone is an operation."""
    cpu_job(tmp_path)
    begins = [row[4] for row in rows(read_traces([tmp_path]))]
    assert not any(400 < begin < 710 for begin in begins if begin != 410)
    without = [one for one in cpu_step(3, 0) if not one["name"].startswith(("gloo", "c10d"))]
    write(tmp_path / "alone.json", trace(without, 0, 1))
    assert ("thread 1", "(between operations)", "host", "backward", 370, 340, -1) in rows(
        read_traces([tmp_path / "alone.json"])
    )


def test_collectives_of_sharded_parameters_are_launched_and_waited_for(tmp_path):
    """Time in which a thread waits for what it has just launched is no computation, within an operation either."""
    for rank in (0, 1):
        write(tmp_path / f"t{rank}.json", trace(sharded_step(3, 5 * rank) + sharded_step(4, 1000 + 5 * rank), rank))
    recording = read_traces([tmp_path])
    check_order(recording)
    assert recording.notes == ()
    thread = [row[1:2] + row[4:6] for row in rows(recording) if row[0] == "thread 1"]
    assert thread == [
        ("(between operations)", 0, 20), ("c10d::_allgather_base_", 20, 30),
        ("aten::addmm", 150, 100),
        ("AddmmBackward0", 260, 5), ("fsdp::all_gather_copy_in", 265, 10), ("AddmmBackward0", 275, 5),
        ("c10d::_allgather_base_", 280, 20),
        ("fsdp::split_with_sizes_copy", 450, 15), ("AddmmBackward0", 465, 95), ("c10d::_reduce_scatter_base_", 560, 20),
        ("AddmmBackward0", 800, 60), ("c10d::allreduce_", 870, 20),
        ("aten::add_", 930, 60),
    ]  # fmt: skip
    copies = {row[2] for row in rows(recording) if row[1].startswith("fsdp")}
    assert copies == {"copy"}
    assert not any(lane.name == "thread 2" for lane in recording.lanes)  # what a collective does is part of it
    o, names = recording.operations, recording.operations.names
    own = (o.rank[recording.launches[:, 0]] == 0) & (o.step[recording.launches[:, 0]] == 0)
    pairs = [(names[o.name[a]], names[o.name[b]], int(o.size[b])) for a, b in recording.launches[own]]
    assert sorted(pairs) == [
        ("c10d::_allgather_base_", "gloo:all_gather", 16), ("c10d::_allgather_base_", "gloo:all_gather", 16),
        ("c10d::_reduce_scatter_base_", "gloo:reduce_scatter", 32), ("c10d::allreduce_", "gloo:all_reduce", 16),
    ]  # fmt: skip
    job = job_of_recording(recording)
    gaps = unexplained_gaps(job)[(job.operations.step == 0) & (job.operations.kind == COLLECTIVE)]
    assert gaps.max() < 25e-6  # a launch goes on for a moment
    waited = [
        (job.operations.names[job.operations.name[a]], round(job.operations.start[b] * 1e6))
        for a, b in zip(job.edges.source, job.edges.target, strict=True)
        if job.operations.kind[a] == COLLECTIVE and job.operations.kind[b] != COLLECTIVE and job.operations.rank[a] == 0
        and job.operations.step[a] == 0
    ]  # fmt: skip
    assert {one[0] for one in waited} == {"gloo:all_gather", "gloo:all_reduce", "gloo:reduce_scatter"}
    assert len({one[1] for one in waited}) == 4


def test_the_last_step_ends_after_its_last_operation_has_begun(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"t{rank}.json", trace(sharded_step(3, 5 * rank) + sharded_step(4, 1000 + 5 * rank), rank))
    recording = read_traces([tmp_path])
    assert job_of_recording(recording).step_times[0] == pytest.approx(recording.step_times[0])
    assert recording.step_times[0][-1, 1] == pytest.approx(2000e-6)


def test_a_step_on_gpus(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"t{rank}.json", trace(gpu_step(5, 100 * rank) + gpu_step(6, 1000 + 100 * rank), rank))
    recording = read_traces([tmp_path])
    check_order(recording)
    assert rows(recording, step=1) == [
        ("thread 1", "aten::linear", "host", "forward", 1020, 20, -1),
        ("thread 1", "cudaLaunchKernel", "host", "forward", 1040, 10, -1),
        ("thread 1", "aten::linear", "host", "forward", 1050, 30, -1),
        ("thread 1", "(between operations)", "host", "forward", 1080, 20, -1),
        ("stream 7", "sgemm", "compute", "forward", 1100, 200, -1),
        ("thread 5", "X", "host", "backward", 1110, 20, -1),
        ("thread 5", "cudaLaunchKernel", "host", "backward", 1130, 10, -1),
        ("thread 5", "X", "host", "backward", 1140, 20, -1),
        ("thread 5", "cudaLaunchKernelExC", "host", "backward", 1160, 10, -1),
        ("thread 5", "X", "host", "backward", 1170, 40, -1),
        ("stream 7", "sgemm_back", "compute", "backward", 1300, 200, -1),
        ("stream 20", "nccl:allreduce", "collective", "backward", 1500, 300, 1),
        ("thread 1", "aten::to", "host", "other", 1800, 10, -1),
        ("thread 1", "cudaMemcpyAsync", "host", "other", 1810, 10, -1),
        ("thread 1", "aten::to", "host", "other", 1820, 10, -1),
        ("thread 1", "cudaStreamSynchronize", "host", "other", 1830, 60, -1),
        ("stream 7", "Memcpy DtoH", "copy", "other", 1850, 20, -1),
        ("thread 1", "aten::to", "host", "other", 1890, 90, -1),
        ("thread 1", "(between operations)", "host", "other", 1980, 20, -1),
    ]
    o = recording.operations
    assert set(o.size[o.kind == COLLECTIVE].tolist()) == {16}
    assert len(recording.launches) == 16
    assert [lane.is_device for lane in recording.lanes] == [False, False, True, True] * 2


def test_old_gpu_traces_name_no_collective_and_no_size(tmp_path):
    events = gpu_step(5, 0)
    for one in events:
        one["args"] = {key: value for key, value in one["args"].items() if key == "correlation"}
    recording = read_traces([write(tmp_path / "t.json", trace(events, 0, 1))])
    o = recording.operations
    own = np.flatnonzero(o.kind == COLLECTIVE)
    assert [(o.names[o.name[at]], o.size[at], o.collective[at]) for at in own] == [
        ("ncclDevKernel_AllReduce(x)", -1, 0)
    ]


def test_a_kernel_without_arguments_has_the_name_and_size_of_the_annotation_around_its_launch(tmp_path):
    """Old traces: NCCL runs an all-to-all as a kernel that is named after messages between two ranks."""
    for rank in (0, 1):
        events = gpu_step(5, 0)
        for one in events:
            if one["name"].startswith("nccl"):
                one["name"], one["args"] = "ncclKernel_SendRecv(x)", {"correlation": one["args"]["correlation"]}
        shape = {"Input type": ["float"], "Input Dims": [[8]]}
        events.append(event("nccl:all_to_all", 155, 20, "user_annotation", tid=5, **shape))
        events.append(event("nccl:all_reduce", 155, 20, "user_annotation", tid=1, **shape))
        write(tmp_path / f"t{rank}.json", trace(events, rank))
    recording = read_traces([tmp_path])
    o = recording.operations
    own = np.flatnonzero(o.kind == COLLECTIVE)
    assert [(o.names[o.name[at]], o.size[at], o.collective[at]) for at in own] == [("nccl:all_to_all", 32, 0)] * 2
    assert recording.notes == ()


@pytest.mark.parametrize(
    "sign", [event("cudaLaunchKernel", 100, 5, "cuda_runtime"), event("nccl:all_reduce", 100, 5, "user_annotation")]
)
def test_work_of_a_device_that_was_not_recorded_is_no_computation_of_the_host(tmp_path, sign):
    events = [one for one in cpu_step(3, 0) if not one["name"].startswith(("gloo", "c10d"))]
    recording = read_traces([write(tmp_path / "t.json", trace([*events, sign], 0, 1))])
    assert not (recording.operations.kind == COMPUTE).any()
    assert recording.notes == (
        "rank 0 used a device, and what ran there was not recorded: record it with ProfilerActivity.CUDA",
    )


def test_operations_of_other_accelerators_are_read(tmp_path):
    events = [
        event("ProfilerStep#5", 0, 1000, "user_annotation"),
        event("aten::linear", 20, 60),
        event("runFunction", 40, 10, "mtia_runtime", correlation=1),
        event("fc-dtype_Float", 100, 200, "mtia_ccp_events", 408, 9, correlation=1),
    ]
    recording = read_traces([write(tmp_path / "t.json", trace(events, 0, 1))])
    assert [row[:3] for row in rows(recording) if row[2] == "compute"] == [("stream 408", "fc-dtype_Float", "compute")]
    assert len(recording.launches) == 1


def test_groups_of_gpu_traces_are_matched_apart(tmp_path):
    for rank in range(4):
        ranks = [0, 2] if rank % 2 == 0 else [1, 3]
        group = {"Process Group Name": "tp", "Process Group Ranks": str(ranks)}
        write(tmp_path / f"t{rank}.json", trace(gpu_step(5, 0, **group), rank, 4))
    o = read_traces([tmp_path]).operations
    numbers = {int(o.rank[at]): int(o.collective[at]) for at in np.flatnonzero(o.kind == COLLECTIVE)}
    assert numbers[0] == numbers[2] != numbers[1] == numbers[3]


def test_clocks_and_begins_of_ranks(tmp_path):
    clock = [[BASE * 1e-9 + 2.0, 0.5, 1e-5], [BASE * 1e-9 + 4.0, 0.6, 2e-5]]
    write(tmp_path / "t0.json", trace(cpu_step(3, 2e6), 0))
    late = trace(cpu_step(3, 500), 1, unsilent_clock=clock)
    late["baseTimeNanoseconds"] = BASE + 3_000_000_000
    write(tmp_path / "t1.json", late)
    recording = read_traces([tmp_path])
    begins = [recording.operations.start[recording.operations.rank == rank].min() for rank in (0, 1)]
    assert begins == pytest.approx([20e-6, 1.00052], abs=1e-6)
    assert list(recording.anchors) == [1]
    assert recording.anchors[1] == pytest.approx(np.array([[0.0, 0.5, 1e-5], [2.0, 0.6, 2e-5]]), abs=1e-6)


def test_collectives_of_different_size_are_reported(tmp_path):
    write(tmp_path / "t0.json", trace(cpu_step(3, 0), 0))
    write(tmp_path / "t1.json", trace(cpu_step(3, 0, sizes=(16, 128)), 1))
    recording = read_traces([tmp_path])
    assert any("2 collectives in complete steps differ between ranks" in note for note in recording.notes)


def test_a_collective_launched_before_the_recording_has_no_launch(tmp_path):
    events = [gloo("all_reduce", -50, 40), *cpu_step(3, 0)]
    recording = read_traces([write(tmp_path / "t.json", trace(events, 0, 1))])
    assert len(recording.launches) == 2
    check_order(recording)
    assert "rank 0: the launch of 2 of 3 collectives named gloo:allreduce was found" in recording.notes


def test_messages_between_ranks_are_not_matched(tmp_path):
    events = [*cpu_step(3, 0), event("c10d::send", 900, 5), gloo("send", 910, 20)]
    recording = read_traces([write(tmp_path / "t.json", trace(events, 0, 1))])
    assert "1 message between two ranks was not matched" in recording.notes


def test_steps_that_a_trace_lacks_are_left_out(tmp_path):
    write(tmp_path / "t0.json", trace(cpu_step(3, 0) + cpu_step(4, 1000), 0))
    write(tmp_path / "t1.json", trace(cpu_step(4, 1000) + cpu_step(5, 2000), 1))
    recording = read_traces([tmp_path])
    assert recording.steps == (4,)
    assert "2 steps were left out because some traces do not hold them" in recording.notes


def test_ranks_that_were_not_recorded_are_reported(tmp_path):
    recording = read_traces([write(tmp_path / "t.json.gz", trace(cpu_step(3, 0), 5, 8))])
    assert recording.notes == ("traces of 1 of 8 ranks were read",)
    assert recording.world_size == 8


def test_a_rank_from_the_name_of_the_file_is_said(tmp_path):
    content = trace(cpu_step(3, 0))
    del content["distributedInfo"]
    recording = read_traces([write(tmp_path / f"x-rank{rank}.json", content) for rank in (0, 3)])
    assert recording.notes[0] == "x-rank0.json does not say its rank; 0 was taken from its name"
    assert recording.world_size == 4


def test_a_dump_of_the_flight_recorder_in_the_folder_is_passed_over(tmp_path):
    cpu_job(tmp_path)
    write(tmp_path / "flight-rank0.json", {"entries": [], "pg_status": {}})
    assert read_traces([tmp_path]).world_size == 2


STEP = cpu_step(3, 0)
DAMAGED = {
    "a time that is text": [*STEP, event("x", "now", 1)],
    "a time that is infinite": [*STEP, event("x", float("inf"), 1)],
    "a time that is none": [*STEP, event("x", float("nan"), 1)],
    "a huge time": [*STEP, event("x", 10**400, 1)],
    "a negative duration": [*STEP, event("x", 0, -1)],
    "no duration": [*STEP, event("x", 0, None)],
    "a name that is a list": [*STEP, event([1], 0, 1)],
    "a thread that is a list": [*STEP, event("x", 0, 1, tid=[])],
}
JOBS = {
    "an empty folder": ({}, "has 0 traces"),
    "no step": ({"a.json": trace([event("aten::add", 0, 1)])}, "a.json has no complete step"),
    "no event of torch": ({"a.json": trace([event("all-reduce", 0, 1, None)])}, "a.json has no event of PyTorch's profiler"),
    "no common step": ({"a.json": trace(cpu_step(3, 0)), "b.json": trace(cpu_step(4, 0), 1)}, "no step in common"),
    "a rank twice": ({"a.json": trace(STEP), "b.json": trace(STEP)}, "are both of rank 0"),
    "other sizes": ({"a.json": trace(STEP), "b.json": trace(STEP, 1, 4)}, "different jobs: 2 ranks over gloo, 4 ranks over gloo"),
    "too high a rank": ({"a.json": trace(STEP, 5, 2)}, "is of rank 5, but the job has 2 ranks"),
    "hours apart": ({"a.json": trace(STEP), "b.json": trace(cpu_step(3, 5e9), 1)}, "more than an hour apart"),
    "unknown ranks": ({n: {"traceEvents": STEP} for n in ("a.json", "b.json")}, "a.json does not say its rank"),
    "a huge world": ({"a.json": trace(STEP, 0, 10**300)}, "no possible number of ranks"),
    "a base that is text": ({"a.json": trace(STEP) | {"baseTimeNanoseconds": "x"}}, "baseTimeNanoseconds"),
    "a clock that is text": ({"a.json": trace(STEP, unsilent_clock=[["a", 1, 2]])}, "unsilent_clock"),
    "a clock of two columns": ({"a.json": trace(STEP, unsilent_clock=[[1, 2]])}, "unsilent_clock"),
    "only a dump": ({"a.json": {"entries": [], "pg_status": {}}}, "no trace of the profiler"),
    **{name: ({"a.json": trace(events)}, "has a damaged name, time or thread") for name, events in DAMAGED.items()},
}  # fmt: skip


@pytest.mark.parametrize("decoder", ["msgspec", "standard library"])
@pytest.mark.parametrize("case", JOBS)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path, monkeypatch, case, decoder):
    if decoder != "msgspec":
        monkeypatch.setattr(json_stream, "_fast_decoder", lambda: None)
    files, expected = JOBS[case]
    for name, content in files.items():
        write(tmp_path / name, content)
    with pytest.raises(UsageError) as error:
        read_traces([tmp_path])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match="no-trace"):
        read_traces([tmp_path / "no-trace.json"])


def test_what_is_kept_of_an_event_does_not_keep_the_file_in_memory():
    details = read_rank_trace(STORED[0], make_names(), is_only=False).details.values()
    assert len(details) > 30
    for one in details:
        assert all(isinstance(getattr(one, name), (str, int, float, list, type(None))) for name in ARGUMENT_NAMES)


def test_names_are_made_harmless(tmp_path):
    events = [*STEP, event("\x1b[31m" + "x" * 1000, 950, 1)]
    names = read_traces([write(tmp_path / "t.json", trace(events, 0, 1))]).operations.names
    assert all(name.isprintable() and len(name) < 300 for name in names)


def test_a_stored_recording():
    recording = read_traces(STORED)
    check_order(recording)
    o = recording.operations
    assert recording.steps == (3, 4, 5)
    assert recording.notes == ()
    collectives = o.kind == COLLECTIVE
    assert np.bincount(o.collective[collectives]).tolist() == [2] * 15
    assert len(recording.launches) == 30
    # Of each step: two buffers of a batch norm, two buckets of gradients, and the all-reduce of five numbers.
    first = collectives & (o.rank == 0) & (o.step == 1)
    assert o.size[first].tolist() == [512, 8, 18720, 8960, 20]
    gradients = recording.gradients[0]
    assert gradients.size[gradients.step == 1].sum() == 18720 + 8960


def check_read_or_refused(paths):
    """What is read is in order; what is not is refused in one line."""
    try:
        recording = read_traces(paths)
    except UsageError as error:
        said = str(error)
    else:
        check_order(recording)
        said = " ".join(recording.notes)
    assert said.isprintable()


def mutated(content, choice):
    """The trace with one value replaced, at a place that ``choice`` names."""
    places = []

    def walk(value):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                walk(value[key])

    walk(content)
    place, replacement = choice
    parent, key = places[place % len(places)]
    if replacement == "remove":
        del parent[key]
    else:
        parent[key] = replacement
    return content


HOSTILE = st.sampled_from([
    "remove", None, "", "x", True, -1, 0, 10**30, 2**63, 1e308, float("nan"), float("inf"), [], [[]], {}, {"a": []}, "\ud800",
    "ProfilerStep#3", "gloo:all_reduce", "c10d::allreduce_", "X", "kernel", "[0, 1]",
])  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 10**6), HOSTILE), min_size=1, max_size=3), st.sampled_from([cpu_step, gpu_step])
)
@example(choices=[(132, True)], make=gpu_step)  # a kernel that begins before its launch
def test_a_mutated_trace_is_read_or_refused_in_one_line(tmp_path_factory, choices, make):
    folder = tmp_path_factory.mktemp("mutated")
    contents = [trace(make(3, 100 * rank) + make(4, 1000), rank) for rank in (0, 1)]
    for choice in choices:
        contents[0] = mutated(contents[0], choice)
    for rank, content in enumerate(contents):
        write(folder / f"t{rank}.json", content)
    check_read_or_refused([folder])


@given(st.integers(0, 10**6), st.binary(max_size=3))
def test_damaged_bytes_are_read_or_refused_in_one_line(tmp_path_factory, at, content):
    path = tmp_path_factory.mktemp("damaged") / "t.json"
    whole = json.dumps(trace(cpu_step(3, 0), 0, 1)).encode()
    at %= len(whole)
    path.write_bytes(whole[:at] + content + whole[at + 1 :])
    check_read_or_refused([path])


@pytest.mark.skipif(not MI300.exists(), reason="needs ../shared/data/timeline")
def test_one_rank_of_a_real_gpu_job():
    recording = read_traces([MI300])
    check_order(recording)
    o = recording.operations
    assert recording.steps == (15, 16, 17)
    assert recording.world_size == 8
    assert recording.notes == ("traces of 1 of 8 ranks were read",)
    with gzip.open(MI300) as file:
        events = json.load(file)["traceEvents"]
    kernels = [one for one in events if one.get("cat") == "kernel"]
    is_device = np.array([lane.is_device for lane in recording.lanes])[o.lane]
    assert (is_device & np.isin(o.kind, (COMPUTE, COLLECTIVE))).sum() == len(kernels)
    sizes = o.size[(o.kind == COLLECTIVE) & (o.size >= 0)]
    named = [2 * one["args"]["In msg nelems"] for one in kernels if one["args"].get("dtype") == "BFloat16"]
    assert set(named) <= set(sizes.tolist())
    assert len(recording.launches) > 2500


GLOO = """
    import os, sys
    import torch
    from torch import distributed, nn
    from torch.profiler import ProfilerActivity, profile, schedule

    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    write = lambda done: done.export_chrome_trace(f"{folder}/rank{rank}.json")
    plan = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=write) as profiler:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            profiler.step()
    distributed.barrier()
    os._exit(0)
"""


@pytest.mark.slow
def test_a_recording_made_now(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(GLOO))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, script, str(rank), tmp_path], env=environment, stderr=subprocess.DEVNULL)
        for rank in (0, 1)
    ]
    assert [process.wait(120) for process in running] == [0, 0]
    recording = read_traces([tmp_path])
    check_order(recording)
    o = recording.operations
    assert recording.notes == ()
    assert recording.steps == (2, 3, 4)
    collectives = (o.kind == COLLECTIVE) & (o.step >= 0)
    assert set(np.bincount(o.collective[collectives]).tolist()) == {2}
    gradients = recording.gradients[0]
    for step in range(3):  # the buckets of a step hold its gradients
        assert (
            o.size[collectives & (o.rank == 0) & (o.step == step)].sum() == gradients.size[gradients.step == step].sum()
        )


def test_dumps_beside_traces_are_no_traces(tmp_path):
    cpu_job(tmp_path)
    (tmp_path / "flight-rank0.json").write_text('{"version": "2.10", "pg_status": {}}')
    assert len(read_traces([tmp_path]).operations)


def test_runs_that_do_not_belong_together_are_refused():
    recording = read_traces(STORED)
    later = replace(recording.operations, start=recording.operations.start + 90.0 * (recording.operations.rank == 1))
    anchors = {rank: np.array([[0.0, 0.0, 1e-5]]) for rank in (0, 1)}
    with pytest.raises(UsageError, match="give traces of one run"):
        job_of_recording(replace(recording, operations=later, anchors=anchors))
