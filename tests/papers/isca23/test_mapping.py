"""Where published injections corrupt: against float64 loops in the artifact's own layouts, and there and back again."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from oracles import stuffed_oracle as oracle
from unsilent.basics.errors import UsageError
from unsilent.faults import Fault
from unsilent.papers.isca23 import mapping
from unsilent.papers.isca23.geometry import Convolution, make_index_mapping
from unsilent.papers.isca23.injections import FLIPS, OPERANDS, PublishedInjection, injection_text, parse_injection
from unsilent.papers.isca23.layer_lists import convolutions
from unsilent.papers.isca23.mapping import (
    convolution_of,
    fault_from_injection,
    fault_in_convolution,
    injection_from_fault,
    value_text,
    victims,
)
from unsilent.papers.isca23.networks import SameConv2d
from unsilent.sites.training.step import StepInjection

GEOMETRIES = [(3, 1), (3, 2), (1, 2), (1, 1), (7, 2)]
OF = {"first": "INPUT", "second": "WT", "out": "RD"}
WHERE = list(itertools.product(("fwd", "grad_in", "grad_wt"), OF))
IMAGES, CHANNELS, KERNELS, SIZE = 2, 2, 3, 6


class Net(nn.Module):
    def __init__(self, kernel, stride):
        super().__init__()
        self.conv = SameConv2d(CHANNELS, KERNELS, kernel, stride)

    def forward(self, x):
        return self.conv(x)


def injection(phase, operand, positions, values, layer="conv", **more):
    given = {
        "model": "resnet18",
        "stage": "fwrd_inject" if phase == "fwd" else "bkwd_inject",
        "fmodel": OF[operand],
        "target_worker": 0,
        "target_layer": layer if phase == "fwd" else f"{layer}_{phase}",
        "target_epoch": 3,
        "target_step": 4,
        "inj_pos": tuple(map(tuple, positions)),
        "inj_values": tuple(values),
        "learning_rate": "0.001",
        "seed": 123,
    }
    return PublishedInjection(**{**given, **more})


class Case:
    """One convolution, its operands as the oracle wants them, and what torch makes of them."""

    def __init__(self, kernel, stride):
        self.conv = Convolution("conv", "conv", IMAGES, CHANNELS, KERNELS, SIZE, kernel, stride)
        make = torch.Generator().manual_seed(kernel * 10 + stride)
        self.net, self.stride = Net(kernel, stride), stride
        with torch.no_grad():
            self.net.conv.weight.copy_(torch.randn(self.net.conv.weight.shape, generator=make))
        self.x = torch.randn(IMAGES, CHANNELS, SIZE, SIZE, generator=make)
        self.dy = torch.randn(IMAGES, KERNELS, self.conv.out, self.conv.out, generator=make)

    def tensors(self):
        """x, w and dy in float64, channels last."""
        last = (0, 2, 3, 1)
        x, dy = (t.permute(last).double().numpy() for t in (self.x, self.dy))
        return x, self.net.conv.weight.detach().permute(2, 3, 1, 0).double().numpy(), dy

    def ran(self, phase, faults):
        """What a step with faults gives, in the artifact's layout."""
        x = self.x.clone().requires_grad_()
        self.net.zero_grad()
        with StepInjection(self.net, faults) as step:
            y = self.net(x)
            y.backward(self.dy)
        assert step.receipt.verified_elements == sum(len(f) for f in faults)
        if phase == "fwd":
            return y.detach().permute(0, 2, 3, 1).numpy()
        if phase == "grad_in":
            return x.grad.permute(0, 2, 3, 1).numpy()
        return self.net.conv.weight.grad.permute(1, 2, 3, 0).numpy()


@pytest.mark.parametrize(("kernel", "stride"), GEOMETRIES)
@pytest.mark.parametrize("phase", ["fwd", "grad_in", "grad_wt"])
def test_the_oracle_and_torch_agree_without_a_fault(kernel, stride, phase):
    case = Case(kernel, stride)
    golden = oracle.corrupted(phase, "out", *case.tensors(), stride, {})
    np.testing.assert_allclose(case.ran(phase, []), golden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "stride"), GEOMETRIES)
