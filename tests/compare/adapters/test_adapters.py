"""Adapted copies: rounded, pruned, in 16 bits; their names, and what their training keeps."""

from __future__ import annotations

import pytest
import torch
from benchmarks.diva_training import dequantised, fine_tuned, surrogate
from torch import nn

from unsilent.basics.errors import UsageError
from unsilent.compare.adapters.fake_quant import (
    converted,
    fake_quantised,
    quantised_layers,
)
from unsilent.compare.adapters.names import ADAPTERS, adapt, describe
from unsilent.compare.adapters.pruning import pruned
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
        with pytest.raises(UsageError, match="no Conv1d, Conv2d, Conv3d or Linear"):
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


class Encoder(nn.Module):
    """A transformer of torch, which reads the weights of its layers itself in eval mode without gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.inputs, self.layers, self.outputs = nn.Linear(4, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)

    def forward(self, x):
        return self.outputs(self.layers(self.inputs(x)).mean(1))


def test_a_quantised_transformer_encoder_computes_the_same_with_and_without_gradients():
    model, x = Encoder().eval(), torch.rand(50, 4, 4, generator=torch.Generator().manual_seed(1))
    twin = fake_quantised(model, [x])
    with torch.no_grad():
        expected, without, deployed = model(x), twin(x), converted(twin)(x)
    span = expected.max() - expected.min()
    assert twin.layers.layers[1].linear1.input_high > 0.1
    for got in (without, twin(x), deployed):
        assert (got - expected).abs().max() < 0.05 * span
    assert (without - expected).abs().max() > 0
    mask = torch.tensor([[False, False, True, True]]).expand(50, 4)
    with torch.no_grad():
        assert torch.isfinite(converted(twin).layers(model.inputs(x), src_key_padding_mask=mask)).all()
    assert describe(twin) == (
        "6 of 10 layers with weights are quantised, 47.5 % of the parameters; left in float32: layers.layers.0.self_attn "
        "(MultiheadAttention), layers.layers.0.self_attn.out_proj (NonDynamicallyQuantizableLinear), "
        "layers.layers.1.self_attn (MultiheadAttention), layers.layers.1.self_attn.out_proj (NonDynamicallyQuantizableLinear)"
    )


class ReadsWeights(nn.Module):
    """Its second layer is never called, its third one not in this version."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.called, self.read, self.unused = nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.linear(self.called(x).relu(), self.read.weight, self.read.bias)


def test_layers_that_calibration_does_not_call_stay_as_they_are():
    model, x = ReadsWeights().eval(), torch.rand(20, 4)
    twin = fake_quantised(model, [x])
    assert [type(layer) for layer in (twin.read, twin.unused)] == [nn.Linear, nn.Linear]
    assert {*twin.read.state_dict()} == {"weight", "bias"}
    assert (converted(twin)(x) - model(x)).abs().max() < 0.05
    assert "1 of 3 layers" in describe(twin)
    assert "read (Linear), unused (Linear)" in describe(twin)
    with pytest.raises(UsageError, match="is called when the model runs on the calibration batches"):
        fake_quantised(ReadsWeights(), [x], run=lambda model, batch: batch)


class OwnLinear(nn.Linear):
    """A subclass that computes as its base."""


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 4, 3, stride=2, padding=1), (9,)),
        (nn.Conv3d(2, 4, 2, groups=2), (4, 5, 6)),
        (nn.Conv2d(2, 4, 3, dilation=2), (6, 6)),
    ],
)
def test_convolutions_of_any_dimension_are_quantised(layer, shape):
    x = torch.randn(8, 2, *shape, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(layer).eval()
    twin = fake_quantised(model, [x])
    with torch.no_grad():
        for got in (twin(x), converted(twin)(x)):
            assert 0 < (got - model(x)).abs().max() < 0.05 * model(x).abs().max()
    assert type(dequantised(twin)[0]) is type(layer)


def test_pruning_and_quantisation_take_the_same_layers():
    """Those that compute as torch's own do, on a weight of their own."""
    torch.manual_seed(0)
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    transposed = nn.ConvTranspose1d(2, 3, 2)
    model = nn.Sequential(OwnLinear(4, 6), Doubled(6, 6), weighted, nn.Unflatten(1, (2, 3)), transposed).eval()
    x = torch.randn(10, 4)
    twin, copy = fake_quantised(model, [x]), pruned(model, 0.5, [x])
    assert [index for index, layer in enumerate(twin) if layer in quantised_layers(twin)] == [0]
    assert type(dequantised(twin)[0]) is OwnLinear
    zeros = {name: bool((value == 0).any()) for name, value in copy.named_parameters() if value.ndim > 1}
    assert [name for name, has_zeros in zeros.items() if has_zeros] == ["0.weight"]
    assert "1 of 4 layers with weights" in describe(twin)


def test_a_layer_with_two_names_computes_in_integers_under_both():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    deployed = converted(fake_quantised(nn.Sequential(layer, nn.ReLU(), layer), [torch.randn(9, 4)]))
    assert deployed[0] is deployed[2]
    assert deployed[0].weight.dtype == torch.int8


def test_calibration_runs_the_model_as_it_is_told(inputs):
    shifted = adapt(small_net(), "int8", [inputs], lambda model, batch: model(batch + 10))
    assert shifted[0].input_high == (inputs + 10).amax()
    model = small_net()
    copy = adapt(model, "prune:0.5", [inputs], lambda model, batch: model(batch + 10))
    assert torch.allclose(copy[1].running_mean, copy[0](inputs + 10).mean((0, 2, 3)), atol=1e-4)
