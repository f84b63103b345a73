"""Whole channels, rows, columns, experts and heads: against arrays that numpy has indexed."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from unsilent.basics.errors import UsageError
from unsilent.faults import Region, fault_model

UNLIKELY = 1e-4


def drawn(text, region, seed=0):
    (fault,) = fault_model(text).draw([region], np.random.default_rng(seed))
    return set(fault.elements.tolist())


def slices(shape, axis, width=1):
    """Flat indices of all groups of ``width`` indices of an axis."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    parts = np.split(numbers, shape[axis] // width, axis)
    return [set(part.reshape(-1).tolist()) for part in parts]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.integers(0, 2**32))
def test_a_channel_of_a_parameter_is_an_index_of_its_first_axis(shape, seed):
    assert drawn("zero:whole=channel", Region("param:w", "int8", shape), seed) in slices(shape, 0)


@pytest.mark.parametrize(
    ("site", "shape", "axis"),
    [
        ("op:conv#convolution.0/fwd/out", (2, 3, 4, 5), 1),
        ("op:conv#convolution.0/fwd/out", (2, 3, 4), 1),
        ("op:conv#convolution.0/fwd/first", (2, 3, 4, 5), 1),
        ("op:conv#convolution.0/fwd/second", (6, 3, 2, 2), 0),
        ("op:act#relu.0/fwd/out", (2, 3, 4, 5), 1),
        ("op:fc#addmm.0/fwd/out", (7, 4), 1),
        ("op:norm#native_layer_norm.0/fwd/out", (2, 3, 4), 2),
        ("input:0", (2, 3, 4, 4), 1),
        ("input:ids", (2, 6), 1),
        ("kv:0/key", (2, 3, 4, 5), 1),
        ("gradient:conv.weight", (6, 3, 2, 2), 0),
        ("optim:conv.weight/exp_avg", (6, 3, 2, 2), 0),
    ],
)
def test_the_axis_of_channels(site, shape, axis):
    known = slices(shape, axis)
    assert all(drawn("zero:whole=channel", Region(site, "int8", shape), seed) in known for seed in range(8))


def test_channels_last_where_the_order_of_runs_says_so():
    region = Region("op:conv#convolution.0/fwd/out", "int8", (2, 3, 4, 5), axes=(0, 2, 3, 1))
    assert all(drawn("zero:whole=channel", region, seed) in slices(region.shape, 1) for seed in range(8))


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple), st.integers(0, 2**32))
def test_rows_and_columns_are_those_of_matrices(shape, seed):
    numbers = np.arange(np.prod(shape)).reshape(-1, *shape[-2:])
    region = Region("param:w", "int8", shape)
    assert drawn("zero:whole=row", region, seed) in [set(row.tolist()) for matrix in numbers for row in matrix]
    assert drawn("zero:whole=column", region, seed) in [set(row.tolist()) for matrix in numbers for row in matrix.T]


def test_experts_and_heads():
    assert drawn("zero:whole=expert", Region("param:experts", "int8", (4, 2, 3)), 5) in slices((4, 2, 3), 0)
    assert drawn("zero:heads=3", Region("param:q.weight", "int8", (12, 5)), 5) in slices((12, 5), 0, 4)
    assert drawn("zero:heads=3", Region("op:q#addmm.0/fwd/out", "int8", (5, 12)), 5) in slices((5, 12), 1, 4)


def test_all_slices_of_all_tensors_are_equally_likely():
    regions = [Region("param:a", "int8", (3, 4)), Region("param:b", "int8", (5, 2)), Region("param:bias", "int8", (9,))]
    rng, model = np.random.default_rng(1), fault_model("zero:whole=row")
    counts = Counter((f.site, int(f.elements[0])) for _ in range(2000) for f in model.draw(regions, rng))
    assert len(counts) == 8  # a vector has no rows
    assert stats.chisquare(list(counts.values())).pvalue > UNLIKELY


def test_one_bit_is_drawn_for_the_whole_slice():
    (fault,) = fault_model("bitflip:whole=channel").draw(
        [Region("param:w", "float32", (4, 6))], np.random.default_rng(3)
    )
    assert len(fault) == 6
    assert len({bit for _, bit in fault.bit_positions()}) == 1


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("zero:whole=row", (7,), "whole=row needs a tensor of 2 or more axes; found 'param:w' of shape [7]"),
        ("zero:whole=expert", (7, 2), "whole=expert needs a tensor of 3 or more axes"),
        ("zero:heads=4", (6, 2), "heads=4 needs a tensor whose number of channels is a multiple of 4"),
    ],
)
def test_what_a_tensor_must_have(text, shape, message):
    with pytest.raises(UsageError) as caught:
        drawn(text, Region("param:w", "int8", shape))
    assert message in str(caught.value)


def test_a_slice_needs_a_whole_tensor_and_has_no_other_count():
    with pytest.raises(UsageError, match="needs a whole tensor, but only some elements of 'param:w' are selected"):
        drawn("zero:whole=channel", Region("param:w", "int8", (4, 4), np.arange(4)))
    with pytest.raises(UsageError, match="whole=channel already chooses the elements"):
        fault_model("zero:whole=channel").with_count(3)
    with pytest.raises(UsageError, match="count and whole exclude each other"):
        fault_model("zero:whole=row,count=2")
    with pytest.raises(UsageError, match="unknown slice 'plane'"):
        fault_model("zero:whole=plane")
    with pytest.raises(UsageError, match="heads=0; expected 1 or more"):
        fault_model("zero:heads=0")
