"""What a verdict says of an alarm: the layer, the detectors, and which weights were found corrupted and repaired."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from unsilent.protection.corrupted_weights import CorruptedWeights
from unsilent.protection.protect import protect
from unsilent.protection.recovery_ladder import CorruptedAnswer

CLEAN = [torch.randn(50, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def small(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)).eval().to(dtype)


def flip(tensor, index, *bits):
    """Flip bits of one element."""
    words = tensor.data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for bit in bits:
        words[index] ^= 1 << bit


def changes(verdict):
    return {(address, bits) for one in verdict.weights for address, bits in zip(one.addresses, one.bits, strict=True)}


@pytest.mark.parametrize("detector", ["weight-integrity", "dr-dna+weight-integrity"])
@pytest.mark.parametrize("recovery", ["repair", "golden"])
def test_repaired_weights_have_tensor_address_and_bits(detector, recovery):
    model = small()
    with protect(model, CLEAN, detector, recovery=recovery) as guarded, torch.no_grad():
        flip(model[0].weight, (40, 3), 30)
        flip(model[0].weight, (40, 5), 3, 7)
        flip(model[2].bias, (1,), 22)
        guarded(CLEAN[0])
    assert guarded.verdict.recovered
    assert changes(guarded.verdict) == {
        ("param:0.weight[40,3]", (30,)),
        ("param:0.weight[40,5]", (3, 7)),
        ("param:2.bias[1]", (22,)),
    }
    assert all(one.is_repaired for one in guarded.verdict.weights)
    assert "param:0.weight[40,3] bit 30; param:0.weight[40,5] bit 3, 7 (repaired)" in map(str, guarded.verdict.weights)
    assert guarded.verdict.detectors[-1] == "weight-integrity"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_bits_are_numbered_within_elements_of_any_width(dtype):
    model = small(dtype)
    clean = [batch.to(dtype) for batch in CLEAN]
    with protect(model, clean, "weight-integrity", recovery="repair") as guarded, torch.no_grad():
        flip(model[2].weight, (2, 63), 13)
        guarded(clean[0])
    assert changes(guarded.verdict) == {("param:2.weight[2,63]", (13,))}


def test_weights_that_are_not_repaired_are_named_by_their_piece_of_memory():
    model = small()
    with protect(model, CLEAN, "weight-integrity") as guarded, torch.no_grad():
        flip(model[0].weight, (40, 3), 30)
        guarded(CLEAN[0])
    (found,) = guarded.verdict.weights
    assert not found.is_repaired
    assert found.tensor == "0.weight"
    assert np.ravel_multi_index((40, 3), (64, 8)) in found.elements
    assert list(found.bits) == []
    assert str(found).endswith("elements after it (not repaired)")
    assert guarded.verdict.layer == ""


def test_an_alarm_of_weights_names_no_layer_and_its_error_names_the_detector():
    model = small()
    with protect(model, CLEAN, "dr-dna+weight-integrity", recovery="abstain") as guarded, torch.no_grad():
        flip(model[2].bias, (1,), 0)
        with pytest.raises(
            CorruptedAnswer, match="weight-integrity raised an alarm for 50 of 50 samples.*, and no recovery cleared it"
        ):
            guarded(CLEAN[0])
    assert (guarded.verdict.layer, guarded.verdict.detectors) == ("", ("weight-integrity",))


@pytest.mark.parametrize(("mode", "recovery"), [("end", ()), ("early", ()), ("early", "layer"), ("early", "rerun")])
def test_an_alarm_of_a_rule_names_a_layer_and_no_weights(mode, recovery):
    model = small()
    left = [1]

    def corrupt(module, inputs, output):
        if left and left.pop():
            output = output.clone()
            output[1, 2] = 1e6
        return output

    with protect(model, CLEAN, "dr-dna", mode=mode, recovery=recovery) as guarded, torch.no_grad():
        hook = model[0].register_forward_hook(corrupt, prepend=True)
        guarded(CLEAN[0])
        hook.remove()
        assert (guarded.verdict.layer, guarded.verdict.detectors) == ("0", ("dr-dna",))
        assert guarded.verdict.weights == ()
        guarded(CLEAN[0])
    verdict = guarded.verdict
    assert bool(verdict.layer) == bool(verdict.detectors) == bool(verdict.flagged.any())  # a false alarm is one as well
    assert verdict.weights == ()


def test_weights_repaired_after_a_pass_that_ended_early_are_named():
    model = small()
    with (
        protect(model, CLEAN, "ranger+weight-integrity", mode="early", recovery="repair") as guarded,
        torch.no_grad(),
    ):
        clean = model(CLEAN[0])
        flip(model[0].weight, (40, 3), 30)
        assert torch.equal(guarded(CLEAN[0]), clean)
    assert changes(guarded.verdict) == {("param:0.weight[40,3]", (30,))}
    assert guarded.verdict.layer == "0"


def test_a_scalar_is_addressed_by_its_name():
    assert list(CorruptedWeights("scale", (), np.array([0]), (1,)).addresses) == ["param:scale"]
