"""The layer and channel of a quantised or pruned network that its quantisation does not explain."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compare.quantised_networks import images, network, quantised
from unsilent.compare.layers import compare_layers

LAYERS = ["0", "3", "5", "8"]


def bit(layer):
    """The lowest bit of one code."""
    codes = (layer.weight / layer.weight_scale.view(-1, *[1] * (layer.weight.ndim - 1))).round()
    flat = codes.view(len(codes), -1)
    flat[2, 0] = flat[2, 0] + (1 if flat[2, 0] < 126 else -1)
    # The neighbour on the far side, so that the weight is more than half a step away.
    weight, step = layer.weight.view(len(codes), -1)[2, 0], layer.weight_scale[2]
    near = (weight / step).round()
    layer.weight.view(len(codes), -1)[2, 0] = (near + (1 if weight < near * step else -1)) * step


def scale(layer):
    codes = (layer.weight[2] / layer.weight_scale[2]).round()
    layer.weight_scale[2] *= 1.3
    layer.weight[2] = codes * layer.weight_scale[2]


def fine_scale(layer):
    layer.weight_scale[2] *= 0.7


def zero(layer):
    layer.weight[2] += 3 * layer.weight_scale[2]


def swap(layer):
    order = list(range(len(layer.weight)))
    order[2], order[5] = 5, 2
    layer.weight.copy_(layer.weight[order])
    layer.weight_scale = layer.weight_scale[order]


def bias(layer):
    layer.bias[2] += 0.5


FAULTS = [bit, scale, fine_scale, zero, swap, bias]


def input_scale(layer):
    rounded = layer.rounded
    layer.rounded = lambda x: 1.2 * rounded(x)


def input_zero(layer):
    rounded = layer.rounded
    layer.rounded = lambda x: rounded(x) + 4 * layer.input_scale


def input_range(layer):
    layer.input_scale *= 3


@pytest.mark.parametrize("levels", [127, 7])
@pytest.mark.parametrize("fault", FAULTS)
def test_layer_and_channel_of_a_fault_are_named(fault, levels):
    model = network()
    for name in LAYERS:
        deployed = quantised(model, images(seed=3), levels)
        with torch.no_grad():
            fault(deployed.get_submodule(name))
        suspects = compare_layers(model, deployed, [images()]).suspects
        assert [(one.layer, one.channel in (2, 5) if fault is swap else one.channel) for one in suspects] == [
            (name, True if fault is swap else 2)
        ], (name, suspects)
        assert suspects[0].excess > 1


def input_range_shift(layer):
    layer.input_zero = layer.input_zero + (70 if layer.input_zero < 128 else -70)


@pytest.mark.parametrize("fault", [input_scale, input_zero, input_range, input_range_shift])
def test_the_layer_of_a_fault_in_its_inputs_is_named(fault):
    model = network()
    for name in LAYERS:
        deployed = quantised(model, images(seed=3))
        with torch.no_grad():
            fault(deployed.get_submodule(name))
        assert [one.layer for one in compare_layers(model, deployed, [images()]).suspects] == [name]


@pytest.mark.parametrize("levels", [127, 7])
def test_clean_quantised_networks_have_no_suspects(levels):
    for seed in range(4):
        model = network(seed)
        result = compare_layers(model, quantised(model, images(seed=seed + 10), levels), [images(seed=seed)])
        assert result.differs_everywhere
        assert result.suspects == ()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_a_scale_that_is_not_finite_names_its_channel(value):
    model = network()
    deployed = quantised(model, images(seed=3))
    with torch.no_grad():
        deployed[5].weight_scale[2] = value
        deployed[5].weight[2] = value
    suspects = compare_layers(model, deployed, [images()]).suspects
    assert [(one.layer, one.channel) for one in suspects] == [("5", 2)]


@pytest.mark.parametrize("levels", [127, 7])
def test_one_scale_for_a_layer_of_a_small_network_is_named(levels):
    """All channels of a layer are then beyond what rounding explains, more than a tenth of those of the network."""
    model = network()
    deployed = quantised(model, images(seed=3), levels)
    with torch.no_grad():
        for name in LAYERS:
            layer = deployed.get_submodule(name)
            layer.weight_scale = layer.weight_scale.max().expand_as(layer.weight_scale).clone()
        deployed[5].weight_scale *= 0.3
    assert [one.layer for one in compare_layers(model, deployed, [images()]).suspects] == ["5"]


def pruned(model, share=0.8):
    result = copy.deepcopy(model)
    with torch.no_grad():
        for layer in result.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                least = layer.weight.abs().flatten().quantile(share)
                layer.weight.mul_(layer.weight.abs() > least)
    return result


def test_pruning_is_no_fault_and_a_changed_weight_beside_it_is():
    model = network()
    deployed = pruned(model)
    assert compare_layers(model, deployed, [images()]).suspects == ()
    weight = deployed[5].weight.detach().view(16, -1)
    channel, place = weight.abs().argmax() // 8, weight.abs().argmax() % 8
    weight[channel, place] *= 1.01
    suspects = compare_layers(model, deployed, [images()]).suspects
    assert [(one.layer, one.channel) for one in suspects] == [("5", int(channel))]


def test_trained_weights_have_no_suspects_unless_one_stands_out():
    model = network()
    deployed = quantised(model, images(seed=3))
    torch.manual_seed(0)
    with torch.no_grad():
        for name in LAYERS:
            layer = deployed.get_submodule(name)
            layer.weight.add_(0.03 * layer.weight.std() * torch.randn_like(layer.weight))
            layer.weight_scale = layer.weight.abs().flatten(1).amax(1) / 127
        assert compare_layers(model, deployed, [images()]).suspects == ()
        deployed[5].weight[9] *= -1
    suspects = compare_layers(model, deployed, [images()]).suspects
    assert [(one.layer, one.channel) for one in suspects] == [("5", 9)]


class Packed(nn.Module):
    """A quantised layer whose weights and scales nothing reads."""

    def __init__(self, layer):
        super().__init__()
        self.run = [layer]

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return self.run[0](x)


def test_without_readable_scales_the_errors_of_outputs_name_the_layer():
    model = network()
    deployed = quantised(model, images(seed=3))
    for name in LAYERS:
        setattr(deployed, name, Packed(deployed.get_submodule(name)))
    result = compare_layers(model, deployed.eval(), [images()])
    assert all(row.noise.weight_change is None for row in result.rows if row.noise)
    assert not result.suspects
    with torch.no_grad():
        for _ in range(5):  # less is not told from inputs that a range cuts off
            scale(deployed.get_submodule("5").run[0])
    suspects = compare_layers(model, deployed, [images()]).suspects
    assert [(one.layer, one.channel) for one in suspects] == [("5", 2)]


def reversed_channels(model, other):
    for name in LAYERS:
        layer = other.get_submodule(name)
        layer.weight.copy_(layer.weight.flip(0))


def initialised_again(model, other):
    other.load_state_dict(network(7).state_dict())


def zeros(model, other):
    for name in LAYERS:
        other.get_submodule(name).weight.zero_()


def negated(model, other):
    for name in LAYERS:
        other.get_submodule(name).weight.neg_()


@pytest.mark.parametrize("change", [reversed_channels, initialised_again, zeros, negated])
def test_unrelated_weights_have_no_suspects_and_are_called_unrelated(change):
    model = network()
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(model, other)
    result = compare_layers(model, other, [images()])
    assert result.differs_everywhere
    assert result.has_other_weights
    assert result.suspects == ()


@pytest.mark.parametrize("share", [0.5, 0.8, 0.98])
def test_rounded_and_pruned_weights_are_not_called_unrelated(share):
    model = network()
    for deployed in (pruned(model, share), quantised(model, images(seed=3), 1 if share == 0.5 else 3)):
        assert not compare_layers(model, deployed, [images()]).has_other_weights


@pytest.mark.parametrize("layers", [1, 2])
def test_a_network_of_few_layers_names_the_first_difference(layers):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other:
            layer.bias[1] += 1
    result = compare_layers(model, other, [torch.randn(5, 4)])
    assert result.first_beyond_floor.name == "0"


@pytest.mark.parametrize(("part", "factor"), [("running_var", 4.0), ("weight", 2.0), ("bias", -1.0)])
def test_a_changed_norm_of_a_quantised_network_is_named(part, factor):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
    ).eval()
    with torch.no_grad():
        for norm in (model[1], model[4]):
            norm.bias.uniform_(0.5, 1)
    deployed = quantised(model, images(seed=3))
    assert compare_layers(model, deployed, [images()]).suspects == ()
    with torch.no_grad():
        getattr(deployed[4], part).mul_(factor)
    assert [one.layer for one in compare_layers(model, deployed, [images()]).suspects] == ["4"]


def test_norms_that_were_folded_into_products_are_no_suspects():
    model = nn.Sequential(network(), nn.BatchNorm1d(10)).eval()
    deployed = quantised(model, images(seed=3))
    with torch.no_grad():
        model[1].running_var.fill_(0.5)
    deployed[1] = nn.Identity()
    assert "1" not in [one.layer for one in compare_layers(model, deployed, [images()]).suspects]


def test_unrelated_weights_that_cannot_be_read_are_told_by_the_outputs():
    model, other = network(), network(7)
    for name in LAYERS:
        setattr(other, name, Packed(other.get_submodule(name)))
    result = compare_layers(model, other.eval(), [images()])
    assert all(row.noise.weight_change is None for row in result.rows if row.noise)
    assert result.has_other_weights
    assert result.suspects == ()
