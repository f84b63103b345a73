"""What deterministic mode buys on a CPU, without a word on speed (docs/evidence/determinism.md).

Claims: of the operations of ``benchmarks/determinism.py`` four race with two threads; in deterministic mode all repeat bit for
bit, or torch refuses them; kernels that do not race are the same in both modes; what is filled is filled in that mode alone.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
RACING = ("w[rows], backward", "w[rows, columns], backward", "index_put(accumulate)", "put(accumulate)")
REFUSED = {"max unpool"}
ALIKE = (
    "convolution",
    "matmul",
    "batch norm",
    "max pool",
    "adaptive average pool",
    "embedding",
    "scatter_add",
    "index_add",
)
REPEATS = 40


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("benchmarks.determinism")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_mode(bench, mode, name, use):
    """What ``use`` gives for the operation, built and run in that mode."""
    with bench.switched(bench.modes("cpu")[mode]):
        return use(bench.operations()[name]("cpu"))


@pytest.mark.parametrize("mode", ["deterministic", "without filling"])
def test_every_operation_repeats_or_is_refused(bench, mode):
    refused = set()
    for name in bench.operations():
        if "empty" in name:
            continue
        try:
            assert in_mode(bench, mode, name, lambda s: bench.distinct(s.outcome, 5)) == 1, name
        except RuntimeError:
            refused.add(name)
    assert refused == REFUSED


@pytest.mark.parametrize("name", RACING)
def test_a_race_ends_in_deterministic_mode(bench, name):
    found = {
        mode: in_mode(bench, mode, name, lambda s: bench.distinct(s.outcome, REPEATS)) for mode in bench.modes("cpu")
    }
    print(f"\n{name}: distinct results in {REPEATS} runs: {found}")
    assert found["deterministic"] == found["without filling"] == found["one thread"] == 1
    if found["default"] == 1:
        pytest.skip(f"this machine shows no race: {REPEATS} runs of {name} with two threads gave one result")


@pytest.mark.parametrize("mode", ["default", "deterministic"])
def test_both_orders_of_the_sum_are_the_sum(bench, mode):
    """Against float64, one addition after the other: modes differ in rounding alone."""
    subjects = importlib.import_module("benchmarks.determinism_subjects")
    rows, width = subjects.ROWS, subjects.WIDTH
    table, values = subjects.floats("cpu", [(rows, width), (subjects.PICKED, width)])
    truth = table.numpy().astype(np.float64)
    np.add.at(truth, subjects.picked_rows(table).numpy(), values.numpy().astype(np.float64))
    (found,) = in_mode(bench, mode, "index_put(accumulate)", lambda s: list(s.outcome()))
    np.testing.assert_allclose(found.numpy(), truth, rtol=0, atol=1e-4)


def test_what_does_not_race_is_the_same_kernel(bench):
    names = [name for name in bench.operations() if name.startswith(ALIKE)]
    assert len(names) == 20
    for name in names:
        both = [in_mode(bench, mode, name, lambda s: list(s.outcome())) for mode in ("default", "deterministic")]
        for default, deterministic in zip(*both, strict=True):
            assert torch.equal(default.view(torch.int32), deterministic.view(torch.int32)), name


def test_memory_is_filled_in_deterministic_mode_alone(bench):
    found = bench.kernels(bench.operations()["batch norm, backward"], 2, "cpu")
    assert {mode for mode, own in found.items() if "aten::fill_" in own} == {"deterministic"}
    assert all("aten::native_batch_norm_backward" in own for own in found.values())
    with bench.switched(bench.modes("cpu")["deterministic"]):
        assert torch.empty(1000).isnan().all()


@pytest.mark.parametrize("mode", ["default", "deterministic", "without filling", "one thread"])
def test_the_switches_come_back(bench, mode):
    def switches():
        cudnn = torch.backends.cudnn
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            cudnn.deterministic,
            cudnn.benchmark,
            torch.get_num_threads(),
        )

    before = switches()
    wanted = bench.modes("cpu")[mode]
    inside = []

    def fails():
        with bench.switched(wanted):
            inside.append(switches())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert switches() == before
    assert inside == [(wanted.deterministic, wanted.fill, wanted.deterministic, False, wanted.threads or 2)]


def test_a_refused_mode_is_named_in_the_table(bench):
    found = bench.cost(bench.operations()["max unpool"], 2, "cpu", 2)
    assert set(found.refused) == {"deterministic", "without filling"}
    assert "deterministic" in found.refused["deterministic"]
    assert set(found.wall) == set(found.cpu) == set(found.distinct) == {"default", "one thread"}
    row = bench._row("max unpool", found, "cpu")
    assert row.count("refused") == 4


@pytest.mark.parametrize("name", ["train-resnet", "six layers, 3 x 3"])
def test_a_training_step_is_the_same_in_both_modes(bench, name):
    """So that the times of both are those of the same work."""
    build = bench.models()[name]
    ready, refused = bench.prepared(build, "cpu")
    assert not refused
    results = []
    for mode in ("default", "deterministic"):
        with bench.switched(bench.modes("cpu")[mode]):
            results.append([p.detach().clone() for p in ready[mode].outcome()])
    for default, deterministic in zip(*results, strict=True):
        assert torch.equal(default.view(torch.int32), deterministic.view(torch.int32))