@pytest.mark.parametrize(("phase", "operand"), WHERE)
def test_a_corrupted_step_gives_what_the_published_formulas_give(kernel, stride, phase, operand):
    case = Case(kernel, stride)
    tensors, rng = case.tensors(), np.random.default_rng(0)
    ones = oracle.operands(phase, *(np.ones_like(t) for t in tensors), stride)
    zeros = {"first": ones[0], "second": ones[1]}.get(operand)  # a zero there is padding, or between elements
    told = make_index_mapping(case.conv, phase, operand)
    golden = oracle.corrupted(phase, operand, *tensors, stride, {})
    assert told.shape == (
        golden.shape if operand == "out" else oracle.operands(phase, *tensors, stride)[operand == "second"].shape
    )
    everywhere = list(np.ndindex(told.shape))
    picks = {everywhere[i] for i in rng.permutation(len(everywhere))[:25].tolist()} | {everywhere[0], everywhere[-1]}
    seen = {"real": 0, "stuffed": 0, "refused": 0}
    for index in sorted(picks):
        asked = injection(phase, operand, [index], ["37.5"])
        if zeros is not None and not zeros[index]:
            if phase == "grad_wt":
                with pytest.raises(
                    UsageError, match=r"row 8, column 2: index .* is (padding|a zero inserted between elements) in"
                ):
                    fault_in_convolution(asked, case.conv)
                seen["refused"] += 1
                continue
            assert fault_in_convolution(asked, case.conv).layout == "stuffed"
            seen["stuffed"] += 1
        else:
            assert fault_in_convolution(asked, case.conv).layout == "strided"
            seen["real"] += 1
        corrupted = oracle.corrupted(phase, operand, *tensors, stride, {index: 37.5})
        np.testing.assert_allclose(
            case.ran(phase, [fault_in_convolution(asked, case.conv)]), corrupted, rtol=1e-4, atol=2e-4
        )
    assert seen["real"]
    if (phase, operand) == ("grad_in", "first"):
        assert bool(seen["stuffed"]) == (kernel > 1 or stride > 1)
    if phase == "grad_wt" and operand != "out":
        assert bool(seen["refused"]) == (kernel > 1 if operand == "first" else stride > 1)


@pytest.mark.parametrize(("kernel", "stride"), GEOMETRIES)
def test_several_victims_share_a_layout_and_keep_their_values(kernel, stride):
    case = Case(kernel, stride)
    shape, rng = make_index_mapping(case.conv, "grad_in", "first").shape, np.random.default_rng(1)
    flat = rng.choice(int(np.prod(shape)), 9, replace=False)
    positions = [tuple(i) for i in np.stack(np.unravel_index(flat, shape), 1).tolist()]
    values = [float(i + 1) for i in range(9)]
    asked = injection("grad_in", "first", positions, [repr(v) for v in values])
    corrupted = oracle.corrupted("grad_in", "first", *case.tensors(), stride, dict(zip(positions, values, strict=True)))
    fault = fault_in_convolution(asked, case.conv)
    np.testing.assert_allclose(case.ran("grad_in", [fault]), corrupted, rtol=1e-4, atol=1e-4)
    assert fault.layout == ("strided" if (kernel, stride) == (1, 1) else "stuffed")


def test_the_shapes_of_published_logs():
    there = convolutions(128)
    assert len(there) == 20
    assert make_index_mapping(there["basicblock_2_basic_0_conv2"], "fwd", "out").shape == (128, 8, 8, 128)
    assert make_index_mapping(there["basicblock_4_basic_0_conv2"], "fwd", "second").shape == (3, 3, 512, 512)
    told = make_index_mapping(there["basicblock_4_basic_0_downsample"], "grad_in", "first")
    assert told.shape == (128, 4, 4, 512)
    assert told.tensor == (128, 512, 2, 2)
    stem = make_index_mapping(there["conv1"], "grad_in", "first", with_inserted_zeros=True)
    assert (stem.shape, stem.tensor) == ((128, 38, 38, 64), (128, 64, 43, 43))


def test_the_published_place_that_is_a_stuffed_zero():
    asked = injection("grad_in", "first", [(124, 3, 1, 450)], ["8.5e+17"], "basicblock_4_basic_0_downsample")
    fault = fault_from_injection(asked)
    assert (fault.layout, fault.shape) == ("stuffed", (128, 512, 4, 4))
    assert np.unravel_index(int(fault.elements[0]), fault.shape) == (124, 450, 3, 1)
    real = replace(asked, inj_pos=((124, 2, 0, 450),))
    assert (fault_from_injection(real).layout, fault_from_injection(real).shape) == ("strided", (128, 512, 2, 2))


