"""Recording a training: which steps, with what, and what it does where it cannot."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.cli.scripts import split_at_script
from unsilent.cli.timeline.record import OPTION_CLASSES
from unsilent.launch.program import Program
from unsilent.timeline import capture
from unsilent.timeline.capture import Recorder
from unsilent.timeline.recorded_run import RecordedRun, check_folder


def fresh(base):
    """A class of optimizers that torch has not seen, as all are in a script that has just begun."""

    class Fresh(base):
        def step(self, closure=None):
            return super().step(closure)

    return Fresh


def trained(count, is_nested=False, others=0):
    """Losses of so many steps of the smallest training."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    make = fresh(torch.optim.SGD)
    if is_nested:  # both classes count steps
        make(model.parameters(), lr=0.1)
        make = fresh(make)
    optimizers = [make(model.parameters(), lr=0.1) for _ in range(1 + others)]
    losses = []
    for _ in range(count):
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def recording(folder, count, steps=3, warmup=3, **training):
    """What was said of a recorded training, and its recorder."""
    lines = []
    recorder = Recorder(folder, steps, warmup, lines.append)
    recorder.start()
    try:
        recorder.losses = trained(count, **training)
    finally:
        recorder.stop()
    return recorder, lines


def read(folder, rank=0):
    return json.loads(gzip.decompress((folder / f"trace-rank{rank}.json.gz").read_bytes()))


def marks(trace):
    return [
        event["name"]
        for event in trace["traceEvents"]
        if event["name"].startswith("ProfilerStep") and event["ph"] == "X"
    ]


@pytest.mark.parametrize(
    "training", [{}, {"is_nested": True}, {"others": 1}], ids=["plain", "nested", "two optimizers"]
)
def test_the_steps_after_warm_up_are_recorded(tmp_path, training):
    alone = trained(12, **training)
    recorder, lines = recording(tmp_path / "new", 12, **training)
    assert (recorder.losses, recorder.recorded, lines) == (alone, 3, [])
    trace = read(tmp_path / "new")
    assert marks(trace) == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    assert trace["unsilent_clock"] == []
    assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])
    steps = sum(event["name"].startswith("Optimizer.step#") for event in trace["traceEvents"])
    assert steps >= 3 * (1 + training.get("others", 0))
    assert "(medians of " in recorder.cost_text()
    assert sorted(os.listdir(tmp_path / "new")) in (
        ["trace-rank0.json.gz"],
        ["flight-rank0.json", "trace-rank0.json.gz"],
    )


def test_a_program_that_ends_early_leaves_what_was_recorded(tmp_path):
    recorder, lines = recording(tmp_path, 5)
    assert (recorder.recorded, recorder.ended, lines) == (2, 5, [])
    assert marks(read(tmp_path))[:2] == ["ProfilerStep#3", "ProfilerStep#4"]
    assert "too few" in recorder.cost_text()
    recorder, lines = recording(tmp_path / "short", 3)
    assert (recorder.recorded, recorder.ended, lines) == (0, 3, [])
    assert not (tmp_path / "short").exists()


def test_steps_after_the_end_are_not_recorded(tmp_path):
    """A class of optimizers that was first used while recording calls the recorder for ever."""
    recorder = Recorder(tmp_path / "new", 3, 3, print)
    recorder.start()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = fresh(torch.optim.SGD)([weight], lr=0.1)
    optimizer.step()
    recorder.stop()
    for _ in range(10):
        optimizer.step()
    assert (recorder.ended, recorder.recorded) == (1, 0)
    assert not torch.autograd._profiler_enabled()
    assert not (tmp_path / "new").exists()


def test_an_error_in_recording_is_said_once_and_the_training_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    recorder, lines = recording(tmp_path / "file" / "below", 12)
    assert recorder.losses == trained(12)
    assert recorder.has_failed
    assert len(lines) == 1
    assert lines[0].startswith("cannot record: ")
    assert lines[0].endswith("; the program goes on without it")
    assert not torch.autograd._profiler_enabled()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_a_compiled_step_is_counted_and_recording_is_not_compiled(tmp_path):
    from torch._dynamo.utils import counters

    def compiled(make):
        model = torch.nn.Linear(4, 2)
        optimizer = make(model.parameters(), lr=0.1)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(12):
            model(torch.ones(3, 4)).square().mean().backward()
            step()
            optimizer.zero_grad()
        return counters["frames"]["total"]

    counters.clear()
    alone = compiled(fresh(torch.optim.SGD))
    lines = []
    recorder = Recorder(tmp_path, 3, 3, lines.append)
    recorder.start()
    try:
        both = compiled(fresh(torch.optim.SGD))
    finally:
        recorder.stop()
    assert (recorder.recorded, recorder.ended, lines) == (3, 12, [])
    assert both - alone <= alone  # what the script compiles, again
    assert marks(read(tmp_path)) == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]


