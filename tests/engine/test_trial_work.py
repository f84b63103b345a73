"""Counted work against formulas of matrix products and convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unsilent.engine.trial_work import SPEEDS, WorkCounter


def counted(module: nn.Module, x: torch.Tensor) -> WorkCounter:
    with torch.no_grad(), WorkCounter() as work:
        module(x)
    return work


@pytest.mark.parametrize(
    ("module", "shape", "flops"),
    [
        (nn.Linear(7, 5), (3, 7), 2 * 3 * 7 * 5),
        (nn.Linear(7, 5, bias=False), (3, 7), 2 * 3 * 7 * 5),
        (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 8), 2 * 2 * 6 * 8 * 8 * 4 * 9),
        (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 8, 8), 2 * 2 * 6 * 6 * 6 * 2 * 9),
        (nn.ReLU(), (3, 7), 0),
    ],
)
def test_multiplications_and_additions(module: nn.Module, shape: tuple[int, ...], flops: int) -> None:
    assert counted(module, torch.randn(shape)).flops == flops


def test_bytes_are_those_that_operations_write() -> None:
    work = counted(nn.ReLU(), torch.randn(3, 7))
    assert (work.operations, work.written_bytes) == (1, 3 * 7 * 4)


def test_seconds_grow_with_work_and_are_shared_by_samples() -> None:
    small, large = (counted(nn.Linear(n, n), torch.randn(8, n)) for n in (8, 64))
    for device in SPEEDS:
        assert 0 < small.sample_seconds(device, 8) < large.sample_seconds(device, 8)
        assert large.sample_seconds(device, 16) == pytest.approx(large.sample_seconds(device, 8) / 2)
        assert small.trial_seconds(device, 1) == large.trial_seconds(device, 1) > SPEEDS[device].trial
