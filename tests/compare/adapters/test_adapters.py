"""Adapted copies: rounded, pruned, in 16 bits; their names, and what their training keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unsilent.compare.adapters.fake_quant import (
    converted,
    dequantised,
    fake_quantised,
    quantised_layers,
)
from unsilent.compare.adapters.names import ADAPTERS, adapt
from unsilent.compare.adapters.pruning import pruned
from unsilent.compare.adapters.training import fine_tuned, surrogate
from unsilent.errors import UsageError
from unsilent.workloads.model_fitting import Schedule


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    ).eval()  # fmt: skip


@pytest.fixture
def model():
    return small_net()


@pytest.fixture
def inputs():
    return torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def rounded(values, scale, largest):
    return (values / scale).round().clamp(-largest, largest) * scale


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_are_rounded_to_whole_multiples_of_a_scale(model, inputs, bits, per_channel):
    twin, largest = fake_quantised(model, [inputs], bits, per_channel=per_channel), 2 ** (bits - 1) - 1
    for index in (0, 4):
        weight = model[index].weight.detach()
        most = weight.abs().flatten(1).amax(1) if per_channel else weight.abs().amax().expand(len(weight))
        scale = (most / largest).view(-1, *[1] * (weight.ndim - 1))
        assert torch.allclose(twin[index].quantised_weight(), rounded(weight, scale, largest), atol=1e-6)
        assert len(twin[index].weight_scale.unique()) == (len(weight) if per_channel else 1)


def test_inputs_of_layers_are_rounded_within_the_range_of_calibration(model, inputs):
    first = fake_quantised(model, [inputs[:10], inputs[10:]])[0]
    step = (inputs.amax() - inputs.amin()) / 255
    assert (first.quantised_inputs(inputs) - inputs).abs().max() <= step * 0.5001
    assert first.quantised_inputs(inputs * 3).amax() <= inputs.amax() + step
    assert first.quantised_inputs(torch.zeros(1)) == 0


def test_gradients_pass_through_the_rounding_and_stop_where_values_are_cut(model, inputs):
    first = fake_quantised(model, [inputs])[0]
    x = torch.tensor([0.5, 1e6]).requires_grad_()
    first.quantised_inputs(x).sum().backward()
    assert x.grad.tolist() == [1, 0]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_integer_model_computes_what_the_twin_does_and_has_no_gradient(model, inputs, bits):
    twin = fake_quantised(model, [inputs], bits)
    deployed = converted(twin)
    x = inputs.clone().requires_grad_()
    out = deployed(x)
    # Sums are rounded differently, so that a value in the middle between two levels may take the other one.
    assert (out - twin(inputs)).abs().max() < 0.1 * twin(inputs).abs().max()
    assert (out.argmax(1) == twin(inputs).argmax(1)).double().mean() >= 0.95
    assert not out.requires_grad
    assert deployed[0].weight.dtype == torch.int8
    assert deployed[0].weight.abs().max() == 2 ** (bits - 1) - 1
    assert converted(model) is model


def test_the_integer_layer_adds_whole_numbers_exactly():
    """Against sums of Python integers."""
    layer = nn.Sequential(nn.Linear(3, 2))
    x = torch.tensor([[0.1, -0.7, 1.0]])
    deployed = converted(fake_quantised(layer, [x]))[0]
    whole = [round(v / deployed.input_scale) + deployed.input_zero for v in x[0].tolist()]
    sums = [
        sum((a - deployed.input_zero) * w for a, w in zip(whole, row, strict=True)) for row in deployed.weight.tolist()
    ]
    expected = torch.tensor(sums) * deployed.scale + deployed.bias
    assert torch.allclose(deployed(x)[0], expected, atol=1e-6)


def test_the_original_is_not_changed_and_names_of_parameters_are_kept(model, inputs):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("int8", "prune:0.5+int4:tensor", "bf16", "fp16"):
        copy = adapt(model, name, [inputs])
        assert not copy.training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert {*before} <= {*adapt(model, "int8", [inputs]).state_dict()}


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_the_smallest_weights_of_all_layers_are_pruned(model, inputs, share):
    copy = pruned(model, share, [inputs])
    old, new = (torch.cat([m[i].weight.detach().flatten() for i in (0, 4)]) for m in (model, copy))
    assert int((new == 0).sum()) == round(share * len(old))
    assert old[new == 0].abs().max() <= old[new != 0].abs().min()


def test_batch_norms_of_a_pruned_copy_fit_what_its_layers_compute(model, inputs):
    copy = pruned(model, 0.8, [inputs])
    before = copy[0](inputs)
    assert torch.allclose(copy[1].running_mean, before.mean((0, 2, 3)), atol=1e-5)
    assert not copy[1].training


@pytest.mark.parametrize("bits", [None, 8])
def test_training_keeps_zeros_and_the_given_model(model, inputs, bits):
    labels = torch.arange(40) % 5
    start = pruned(model, 0.5, [inputs])
    start = start if bits is None else fake_quantised(start, [inputs], bits)
    zero, before = start[0].weight == 0, start[0].weight.detach().clone()
    trained = fine_tuned(start, inputs, labels, Schedule(3, 10, 0.01))
    assert torch.equal(start[0].weight, before)
    assert torch.equal(trained[0].weight == 0, zero)
    assert not torch.equal(trained[0].weight, before)
    for layer in quantised_layers(trained):
        most = layer.weight.detach().abs().flatten(1).amax(1)
        assert torch.allclose(layer.weight_scale * 127, most, rtol=1e-5)


def test_distillation_brings_a_surrogate_near_the_adapted_model(model, inputs):
    """From weights that were changed, so that there is something to learn."""
    adapted = adapt(model, "int8", [inputs])
    assert torch.equal(dequantised(adapted)[4].weight, adapted[4].quantised_weight())
    labels = adapted(inputs).argmax(1)
    made = surrogate(pruned(adapted, 0.5, [inputs]), inputs, labels, Schedule(1, 10, 1e-6))
    assert type(made[0]) is nn.Conv2d
    assert not quantised_layers(made)
    made = surrogate(adapted, inputs, labels, Schedule(3, 10, 1e-4))
    assert (made(inputs).argmax(1) == labels).double().mean() > 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "did you mean 'int8'"),
        ("prun:0.8", "did you mean 'prune'"),
        ("prune", "like prune:0.8"),
        ("prune:80", "expected above 0 and below 1"),
        ("int8:channel", "expected int8 or int8:tensor"),
        ("bf16:x", "takes none"),
        ("int8+prune:0.5", "expected it last: prune:0.5\\+int8"),
        ("", "unknown adapter"),
    ],
)
def test_an_adapter_that_does_not_exist_is_refused(model, inputs, text, message):
    with pytest.raises(UsageError, match=message):
        adapt(model, text, [inputs])


def test_what_cannot_be_quantised_is_refused(inputs):
    for name in ("int8", "prune:0.5"):
        with pytest.raises(UsageError, match="no Conv2d and no Linear"):
            adapt(nn.Sequential(nn.Flatten()), name, [inputs])
    with pytest.raises(UsageError, match="no calibration batch"):
        adapt(small_net(), "int8", [])


def test_every_adapter_is_described():
    assert {name.rstrip("48") for name in ADAPTERS} >= {"int", "prune"}


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bit_copies_take_and_return_float32(model, inputs, name, dtype):
    copy = adapt(model, name, [])
    assert next(copy.parameters()).dtype == dtype
    x = inputs.clone().requires_grad_()
    out = copy(x)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == torch.float32
    assert torch.allclose(out, model(inputs), atol=0.05)