def test_a_profiler_of_the_script_is_left_alone(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        recorder, lines = recording(tmp_path, 12)
        assert torch.autograd._profiler_enabled()
    assert recorder.has_failed
    assert len(lines) == 1
    assert "a profiler of its own" in lines[0]


def test_a_profiler_that_the_script_starts_meanwhile_gets_its_trace(tmp_path):
    """Two at once abort the process."""
    lines = []
    recorder = Recorder(tmp_path, 3, 3, lines.append)
    recorder.start()
    try:
        trained(4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
            trained(2)
    finally:
        recorder.stop()
    assert any(event.name.startswith("Optimizer.step#") for event in own.events())
    assert len(lines) == 1
    assert "a profiler of its own" in lines[0]
    assert os.listdir(tmp_path) == []


def test_without_clocks_the_recording_goes_on(tmp_path, monkeypatch):
    def unreachable(*_):
        raise OSError("rank 0 is far")

    monkeypatch.setattr(capture, "measure_offset", unreachable)
    monkeypatch.setattr(capture, "group_place", lambda: (1, 2))
    monkeypatch.setattr(capture.distributed.distributed_c10d, "_get_default_store", lambda: None)
    recorder, lines = recording(tmp_path, 12)
    assert lines == ["the clock of rank 1 was not compared with that of rank 0: OSError: rank 0 is far"]
    assert not recorder.has_failed
    assert read(tmp_path, 1)["unsilent_clock"] == []


def test_a_recording_is_not_overwritten(tmp_path):
    check_folder(tmp_path, {})
    (tmp_path / "trace-rank1.json.gz").write_text("")
    check_folder(tmp_path, {"RANK": "0"})
    with pytest.raises(UsageError, match=r"holds a recording \(trace-rank1\.json\.gz\); remove it"):
        check_folder(tmp_path, {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "0"})
    check_folder(tmp_path, {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"})
    with pytest.raises(UsageError, match="is a file"):
        check_folder(tmp_path / "trace-rank1.json.gz", {})


@pytest.mark.parametrize("words", [["-oD"], ["-o", "D"], ["--output=D", "--steps", "3"]])
def test_arguments_of_the_script_begin_after_it(words):
    assert split_at_script(OPTION_CLASSES, [*words, "train.py", "-o", "x"]) == ([*words, "train.py"], ("-o", "x"))


def test_a_script_that_is_not_there_is_named_and_nothing_else_said(tmp_path, capsys):
    with pytest.raises(UsageError, match="does not exist"):
        RecordedRun(Program(str(tmp_path / "no.py")), tmp_path / "traces", 3, 3).run()
    assert capsys.readouterr().err == ""


RANKS = """
    import sys

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(int(sys.argv[1])):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 256)).square().mean()
        loss.backward()
        optimizer.step()
        sys.stdout.write(f"rank {dist.get_rank()} loss {loss.item().hex()}\\n")
    del model
    import gc
    gc.collect()
    dist.destroy_process_group()
    sys.exit(int(sys.argv[2]))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
RECORD = [*TORCHRUN, "-m", "unsilent", "timeline", "record", "-o", "traces"]


def started(words, cwd):
    """A process that has ended."""
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=300
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_are_recorded_and_compute_the_same_bits(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    alone = started([*TORCHRUN, "train.py", "20", "0"], tmp_path)
    done = started([*RECORD, "--steps", "4", "train.py", "20", "0"], tmp_path)
    assert (done.returncode, alone.returncode) == (0, 0), done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(alone.stdout.splitlines())
    assert len(done.stdout.splitlines()) == 40
    said = [line for line in done.stderr.splitlines() if line.startswith("unsilent: ")]
    assert len(said) == 1, done.stderr
    assert "4 steps recorded in traces; a recorded step took" in said[0]
    for rank in (0, 1):
        trace = read(tmp_path / "traces", rank)
        assert trace["distributedInfo"]["rank"] == rank
        assert marks(trace) == [f"ProfilerStep#{step}" for step in range(5, 9)]
        begin, end = trace["unsilent_clock"]
        base = trace["baseTimeNanoseconds"] * 1e-9
        times = [
            base + event["ts"] * 1e-6 for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")
        ]
        assert begin[0] < min(times) < max(times) < end[0]  # one clock
        for _, offset, bound in (begin, end):
            assert abs(offset) <= bound  # the ranks have one clock, so the offset is 0
        assert json.loads((tmp_path / "traces" / f"flight-rank{rank}.json").read_text())["entries"]
    again = started([*RECORD, "train.py", "20", "0"], tmp_path)
    assert again.returncode != 0
    assert "traces holds a recording" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["3", "7"], "the program ended after 3 steps, and recording begins after 5; nothing was recorded"),
        (["8", "7"], "the program ended when 3 of 10 steps were recorded; these are in traces"),
        (["0", "7"], "no step of an optimizer of torch.optim was seen; nothing was recorded"),
    ],
    ids=["before", "within", "none"],
)
def test_a_script_that_ends_early_keeps_its_exit_code(tmp_path, arguments, said):
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "unsilent"]
    done = started([*words, "timeline", "record", "-o", "traces", "train.py", *arguments], tmp_path)
    assert f"unsilent: {said}" in done.stderr
    assert re.search(r"exitcode +: 7 ", done.stderr), done.stderr