def drawn(layer, phase, operand, rng, width, batch, network="resnet18"):
    """A random injection into a tensor of a layer: the artifact's order, values as its files write float32."""
    told = make_index_mapping(convolutions(batch // 8, width, network)[layer], phase, operand)
    everything = np.stack(np.unravel_index(np.arange(np.prod(told.shape)), told.shape), 1)
    if phase == "grad_wt":
        everything = everything[told.to_our_index(everything)[1]]
    names = [name for name, corrupted in OPERANDS.items() if corrupted == operand]
    name = names[rng.integers(len(names))]
    count = int(rng.integers(1, min(40, len(everything)) + 1))
    positions = everything[np.sort(rng.choice(len(everything), count, replace=False))]
    words = rng.integers(0, 2**32, count, np.uint64).astype(np.uint32)
    finite = np.isfinite(words.view(np.float32))
    if name in FLIPS:
        words[~finite] = rng.choice([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000], int((~finite).sum()))
    else:
        words[~finite] &= 0x7F7FFFFF
    more = {
        "fmodel": name,
        "target_worker": int(rng.integers(8)),
        "target_step": int(rng.integers(49)),
        "model": network,
    }
    return injection(phase, operand, positions.tolist(), [value_text(int(w)) for w in words], layer, **more)


@pytest.mark.parametrize("layer", convolutions(1))
def test_there_and_back_for_all_layers_phases_operands(layer):
    rng, width, batch = np.random.default_rng(len(layer)), 4, 16
    for (phase, operand), _ in itertools.product(WHERE, range(6)):
        asked = drawn(layer, phase, operand, rng, width, batch)
        fault = fault_from_injection(asked, width=width, batch=batch)
        more = {"width": width, "batch": batch}
        back = injection_from_fault(fault, fmodel=asked.fmodel, learning_rate="0.001", seed=123, **more)
        assert back == asked
        assert fault_from_injection(back, **more) == fault
        assert Fault.from_json(fault.to_json()) == fault
        assert parse_injection(injection_text(back), "x") == asked
        assert fault.micro_step == asked.target_worker
        assert fault.step == 3 * 49 + asked.target_step


@pytest.mark.parametrize("network", ["densenet", "effnet"])
def test_there_and_back_for_all_layers_of_the_other_networks(network):
    rng, more = np.random.default_rng(5), {"width": 4, "batch": 16}
    for layer, (phase, operand) in zip(convolutions(1, 64, network), itertools.cycle(WHERE)):
        asked = drawn(layer, phase, operand, rng, **more, network=network)
        fault = fault_from_injection(asked, **more)
        assert injection_from_fault(fault, fmodel=asked.fmodel, model=network, **more) == asked
        assert convolution_of(fault, model=network, **more).layer == layer


def test_every_element_of_a_tensor_has_its_own_place():
    for conv, (phase, operand) in itertools.product(convolutions(2, 2).values(), WHERE):
        told = make_index_mapping(conv, phase, operand)
        everything = np.stack(np.unravel_index(np.arange(np.prod(told.tensor)), told.tensor), 1).astype(np.int64)
        theirs, named = told.to_published_index(everything)
        assert len(np.unique(np.ravel_multi_index(tuple(theirs[named].T), told.shape))) == named.sum()
        ours, there = told.to_our_index(theirs[named])
        assert there.all()
        np.testing.assert_array_equal(ours, everything[named])


def test_operations_without_values_of_their_own_take_those_of_the_receipt():
    asked = injection("fwd", "first", [(1, 2, 3, 1)], ["8"], "basicblock_1_basic_0_conv1")
    fault = fault_from_injection(asked, width=2, batch=16)
    flip = replace(fault, operation="xor", operands=np.array([1], np.uint32))
    after = np.array([8], np.float32).view(np.uint32)
    assert injection_from_fault(flip, after=after, width=2, batch=16) == asked
    with pytest.raises(UsageError, match="operation 'xor' names no values; give the corrupted words"):
        injection_from_fault(flip, width=2, batch=16)
    told = victims(fault, convolution_of(fault, width=2, batch=16), fault.operands)
    assert (told.shape, told.positions.tolist(), told.words.tolist()) == (
        (2, 16, 16, 2),
        [[1, 2, 3, 1]],
        after.tolist(),
    )


@pytest.mark.parametrize(
    ("count", "operand", "name"),
    [(1, "out", "RD"), (16, "out", "N16_RD"), (17, "out", "RD_GLB"), (1, "second", "WT"), (64, "first", "N64_INPUT")],
)
def test_the_name_that_an_export_takes_where_none_is_given(count, operand, name):
    positions = list(np.ndindex(8, 8, 2, 2))[:count] if operand != "second" else [(0, 0, 0, 0)]
    asked = injection("fwd", operand, positions, ["1"] * count, "basicblock_2_basic_0_conv2")
    assert injection_from_fault(fault_from_injection(asked, width=2, batch=64), width=2, batch=64).fmodel == name


def refused(wanted, message, **more):
    with pytest.raises(UsageError, match=message) as caught:
        fault_from_injection(wanted, **more)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_replayed_says_where_and_why():
    good = injection("fwd", "out", [(0, 0, 0, 0), (127, 8, 3, 85)], ["1", "2"], "basicblock_2_basic_0_conv2")
    refused(good, r"row 8, column 3: index 127/8/3/85 is outside \(128, 8, 8, 128\), the out tensor of")
    refused(good, r"row 8, column 3: index 127/8/3/85 is outside \(4, 8, 8, 128\).* with 4 images per worker", batch=32)
    refused(
        replace(good, target_layer="basicblock_2_basic_0_conv3"),
        "row 5, column 2: unknown layer .* did you mean 'basicblock_2_",
    )
    with pytest.raises(UsageError) as caught:
        fault_from_injection(replace(good, model="nfnet"))
    assert "row 1, column 2: the network is nfnet, which is not built in" in str(caught.value)
    assert "did you mean" not in str(caught.value)  # another network is another experiment
    refused(replace(good, model="effnet"), "row 5, column 2: unknown layer 'basicblock_2_basic_0_conv2'")
    refused(good, "batch is 12; expected a multiple of 8", batch=12)
    gradient = injection("grad_wt", "first", [(0, 0, 0, 0)], ["1"], "basicblock_1_basic_0_conv1")
    refused(
        gradient,
        r"row 8, column 2: index 0/0/0/0 is padding in \(64, 18, 18, 128\), the first tensor of .*; this implementation",
    )
    gradient = injection("grad_wt", "second", [(0, 0, 0, 0)], ["1"], "basicblock_2_basic_0_conv1")
    refused(gradient, r"row 8, column 2: index 0/0/0/0 is a zero inserted between elements in \(16, 16, 128, 128\)")


def test_what_cannot_be_exported_says_why():
    asked = injection("fwd", "first", [(0, 0, 0, 0)], ["1"], "basicblock_2_basic_0_conv1")
    fault = fault_from_injection(asked, width=2, batch=16)
    pad = replace(fault, elements=np.array([16], np.int64))  # the 17th column of the first row
    for bad, why in (
        (pad, "element 16 is padding, which the published format cannot address"),
        (replace(fault, site="param:fc.weight"), "is not a convolution of resnet18"),
        (replace(fault, site="op:basicblock_2.basic_0.conv1#relu.0/fwd/out"), "is not a convolution of resnet18"),
        (replace(fault, site="op:basicblock_2.basic_0.conv1#convolution.0/fwd/third"), "not third"),
        (replace(fault, shape=(2, 2, 16, 16)), r"is float32\[2, 2, 16, 16\]; expected float32\[2, 2, 17, 17\]"),
        (replace(fault, dtype="float16"), "is float16"),
        (replace(fault, held="float16"), "sets held, which the published format cannot express"),
        (replace(fault, reach=np.array([0])), "sets reach"),
        (replace(fault, rank=1, occurrence=1), "sets rank, occurrence"),
        (replace(fault, micro_step=8), "sets micro_step"),
        (
            replace(fault, operands=np.array([0x7FC00001], np.uint32)),
            "NaN 0x7fc00001 has no text form in published files",
        ),
    ):
        with pytest.raises(UsageError, match=why):
            injection_from_fault(bad, width=2, batch=16)
    with pytest.raises(UsageError, match="unknown fault model for the first tensor 'RD'"):
        injection_from_fault(fault, fmodel="RD", width=2, batch=16)


def test_values_have_the_digits_of_published_files():
    assert value_text(int(np.float32(2.5e24).view(np.uint32))) == format(float(np.float32(2.5e24)), ".15g")
    for text in ("1.9372501373291", "-4.12345695495605", "7.25e+17"):
        assert value_text(int(np.float32(text).view(np.uint32))) == text or float(np.float32(text)) != float(text)
    assert mapping.value_text(0x80000000) == "-0"
