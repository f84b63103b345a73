"""Blocks, tiles and the order of axes: against arrays that numpy has transposed."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from unsilent.basics.errors import UsageError
from unsilent.faults import Region, fault_model

UNLIKELY = 1e-4

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)
seeds = st.integers(0, 2**32)


@st.composite
def ordered(draw):
    """A shape and an order of its axes (None: its own)."""
    shape = draw(shapes)
    return shape, draw(st.none() | st.permutations(range(len(shape))).map(tuple))


def line(shape, axes):
    """All flat indices of a tensor, in the order that runs follow."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return (numbers if axes is None else np.transpose(numbers, axes)).reshape(-1)


def drawn(text, region, seed):
    (fault,) = fault_model(text).draw([region], np.random.default_rng(seed))
    assert fault.elements.tolist() == sorted(set(fault.elements.tolist()))
    return fault


@given(ordered(), st.integers(1, 9), st.sampled_from([1, 2, 5, None]), seeds)
def test_a_block_is_a_slice_of_the_line(order, n, cycles, seed):
    shape, axes = order
    text = f"zero:block={n}" + ("" if cycles == 1 else f",cycles={cycles or 'any'}")
    found = set(drawn(text, Region("w", "float32", shape, axes=axes), seed).elements.tolist())
    along = line(shape, axes).tolist()
    places = sorted(map(along.index, found))
    first, end = places[0], places[-1] + 1
    assert places == list(range(first, end))
    assert first % n == 0
    assert end == min(first + n * cycles, len(along)) if cycles else end % n == 0 or end == len(along)


@given(ordered(), st.integers(1, 4), seeds)
def test_a_run_follows_the_axes(order, n, seed):
    shape, axes = order
    along = line(shape, axes)
    n = min(n, along.size)
    found = set(drawn(f"zero:run={n}", Region("w", "int8", shape, axes=axes), seed).elements.tolist())
    assert found in [set(along[a : a + n].tolist()) for a in range(along.size - n + 1)]


@given(ordered(), st.integers(1, 5), st.integers(1, 5), seeds)
def test_a_tile_is_a_corner_of_the_matrix(order, rows, columns, seed):
    shape, axes = order
    matrix = line(shape, axes).reshape(-1, shape[axes[-1] if axes else -1] if shape else 1)
    found = set(drawn(f"zero:tile={rows}x{columns}", Region("w", "int8", shape, axes=axes), seed).elements.tolist())
    tiles = [
        set(matrix[i : i + rows, j : j + columns].reshape(-1).tolist())
        for i in range(0, matrix.shape[0], rows)
        for j in range(0, matrix.shape[1], columns)
    ]
    assert found in tiles


@given(ordered(), st.data())
def test_a_selection_is_sorted_to_the_axes(order, data):
    shape, axes = order
    along = line(shape, axes).tolist()
    chosen = data.draw(st.lists(st.sampled_from(along), unique=True, min_size=1))
    region = Region("w", "int8", shape, np.array(chosen), axes=axes)
    expected = chosen if axes is None else [e for e in along if e in chosen]
    assert region.elements.tolist() == expected
    n = data.draw(st.integers(1, len(chosen)))
    found = drawn(f"zero:block={n}", region, data.draw(seeds)).elements.tolist()
    assert set(found) in [set(expected[a : a + n]) for a in range(0, len(expected), n)]


@pytest.mark.parametrize(
    "text", ["bitflip", "bitflip:count=5", "random:block=4", "uniform:low=1,high=9,rate=0.4", "copy:run=3"]
)
def test_an_order_of_axes_moves_a_draw_and_changes_nothing_else(text):
    """The same seed corrupts the same places of the line with the same operands, whatever elements these are."""
    shape, axes = (3, 4, 5), (2, 0, 1)
    along = line(shape, axes)
    for seed in range(5):
        plain = drawn(text, Region("w", "float32", (60,)), seed)
        moved = drawn(text, Region("w", "float32", shape, axes=axes), seed)
        assert set(moved.elements.tolist()) == set(along[plain.elements].tolist())
        if not text.startswith("copy"):  # a source is drawn among all others
            pairs = dict(zip(along[plain.elements].tolist(), plain.operands.tolist(), strict=True))
            assert pairs == dict(zip(moved.elements.tolist(), moved.operands.tolist(), strict=True))


def test_an_order_of_axes_costs_no_table():
    region = Region("w", "float32", (1000, 512, 300, 300), axes=(0, 2, 3, 1))
    fault = drawn("zero:block=16", region, 1)
    at = np.unravel_index(fault.elements, region.shape)
    assert [len(set(index.tolist())) for index in at] == [1, 16, 1, 1]
    assert at[1].min() % 16 == 0


def first_of(text, region, n):
    rng, model = np.random.default_rng(2), fault_model(text)
    return [model.draw([region], rng)[0].elements for _ in range(n)]


def test_all_blocks_and_all_tiles_are_equally_likely():
    for text, number in (("zero:block=4", 8), ("zero:tile=2x3", 6)):
        counts = Counter(int(e[0]) for e in first_of(text, Region("w", "int8", (5, 6)), 3000))
        assert len(counts) == number
        assert stats.chisquare(list(counts.values())).pvalue > UNLIKELY


def test_any_number_of_cycles_is_equally_likely():
    found = first_of("zero:block=4,cycles=any", Region("w", "int8", (14,)), 6000)
    counts = Counter((int(e[0]) // 4, math.ceil(e.size / 4)) for e in found)
    expected = {(b, n): 6000 / 4 / (4 - b) for b in range(4) for n in range(1, 5 - b)}
    assert set(counts) == set(expected)
    assert stats.chisquare([counts[k] for k in expected], list(expected.values())).pvalue > UNLIKELY


def test_blocks_of_several_tensors():
    """Uniform over all blocks; over the tensors first, where that is the law."""
    regions = [Region("a", "int8", (33,)), Region("b", "int8", (5,)), Region("none", "int8", (0, 3))]
    for law, share in (("per-element", 3 / 4), ("per-tensor", 1 / 2)):
        rng, model = np.random.default_rng(4), fault_model("zero:block=16")
        n = sum(model.draw(regions, rng, law)[0].site == "a" for _ in range(2000))
        assert stats.binomtest(n, 2000, share).pvalue > UNLIKELY


def test_a_bit_is_drawn_once_for_a_block_and_a_value_for_each_element():
    for text in ("bitflip:block=16", "multibit:tile=4x4", "burst:block=16", "stuck:block=16"):
        assert len(set(drawn(text, Region("w", "float32", (8, 8)), 3).operands.tolist())) == 1
    for text in ("random:block=16", "uniform:block=16", "copy:tile=4x4"):
        assert len(set(drawn(text, Region("w", "float32", (8, 8)), 3).operands.tolist())) > 10


def test_a_tile_needs_a_whole_tensor():
    with pytest.raises(UsageError, match="tile=2x2 needs a whole tensor, but only some elements of 'w' are selected"):
        drawn("zero:tile=2x2", Region("w", "int8", (4, 4), np.arange(4)), 0)


def test_nothing_to_corrupt():
    for text in ("zero:block=4", "zero:tile=2x2"):
        with pytest.raises(UsageError, match="needs a tensor with elements"):
            fault_model(text).draw([Region("w", "int8", (3, 0))], np.random.default_rng(0))
