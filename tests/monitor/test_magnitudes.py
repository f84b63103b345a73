"""Magnitudes of tensors: sums in memory that is used again."""

from __future__ import annotations

import pytest
import torch

from unsilent.monitor.signals.magnitudes import ReusedSum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_those_of_torch_whatever_was_added_before(dtype):
    sums = ReusedSum()
    for seed, (shape, count) in enumerate([((3, 5), 2), ((2, 2), 3), ((7, 11), 2), ((4,), 1), ((7, 11), 4)]):
        torch.manual_seed(seed)
        parts = [torch.randn(shape).to(dtype) for _ in range(count)]
        expected = sum(parts[1:], parts[0])
        assert torch.equal(sums.take(parts), expected)
    wide = [torch.ones(3, 1), torch.full((1, 3), torch.nan)]
    assert sums.take(wide).shape == (3, 3)
    assert sums.take(wide).isnan().all()
