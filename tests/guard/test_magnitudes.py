"""Magnitudes of tensors: norms that do not overflow, and sums in memory that is used again."""

from __future__ import annotations

import pytest
import torch

from unsilent.guard.magnitudes import ReusedSum, norms_and_largest


@pytest.mark.parametrize(
    ("dtype", "large"),
    [
        (torch.float32, 1e25),
        (torch.bfloat16, 1e25),
        (torch.float64, 1e200),
        (torch.float64, 1e308),
        (torch.float16, 6e4),
    ],
)
@pytest.mark.parametrize("size", [7, 5000])
def test_a_norm_is_infinite_only_if_an_element_is_not_finite(dtype, large, size):
    value = torch.full((size,), large, dtype=dtype)
    other = torch.ones(3, dtype=dtype)
    spoilt = value.clone()
    spoilt[2] = torch.inf
    norms = norms_and_largest([other, value, spoilt])[:3].tolist()
    most = min(float(value[0]) * size**0.5, torch.finfo(torch.float64).max)
    assert norms == [pytest.approx(3**0.5, rel=1e-2), pytest.approx(most, rel=1e-2), float("inf")]
    spoilt[1] = torch.nan
    assert norms_and_largest([spoilt]).isnan().all()


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
