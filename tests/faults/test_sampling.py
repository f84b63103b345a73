"""The shuffled order of all faults: every number once, and no part of it favours anything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsilent.faults.sampling import shuffled_index


@given(st.integers(1, 700))
def test_every_number_comes_once(total):
    assert sorted(shuffled_index(k, total) for k in range(total)) == list(range(total))


def test_it_ends_for_the_largest_tensors():
    for total in (2**40, 2**40 + 1, 3 * 10**12):
        found = [shuffled_index(k, total) for k in range(200)]
        assert len(set(found)) == 200
        assert max(found) < total
        assert np.mean(found) / total == np.clip(np.mean(found) / total, 0.4, 0.6)


@pytest.mark.slow
def test_no_shard_favours_a_bit():
    """Every part of one in N, whatever N, has all 32 bits about equally often (chi-squared, far out in its tail)."""
    total = 32 * 1000
    for parts in (2, 3, 8, 32):
        for part in range(parts):
            bits = np.bincount([shuffled_index(k, total) % 32 for k in range(part, total, parts)], minlength=32)
            expected = bits.sum() / 32
            assert ((bits - expected) ** 2 / expected).sum() < 80  # 31 degrees of freedom: one in 300,000
