"""What-ifs of memory, on a trace whose peaks and times are computed by hand."""

from __future__ import annotations

import pytest

from kineto_traces import cpu_job, event, sharded_step, trace, write
from unsilent.basics.errors import UsageError
from unsilent.timeline.diagnosis import diagnose
from unsilent.timeline.load import load_job
from unsilent.timeline.memory import memory_peaks
from unsilent.timeline.replay import Replay
from unsilent.timeline.what_if import answer, parse_change

BACK = "autograd::engine::evaluate_function: "
CHANGES = (
    (115, 1, 1000), (155, 2, 400), (215, 3, 2000), (255, 4, 500), (410, 5, 300), (440, 4, -500), (470, 5, -300), (480, 6, 700),
    (490, 3, -2000), (495, 2, -400), (580, 7, 600), (590, 1, -1000), (900, 6, -700), (905, 7, -600),
)  # fmt: skip
"""When, at which address, how many bytes: of the two blocks an activation and an output each, a gradient of an output, and two
gradients of parameters."""


def memory(ts, changes=CHANGES):
    total, result = 0, []
    for at, address, size in changes:
        total += size
        arguments = {"Total Allocated": total, "Bytes": size, "Addr": 4096 * address, "Device Type": 0}
        result.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts + at,
                       "args": arguments})  # fmt: skip
    return result


def block_step(step, ts, category="user_annotation", prefix=""):
    """A step of 1,000 µs of two blocks of 100 µs each, whose nodes are numbered."""

    def op(name, at, length, node):
        return event(name, ts + at, length, **{"Sequence number": 10 * step + node})

    return [
        event(f"ProfilerStep#{step}", ts, 1000, "user_annotation"),
        event(f"{prefix}block0", ts + 100, 100, category),
        op("aten::linear", 110, 40, 1), op("aten::addmm", 120, 20, 1), op("aten::gelu", 150, 40, 2),
        op("aten::detach", 195, 2, 3),  # makes no node: the number is that of the next one that does
        event(f"{prefix}block1", ts + 200, 100, category),
        op("aten::addmm", 210, 40, 3), op("aten::gelu", 250, 40, 4),
        op(f"{BACK}GeluBackward0", 400, 50, 4), op("GeluBackward0", 402, 40, 4), op(f"{BACK}AddmmBackward0", 450, 50, 3),
        op(f"{BACK}GeluBackward0", 500, 50, 2), op(f"{BACK}AddmmBackward0", 550, 50, 1),
        event("Optimizer.step#SGD.step", ts + 850, 100, "user_annotation"),
        event("aten::add_", ts + 850, 100),
    ]  # fmt: skip


def job(folder, changes=CHANGES, more=(), **options):
    events = [one for step in range(3) for one in block_step(step, 1000 * step, **options)]
    events += [one for step in range(3) for one in memory(1000 * step, changes)] + list(more)
    write(folder / "t0.json", trace(events, 0, 1))
    return load_job([folder])


@pytest.mark.parametrize(
    ("parts", "peak", "longer"), [("block*", 3400, 200), ("block0", 3200, 100), ("block1", 4400, 100)]
)
def test_activations_are_dropped_and_computed_again(tmp_path, parts, peak, longer):
    """Both blocks: as block 1 is computed again, there are the outputs of both and what it allocates, 400 + 500 + 2500.

    Block 0 alone: 4200 at 410 less its 1000, while 3900 at 255 become 2900; then 1700 - 1000 + 1400 at 500. Block 1 alone: 1000
    and 400 of block 0, 500 and 2500.
    """
    recorded = job(tmp_path)
    assert [one.bytes for one in memory_peaks(recorded)] == [4200]
    (result,) = answer(Replay(recorded), [f"recompute={parts}"])
    assert result.peak == (4200, peak)
    assert 1e6 * (result.predicted - result.recorded) == pytest.approx(longer, abs=1)


def test_an_output_that_is_saved_twice_is_kept(tmp_path):
    """Block 0 saves its output as well, as a ReLU does: it is freed in its own backward pass, and not counted as dropped."""
    changes = [(510, 2, -400) if change == (495, 2, -400) else change for change in CHANGES]
    (result,) = answer(Replay(job(tmp_path, changes)), ["recompute=block0"])
    assert result.peak == (4200, 3200)


def test_a_part_around_chosen_parts_counts_once(tmp_path):
    around = [event("blocks", 1000 * step + 90, 220, "user_annotation") for step in range(3)]
    (result,) = answer(Replay(job(tmp_path, more=around)), ["recompute=block*"])
    assert 1e6 * (result.predicted - result.recorded) == pytest.approx(220, abs=1)


def test_modules_that_python_calls_are_parts_too(tmp_path):
    other = [event("train.py(3): step", 1000 * step + 50, 800, "python_function") for step in range(3)]
    recorded = job(tmp_path, more=other, category="python_function", prefix="nn.Module: ")
    (result,) = answer(Replay(recorded), ["recompute=nn.Module: block*"])
    assert result.peak == (4200, 3400)
    assert "train.py(3): step" not in recorded.operations.names


