"""Which samples hold NaN or infinity, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from unsilent.outcomes.tensors import samples_with_nonfinite

FLOATS = st.floats(width=32) | st.sampled_from([3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 0.0])


@given(arrays.arrays(np.float32, (4, 5), elements=FLOATS))
def test_samples_with_such_values_are_found(values: np.ndarray) -> None:
    """Finite values whose sum overflows, and infinities that cancel, among them."""
    assert samples_with_nonfinite(torch.from_numpy(values), 4).tolist() == (~np.isfinite(values)).any(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.float64])
def test_every_type_of_number(dtype: torch.dtype) -> None:
    values = torch.full((3, 8), 4e4, dtype=torch.float64).to(dtype)  # sums to more than a float16 holds
    assert not samples_with_nonfinite(values, 3).any()
    values[1, 2] = float("inf")
    assert samples_with_nonfinite(values, 3).tolist() == [False, True, False]
