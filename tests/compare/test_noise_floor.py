"""How far each layer differs from itself."""

from __future__ import annotations

import copy

import torch
from torch import nn

from compare.quantised_networks import images, network
from unsilent.compare.layers import compare_layers
from unsilent.compare.noise_floor import RERUN, SPLIT, THREADS


class BatchMean(nn.Module):
    """A layer whose outputs depend on the other samples of a batch."""

    def forward(self, x):
        return x - x.mean(0)


class Unsteady(nn.Module):
    """A layer that gives other outputs each time."""

    def forward(self, x):
        return x + 1e-3 * torch.rand_like(x)


def test_a_steady_network_has_a_floor_of_rounding_only():
    model = network()
    result = compare_layers(model, copy.deepcopy(model), [images()])
    assert all(set(row.floor.relative) == {RERUN, THREADS, SPLIT} for row in result.rows)
    assert all(row.floor.relative[RERUN] == 0 and row.floor.largest < 1e-5 for row in result.rows)


def test_what_differs_by_itself_is_not_called_a_difference():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Unsteady(), nn.Linear(4, 4)).eval()
    result = compare_layers(model, copy.deepcopy(model), [torch.randn(8, 4)])
    assert result.rows[1].floor.relative[RERUN] > 0
    assert result.first_difference.name == "1"
    assert result.first_beyond_floor is None


def test_the_split_of_a_batch_is_a_floor_of_its_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), BatchMean()).eval()
    floor = compare_layers(model, copy.deepcopy(model), [torch.randn(5, 4)]).rows[1].floor
    assert floor.relative[RERUN] == 0
    assert floor.relative[SPLIT] > 0.01


def test_one_sample_cannot_be_split_and_threads_are_as_before():
    before = torch.get_num_threads()
    model = network()
    result = compare_layers(model, copy.deepcopy(model), [images(1)])
    assert set(result.rows[0].floor.relative) == {RERUN, THREADS}
    assert torch.get_num_threads() == before


class FixedSize(nn.Linear):
    """A layer that takes batches of 8 only."""

    def forward(self, x):
        assert len(x) == 8
        return super().forward(x)


def test_a_variation_that_cannot_be_run_is_left_out_with_its_reason():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), FixedSize(4, 4)).eval()
    before = torch.get_num_threads()
    result = compare_layers(model, copy.deepcopy(model), [torch.randn(8, 4)])
    assert [set(row.floor.relative) for row in result.rows] == [{RERUN, THREADS}] * 2
    assert list(result.floor_problems) == [SPLIT]
    assert "AssertionError" in result.floor_problems[SPLIT]
    assert torch.get_num_threads() == before
