"""Parallelism matrices, device grids, and the code that makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from oracles.reduction_oracle import matrices
from unsilent.basics.errors import UsageError
from unsilent.placement.loading import load_system
from unsilent.placement.placements import Placement, placements
from unsilent.placement.ranking import Reduction, rank_placements
from unsilent.placement.report import script

COUNTS = [
    ((1, 2, 2, 4), (4, 4), 4),
    ((4, 16), (4, 16), 3),
    ((4, 16), (8, 8), 3),
    ((4, 16), (2, 32), 2),
    ((4, 16), (64,), 1),
    ((4, 16), (2, 2, 16), 4),
    ((4, 16), (8, 4, 2), 5),
    ((2, 16), (2, 16), 2),
    ((2, 16), (4, 8), 2),
    ((4, 8), (4, 8), 3),
]


def named(sizes):
    return dict(zip("abcd", sizes, strict=False))


@pytest.mark.parametrize(("counts", "sizes", "number"), COUNTS)
def test_counts_of_placements(counts, sizes, number):
    assert len(list(placements(counts, named(sizes)))) == number


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ((1, 2, 2, 4), (4, 4)),
        ((2, 6), (3, 4)),
        ((4, 4), (2, 8)),
        ((2, 2, 2), (2, 2, 2)),
        ((3, 4), (12,)),
        ((6,), (1, 6)),
    ],
)
def test_placements_are_all_matrices_each_once(counts, sizes):
    found = [one.matrix for one in placements(counts, named(sizes))]
    assert len(found) == len(set(found))
    assert set(found) == set(matrices(sizes, counts))


def test_the_published_example_is_one_of_them():
    assert ((1, 1, 2, 2), (1, 2, 1, 2)) in {one.matrix for one in placements((1, 2, 2, 4), named((4, 4)))}


def test_a_grid_has_each_device_once_where_its_matrix_says():
    for one in placements((2, 6), {"data": 4, "tensor": 3}):
        grid = one.grid()
        assert sorted(grid.ravel()) == list(range(12))
        for axis, row in enumerate(one.matrix):
            line = np.moveaxis(grid, axis, 0).reshape(grid.shape[axis], -1)[:, 0]
            assert len(set(line // 6)) == row[0]  # nodes that the axis spans


def test_groups_of_a_reduction_over_two_axes_share_the_third_coordinate():
    one = Placement(("a", "b", "c"), ((2, 1), (1, 2), (1, 2)))
    groups = one.reduction_groups(("a", "c"))
    assert groups.shape == (2, 4)
    assert {tuple(group) for group in groups} == {tuple(sorted(one.grid()[:, at, :].ravel())) for at in range(2)}
    assert one.factors(("a", "c")) == (2, 2)


@pytest.fixture
def pretended_ranks():
    """A process group of 12 ranks that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=12, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_the_code_makes_the_grid_and_the_program(pretended_ranks):
    system = load_system("a100:2")
    system = type(system)("x", (system.levels[0], type(system.levels[1])("gpu", 6, 1e9, 0.0)))
    reductions = [Reduction(("data",), 1 << 30), Reduction(("tensor", "data"), 1 << 20)]
    ranking = rank_placements(system, {"data": 6, "tensor": 2}, reductions)
    assert len(ranking.placements) > 1
    for one in ranking.placements:
        best = [programs[0] for programs in one.programs]
        for reduction, ranked in zip(reductions, best, strict=True):
            names = {}
            exec(script(one.placement, [reduction], [ranked], "cpu"), names)
            assert np.array_equal(names["mesh"].mesh.numpy(), one.placement.grid())
            assert names["mesh"].mesh_dim_names == ("data", "tensor")
            assert names["program"] == ranked.program()
            assert names["members"] == one.placement.reduction_groups(reduction.axes).tolist()


@pytest.mark.parametrize(
    ("counts", "axes", "message"),
    [
        ((2, 4), {"data": 4}, r"multiply to 4 \(data=4\), but the system has 8 devices"),
        ((2, 0), {"data": 4}, "level 1 of the system has size 0"),
        ((2, 2), {"data": 0, "tensor": 4}, "axis data has size 0"),
        ((2, 2), {}, "no axes"),
    ],
)
def test_axes_that_do_not_fit_are_refused(counts, axes, message):
    with pytest.raises(UsageError, match=message):
        list(placements(counts, axes))
