"""The mode that writes down operations: it changes nothing, and two files part where the runs do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from unsilent.explain.operation_logger import OperationLogger
from unsilent.explain.operation_records import PACKED, find_divergence
from unsilent.explain.optimizer_steps import OptimizerStepCounter, StepLimitReached
from unsilent.explain.results import RunDivergence
from unsilent.explain.user_frames import UserFrameFinder


def train(seed: int = 0, late: float = 0.0, drawn: int | None = None) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.3), nn.Linear(48, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        data = torch.arange(72.0).reshape(2, 1, 6, 6) + (late if step == 2 else 0.0)
        if drawn is not None and step == 1:
            torch.manual_seed(drawn)
        model(data).square().sum().backward()
        optimizer.step()
    return model


def watched(folder: Path, name: str, run: Callable[[], Any]) -> dict[str, Any]:
    """What a run tells, as its process would."""
    steps = OptimizerStepCounter()
    with steps, OperationLogger(folder / name, UserFrameFinder(), steps) as watch:
        run()
    return {"file": name, "names": watch.names, "places": watch.places, "origins": watch.origins, "count": watch.count}


def parting(folder: Path, one: Callable[[], Any], other: Callable[[], Any]) -> RunDivergence | None:
    return find_divergence(folder, watched(folder, "one", one), watched(folder, "other", other))


def test_watching_changes_no_bit_and_leaves_nothing_behind(tmp_path: Path):
    plain = train().state_dict()
    models: list[nn.Module] = []
    told = watched(tmp_path, "a", lambda: models.append(train()))
    assert all(torch.equal(plain[name], tensor) for name, tensor in models[0].state_dict().items())
    assert _get_current_dispatch_mode() is None
    assert not _global_optimizer_pre_hooks
    assert (tmp_path / "a").stat().st_size == told["count"] * PACKED.size


def test_equal_runs_do_not_part(tmp_path: Path):
    assert parting(tmp_path, train, train) is None


def test_python_values_that_differ_are_data(tmp_path: Path):
    found = parting(tmp_path, train, lambda: train(late=1.0))
    assert found is not None
    assert (found.kind, found.operation, found.step, found.phase) == ("data", "add", 2, "forward")
    assert found.place is not None
    assert (Path(found.place.file).name, found.place.function) == (Path(__file__).name, "train")


def test_another_draw_is_random(tmp_path: Path):
    found = parting(tmp_path, lambda: train(drawn=1), lambda: train(drawn=2))
    assert found is not None
    assert (found.kind, found.generator, found.step) == ("random", "global", 1)
    own = parting(tmp_path, *(lambda s=s: torch.rand(2, generator=torch.Generator().manual_seed(s)) for s in (1, 2)))
    assert own is not None
    assert (own.kind, own.generator) == ("random", "own")


def test_a_kernel_that_gives_other_bits_for_the_same_inputs(tmp_path: Path):
    scales = iter((1.0, 2.0))

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return odd(grad)

    @torch.library.custom_op("unsilent_tests::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * next(scales)

    def run() -> None:
        x = torch.ones(3, requires_grad=True)
        Odd.apply(x).sum().backward()

    found = parting(tmp_path, run, run)
    assert found is not None
    assert (found.kind, found.operation, found.phase) == ("kernel", "unsilent_tests.odd", "backward")


def test_runs_that_do_different_operations(tmp_path: Path):
    found = parting(tmp_path, lambda: torch.ones(2).sin(), lambda: torch.ones(2).cos())
    assert found is not None
    assert (found.kind, found.operation, found.index, found.operations_left) == ("path", "sin", 1, (1, 1))
    assert found.place is not None
    assert found.other_operation == f"cos at {found.place}"
    longer = parting(tmp_path, lambda: torch.ones(2), lambda: torch.ones(2) + 1)
    assert longer is not None
    assert (longer.kind, longer.operation, longer.other_operation) == ("path", "add", "")
    assert longer.operations_left == (1, 0)


def test_memory_that_nobody_has_written_is_no_difference(tmp_path: Path):
    def run(value: float) -> None:
        torch.full((5000,), value)  # freed: the next one may find it
        torch.empty(5000)
        new = torch.empty(5000)
        new[:2500].fill_(1)
        new[2500:].copy_(torch.ones(2500))
        new.add_(1)

    found = parting(tmp_path, lambda: run(1.0), lambda: run(1.0))
    assert found is None


def test_new_memory_can_be_cleared(tmp_path: Path):
    steps = OptimizerStepCounter()
    with OperationLogger(tmp_path / "a", UserFrameFinder(), steps, zero_uninitialised=True):
        assert not torch.empty(7).any()
        assert not torch.empty(7, dtype=torch.int32).any()


def test_lines_that_make_memory_are_told_but_not_those_of_libraries():
    steps = OptimizerStepCounter()
    with OperationLogger(Path(os.devnull), UserFrameFinder(), steps) as watch:
        nn.Linear(2, 2)
        assert watch.uninitialised_allocations == {}
        torch.empty(3)
        torch.ones(2).new_empty(3)
    assert [call for call, _ in watch.uninitialised_allocations] == ["empty", "new_empty"]
    assert {line[0] for _, line in watch.uninitialised_allocations} == {__file__}


def test_marks_of_a_profiler_are_no_operations(tmp_path: Path):
    def run() -> None:
        with torch.profiler.record_function("a span"):
            torch.ones(1)

    assert watched(tmp_path, "a", run)["names"] == ["ones"]


def test_a_module_that_is_called_is_noticed():
    with OptimizerStepCounter() as steps:
        model = nn.Linear(2, 2)
        assert not steps.has_called_module
        model(torch.ones(1, 2))
    assert steps.has_called_module
    with OptimizerStepCounter() as others:
        pass
    model(torch.ones(1, 2))
    assert not others.has_called_module


def test_a_further_output_only_counts_if_it_has_an_effect(tmp_path: Path):
    calls = iter(range(100))

    @torch.library.custom_op("unsilent_tests::scratch", mutates_args=())
    def scratch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), torch.full((3,), float(next(calls)))

    def unused() -> None:
        torch.add(scratch(torch.ones(3))[0], 1)

    def used() -> None:
        torch.add(scratch(torch.ones(3))[1], 1)

    assert parting(tmp_path, unused, unused) is None
    found = parting(tmp_path, used, used)
    assert found is not None
    assert (found.operation, found.kind) == ("unsilent_tests.scratch", "kernel")


def test_a_forked_process_is_not_watched(tmp_path: Path):
    def run() -> None:
        torch.ones(1)
        if (child := os.fork()) == 0:
            torch.zeros(1)
            os._exit(0)
        os.waitpid(child, 0)

    assert watched(tmp_path, "a", run)["names"] == ["ones"]


def test_enough_is_no_exception_that_a_loop_catches():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)

    def loop() -> None:
        for _ in range(5):
            try:
                optimizer.step()
            except Exception as error:
                raise AssertionError("caught") from error

    with OptimizerStepCounter(2) as steps, pytest.raises(StepLimitReached):
        loop()
    assert steps.done == 2