@pytest.mark.parametrize(("parts", "peak"), [(2, 3700), (1000, 2003)])
def test_activations_shrink_with_a_part_of_the_batch_and_gradients_stay(tmp_path, parts, peak):
    """At 480 there are both gradients of parameters (1300), 3400 of the batch, and the gradient that is added next (700)."""
    (result,) = answer(Replay(job(tmp_path)), [f"accumulate={parts}"])
    assert result.peak == (4200, peak)
    assert result.longest is not None
    assert result.predicted == pytest.approx(result.recorded)
    assert 1e6 * result.longest == pytest.approx(900 * parts + 100, rel=1e-3)  # all but the optimizer
    assert any("one recording does not show" in note for note in result.notes)


def test_gradients_that_are_added_to_others_do_not_shrink(tmp_path):
    """One of 700 is freed at 605 as it is added: at 580, it is there, and of the other one 600 twice, and 1000 of the batch."""
    changes = sorted((605, 6, -700) if change == (900, 6, -700) else change for change in CHANGES)
    sums = [event(f"{BACK}torch::autograd::AccumulateGrad", 1000 * step + 600, 10) for step in range(3)]
    (result,) = answer(Replay(job(tmp_path, changes, sums)), ["accumulate=1000"])
    assert result.peak == (4200, 700 + 2 * 600 + 1)


def test_a_report_says_what_would_be_allocated_and_how_long_a_step_may_take(tmp_path):
    result = diagnose(job(tmp_path), ["recompute=block*", "accumulate=2"])
    first, second = (one for one in result.report().findings if "would" in str(one))
    assert "1.2 ms instead of 1 ms, by replay; the peak of memory would be 3.32 KiB instead of 4.1 KiB" in str(first)
    assert "1 ms to 1.9 ms instead of 1 ms" in str(second)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("recompute=blok0", "did you mean 'block0'"),
        ("recompte=block0", "did you mean 'recompute'"),
        ("accumulate=1", "expected a whole number from 2"),
        ("accumulate=two", "expected a whole number from 2"),
        ("accumulate=-2", "expected a whole number from 2"),
    ],
)
def test_questions_that_name_nothing_are_refused(tmp_path, question, words):
    with pytest.raises(UsageError, match=words):
        answer(Replay(job(tmp_path)), [question])


@pytest.mark.parametrize("question", ["recompute=*", "accumulate=2"])
def test_without_memory_events_nothing_is_said_of_memory(tmp_path, question):
    cpu_job(tmp_path)
    with pytest.raises(UsageError, match="no memory events.*profile_memory=True"):
        answer(Replay(load_job([tmp_path])), [question])


@pytest.mark.parametrize("address", [None, -1, 2**70, "x"])
def test_memory_events_without_addresses_are_refused(tmp_path, address):
    events = block_step(0, 0) + memory(0)
    for one in events[-len(CHANGES) :]:
        one["args"]["Addr"] = address
    write(tmp_path / "t0.json", trace(events, 0, 1))
    with pytest.raises(UsageError, match="no memory events with addresses"):
        answer(Replay(load_job([tmp_path])), ["accumulate=2"])


def test_parts_without_names_are_asked_for(tmp_path):
    write(
        tmp_path / "t0.json", trace([one for one in block_step(0, 0) if "block" not in one["name"]] + memory(0), 0, 1)
    )
    with pytest.raises(UsageError, match="record_function"):
        answer(Replay(load_job([tmp_path])), ["recompute=*"])


def test_gathered_parameters_are_not_taken_for_activations(tmp_path):
    write(tmp_path / "t0.json", trace(sharded_step(0, 0) + memory(0), 0, 1))
    with pytest.raises(UsageError, match="without FSDP2"):
        answer(Replay(load_job([tmp_path])), ["accumulate=2"])


def test_on_a_device_kernels_of_a_part_run_again_before_those_of_its_backward_pass(tmp_path):
    """Block 0 launches a kernel of 70 µs; the first kernel that its backward pass launches takes so much longer."""
    more = []
    for number, (launched, start, length) in enumerate(
        [(160, 170, 70), (260, 270, 30), (410, 420, 20), (510, 520, 50)]
    ):
        more += [
            event("cudaLaunchKernel", launched, 5, "cuda_runtime", correlation=number),
            event("gemm", start, length, "kernel", 7, 0, correlation=number),
        ]
    changes = [one | {"args": one["args"] | {"Device Type": 1}} for one in memory(0)]
    write(tmp_path / "t0.json", trace(block_step(0, 0) + changes + more, 0, 1))
    replay = Replay(load_job([tmp_path]))
    change = parse_change("recompute=block0", replay)
    kernels = replay.job.operations.name == replay.job.operations.names.index("gemm")
    assert (1e6 * replay.durations[kernels]).round().tolist() == [70, 30, 20, 50]
    assert (1e6 * change.durations[kernels]).round().tolist() == [70, 30, 20, 120]
