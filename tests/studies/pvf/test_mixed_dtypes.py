"""Campaigns that corrupt tensors of several dtypes: every single flip is in some heat map, and the dtypes are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unsilent


class Tagger(nn.Module):
    """Looks tokens up and scores them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens, weights):
        return self.head(self.table(tokens).mean(1) * weights)


def workload():
    batches = [
        (torch.arange(6).reshape(2, 3), torch.ones(2, 4)),
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4)),
    ]
    return unsilent.Workload(Tagger(), batches, run=lambda model, batch: model(*batch), judge="top1", name="tagger")


@pytest.fixture(scope="module")
def corrupted():
    return unsilent.pvf(workload(), at=["input:*", "op:*"], trials=150)


def test_every_single_flip_is_in_a_map(corrupted):
    floats, integers = corrupted.heat_maps
    assert (floats.dtype, integers.dtype) == ("float32", "int64")
    assert floats.total_trials + integers.total_trials == corrupted.trials_done
    assert integers.layers == ("input:0",)
    assert set(integers.fields.values()) == {"value", "sign"}
    assert integers.fields[63] == "sign"
    assert floats.fields[0] == "mantissa"
    assert "input:0" not in floats.layers
    # A token id of 2^40 is none of the table's, so such a flip is always an error.
    assert integers.estimate[0][40] in (None, 1.0)


def test_the_dtypes_that_were_corrupted_are_named(corrupted):
    assert corrupted.dtype == "float32 and int64"
    assert unsilent.pvf(workload(), at="input:0", trials=5).dtype == "int64"
    assert unsilent.pvf(workload(), at="op:*", trials=5).dtype == "float32"


def test_parameters_are_told_by_their_commonest_dtype():
    result = unsilent.pvf(workload(), at=["param:*", "param:seen"], trials=40)
    assert result.dtype == "float32"
    assert [found.dtype for found in result.heat_maps] == ["float32", "int64"]
    assert sum(found.total_trials for found in result.heat_maps) == result.trials_done
