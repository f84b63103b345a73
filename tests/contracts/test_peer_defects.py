"""Defects reproduced in other fault injectors that concern weights: each has a test that this one does not have it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.campaigns.spec import TrialId
from unsilent.faults import fault_model
from unsilent.sites import Parameters
from unsilent.statistics import bounded_mean
from unsilent.studies.pvf.runner import TrialRunner
from unsilent.studies.pvf.spec import PvfSpec


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    ).eval()


def test_a_corrupted_model_runs_any_number_of_batches():
    """PyTorchFI: a second forward of the same corrupted model raises IndexError."""
    model = convnet()
    workload = unsilent.Workload(model, [torch.randn(2, 1, 4, 4) for _ in range(5)])
    runner = TrialRunner(PvfSpec("here", flips=(1,)), workload)
    row = runner.run(TrialId("0", 1, 0))
    assert len(row.outcome_codes) == 10
    assert row.error == ""


def test_every_layer_type_and_one_dimensional_weights_are_corrupted():
    """PyTorchFI: 'all' finds no weights; BatchNorm weights raise UnboundLocalError."""
    model = convnet()
    regions = Parameters(model).select("param:*")
    assert {r.site for r in regions} == {
        *(f"param:{n}" for n, _ in model.named_parameters()),
        *(f"param:{n}" for n, b in model.named_buffers() if b.is_floating_point()),
    }
    with unsilent.inject(model, "param:1.weight[2]", bit=30) as receipt:
        assert receipt.verified_elements == 1
        model(torch.randn(1, 1, 4, 4))


def test_weights_used_by_functional_calls_are_sites():
    """PyTorchFI: the output projection of attention, never called as a module, is missing."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    golden = layer(x)
    for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"):
        with unsilent.inject(layer, f"param:{name}[0]", bit=30):
            assert not torch.equal(layer(x), golden), name
    assert torch.equal(layer(x), golden)


@pytest.mark.parametrize("form", ["ids", "dict", "several"])
def test_models_that_take_token_ids_dicts_or_several_inputs_run(form):
    """PyTorchFI: models taking token ids cannot be profiled (it feeds random floats)."""

    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, ids, scale=None):
            out = self.head(self.embedding(ids).mean(1))
            return out if scale is None else out * scale[:, None]

    torch.manual_seed(0)
    ids, scale = torch.randint(0, 10, (4, 5)), torch.ones(4)
    batch = {"ids": ids, "dict": {"ids": ids, "scale": scale}, "several": (ids, scale)}[form]
    result = unsilent.pvf(unsilent.Workload(Ids(), [batch]), trials=5)
    assert {r.target for r in result.rows if r.level == "component"} == {"embedding", "head"}


def test_the_default_law_is_uniform_over_elements_and_the_other_one_is_offered():
    """PyTorchFI draws the layer first: on ResNet-18 the probability of a weight differs 1365-fold between layers."""
    model = nn.ModuleDict({"big": nn.Linear(99, 10, bias=False), "small": nn.Linear(2, 5, bias=False)})
    regions = Parameters(model).select("param:*")
    rng = np.random.default_rng(1)
    fault = fault_model("bitflip")
    for law, expected in (("per-element", 0.01), ("per-tensor", 0.5)):
        seen = Counter(fault.draw(regions, rng, law)[0].site for _ in range(4000))
        assert seen["param:small.weight"] / 4000 == pytest.approx(
            expected, abs=4 * (expected * (1 - expected) / 4000) ** 0.5
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_bit_of_every_float_format_can_be_corrupted_and_comes_back(dtype):
    """MRFI: bf16 raises TypeError. GoldenTransformer: mantissa bits only, fp16 and bf16 raise, revert leaves damage."""
    model = nn.Linear(8, 8).to(dtype)
    width = torch.finfo(dtype).bits
    before = model.weight.detach().clone()
    words = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    corrupted = set()
    for seed in range(15 * width):
        with unsilent.inject(model, "param:weight", seed=seed):
            difference = (model.weight.view(words) ^ before.view(words)).flatten()
            (position,) = difference.nonzero().flatten().tolist()  # corrupted once, not twice
            corrupted.add((int(difference[position]) & ((1 << width) - 1)).bit_length() - 1)
        assert torch.equal(model.weight.view(words), before.view(words))
    assert corrupted == set(range(width))


def test_many_flips_are_distinct_bits():
    """TensorFI: several flips of one value may hit the same bit twice and cancel out."""
    model = nn.Linear(1, 1, bias=False)
    for seed in range(50):
        with unsilent.inject(model, "param:weight", "bitflip:count=31", seed=seed) as receipt:
            assert receipt.changed_bits == 31


def test_a_campaign_without_events_keeps_an_upper_bound():
    """FaultForge: margin 0 at mean 0 stops a rare-event campaign at '0 %' without a bound."""
    interval = bounded_mean(np.zeros(100))
    assert interval.estimate == 0
    assert 0.02 < interval.high < 0.05  # about 3.7 / n faults, not / samples
