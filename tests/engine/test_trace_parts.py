"""Two tensors compared, against loops over bytes in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracles.trace_oracle import numbers
from unsilent.basics.fault_trace import OutputDifference
from unsilent.engine.digests import digest
from unsilent.engine.tracing import golden_and_faulty_runs
from unsilent.engine.tracing.golden_and_faulty_runs import change
from unsilent.faults import codec

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308, -1e308)


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
def test_numbers_are_those_of_a_loop(dtype, data):
    layout = codec(dtype)
    length = data.draw(st.integers(1, 12))
    words = st.lists(st.integers(0, 2**layout.bits - 1), min_size=length, max_size=length)
    one, two = (np.array(data.draw(words), dtype=layout.word_dtype) for _ in range(2))
    keep = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    two = np.where(keep, one, two).astype(layout.word_dtype)
    tensors = [torch.from_numpy(w.view(f"i{w.itemsize}").copy()).view(getattr(torch, dtype)) for w in (one, two)]
    with np.errstate(all="ignore"):
        n, relative, absolute, from_zero, nonfinite = 0, None, None, 0, 0
        values = [np.asarray(layout.decode(w), np.float64) for w in (one, two)]
        for i in np.flatnonzero(one != two):  # one element at a time, so that bits decide what changed
            pair = [np.array([v[i]]) for v in values]
            if pair[0].tobytes() == pair[1].tobytes():  # two NaNs that decode alike
                n += 1
                continue
            k, r, a, z, bad = numbers(*pair)
            n, from_zero, nonfinite = n + k, from_zero + z, nonfinite + bad
            relative = r if relative is None else max(relative, r or 0.0)
            absolute = a if absolute is None else max(absolute, a or 0.0)
    found = change(*tensors)
    assert (found.changed, found.from_zero, found.nonfinite) == (n, from_zero, nonfinite)
    assert found.relative == (None if relative is None else pytest.approx(relative, rel=1e-12))
    assert found.absolute == (None if absolute is None else pytest.approx(absolute, rel=1e-12))
    assert (digest(tensors[:1]) == digest(tensors[1:2])) == (n == 0)


def test_zeros_and_nans_are_told_by_their_bits():
    golden = torch.tensor([0.0, float("nan"), 1.0, float("inf"), 2.0])
    faulty = torch.tensor([-0.0, float("nan"), float("nan"), 1.0, 2.0])
    assert change(golden, faulty) == OutputDifference(changed=3, relative=None, absolute=0.0, from_zero=0, nonfinite=1)


def test_a_ratio_is_at_most_the_largest_number():
    found = change(
        torch.tensor([5e-324, 1e308], dtype=torch.float64), torch.tensor([1e308, -1e308], dtype=torch.float64)
    )
    assert (found.relative, found.absolute) == (np.finfo(float).max, np.finfo(float).max)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_integers_have_a_share_alone(dtype):
    golden, faulty = torch.tensor([0, 1, 0, 1]).to(dtype), torch.tensor([0, 1, 1, 0]).to(dtype)
    assert change(golden, faulty) == OutputDifference(changed=2)


def test_complex_numbers_count_once():
    golden, faulty = torch.tensor([1 + 2j, 3 + 4j]), torch.tensor([2 + 1j, 3 + 4j])
    assert change(golden, faulty) == OutputDifference(changed=1, relative=1.0, absolute=1.0)


def test_chunks_join(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    golden, faulty = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    golden[3:30], faulty[40] = 0, float("inf")
    whole = change(golden, faulty)
    monkeypatch.setattr(golden_and_faulty_runs, "CHUNK", 7)
    assert change(golden, faulty) == whole
    assert whole.from_zero == 27
