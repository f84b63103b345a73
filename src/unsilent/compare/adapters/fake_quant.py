"""Quantised copies of a model, with rounding in float32 (fake quantisation) or computation in integers.

Weights are symmetric, per output channel or per tensor, in 8 or 4 bits; the inputs of each quantised layer are affine 8-bit
numbers per tensor, whose range covers all calibration inputs. The layers of `adapters.layers` that calibration calls are
quantised; everything else computes in float32 (see `names.describe`). Gradients pass through the rounding, and are 0 for values
that were cut (straight-through).

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (CVPR 2018).
Invariant: names and shapes of parameters are those of the original, whose modules are not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.compare.adapters.layers import NONE_ERROR, computes_as, disable_fused_paths
from unsilent.workloads.base import call_model

ACTIVATION_LEVELS = 255
"""Number of steps between the least and the largest input of a layer."""


class FakeQuantized(nn.Module):
    """Base class of quantised convolutions and linear layers, with their scales."""

    weight: Tensor
    bias: Any  # a tensor or None, which linear layers and convolutions declare differently
    input_low: Tensor
    input_high: Tensor
    input_scale: Tensor
    input_zero: Tensor
    weight_scale: Tensor
    original_class: type[nn.Module]

    def set_up(self, bits: int, per_channel: bool) -> None:
        """Initialise the scales from the weights, and the range of inputs as empty."""
        self.largest, self.per_channel, self.observes = 2 ** (bits - 1) - 1, per_channel, True
        self.was_called = False
        self.register_buffer("input_low", torch.zeros(()), persistent=False)
        self.register_buffer("input_high", torch.zeros(()), persistent=False)
        self.register_buffer("input_scale", torch.ones(()))
        self.register_buffer("input_zero", torch.zeros((), dtype=torch.int32))
        self.register_buffer("weight_scale", torch.ones(len(self.weight)))
        self.fit_weights()

    def take_down(self) -> None:
        """Turn the layer into an ordinary one again, with its present weights."""
        for name in ("input_low", "input_high", "input_scale", "input_zero", "weight_scale"):
            delattr(self, name)
        self.__class__ = self.original_class  # type: ignore[assignment]

    @torch.no_grad()
    def fit_weights(self) -> None:
        """Compute the scales from the present weights."""
        most = self.weight.abs().flatten(1).amax(1)
        most = most if self.per_channel else most.amax().expand_as(most)
        self.weight_scale.copy_((most / self.largest).clamp_min(torch.finfo(torch.float32).tiny * 2**24))

    @torch.no_grad()
    def fit_inputs(self, x: Tensor) -> None:
        """Extend the range of inputs to those of a batch.

        The range always includes 0, which padding needs.
        """
        self.was_called = True
        self.input_low.copy_(torch.minimum(self.input_low, x.amin()))
        self.input_high.copy_(torch.maximum(self.input_high, x.amax()))
        scale = ((self.input_high - self.input_low) / ACTIVATION_LEVELS).clamp_min(1e-12)
        self.input_scale.copy_(scale)
        self.input_zero.copy_((-self.input_low / scale).round().to(torch.int32))

    def quantised_inputs(self, x: Tensor) -> Tensor:
        """The inputs rounded to the quantised values.

        During calibration they are returned unchanged, and extend the range of inputs.
        """
        if self.observes:
            self.fit_inputs(x)
            return x
        return torch.fake_quantize_per_tensor_affine(x, self.input_scale, self.input_zero, 0, ACTIVATION_LEVELS)

    def quantised_weight(self) -> Tensor:
        """The weights rounded to the quantised values.

        In training mode, the scales are computed anew first.
        """
        if self.training:
            self.fit_weights()
        zeros = torch.zeros_like(self.weight_scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(
            self.weight, self.weight_scale, zeros, 0, -self.largest, self.largest
        )


class FakeQuantConvolution(FakeQuantized):
    """A convolution with rounded inputs and weights."""

    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """The output; gradients pass through the rounding."""
        return self._conv_forward(self.quantised_inputs(x), self.quantised_weight(), self.bias)


class FakeQuantConv1d(FakeQuantConvolution, nn.Conv1d):
    """A 1D convolution with rounded inputs and weights."""


class FakeQuantConv2d(FakeQuantConvolution, nn.Conv2d):
    """A 2D convolution with rounded inputs and weights."""


class FakeQuantConv3d(FakeQuantConvolution, nn.Conv3d):
    """A 3D convolution with rounded inputs and weights."""


class FakeQuantLinear(nn.Linear, FakeQuantized):
    """A linear layer with rounded inputs and weights."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.quantised_inputs(x), self.quantised_weight(), self.bias)


QUANTISED: dict[type[nn.Module], type[FakeQuantized]] = {
    nn.Conv1d: FakeQuantConv1d,
    nn.Conv2d: FakeQuantConv2d,
    nn.Conv3d: FakeQuantConv3d,
    nn.Linear: FakeQuantLinear,
}


class IntegerLayer(nn.Module):
    """A quantised layer that multiplies and adds integers, without a gradient.

    The sums are those of 32-bit accumulators: the type of the computation represents each of their values exactly.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: FakeQuantized) -> None:
        super().__init__()
        self.layer_shape = (-1, *[1] * (layer.weight.ndim - 2))
        scale = layer.weight_scale.reshape(-1, *[1] * (layer.weight.ndim - 1))
        rounded = (layer.weight / scale).round().clamp(-layer.largest, layer.largest)
        self.register_buffer("weight", rounded.to(torch.int8))
        self.register_buffer("scale", layer.weight_scale * layer.input_scale)
        self.input_scale, self.input_zero = float(layer.input_scale), int(layer.input_zero)
        self.bias = None if layer.bias is None else layer.bias.detach().clone()
        largest_sum = layer.weight[0].numel() * layer.largest * ACTIVATION_LEVELS
        self.sum_type = torch.float32 if largest_sum < 2**24 else torch.float64
        self.product: Callable[..., Tensor] = nn.functional.linear
        self.arguments: dict[str, Any] = {}
        if isinstance(layer, FakeQuantConvolution):
            self.product = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[layer.weight.ndim]
            if layer.padding_mode != "zeros":
                raise UsageError(
                    f"a convolution pads with {layer.padding_mode!r}; expected 'zeros': only that is computed in integers"
                )
            self.arguments = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        whole = (x * (1 / self.input_scale)).round() + self.input_zero
        shifted = (whole.clamp(0, ACTIVATION_LEVELS) - self.input_zero).to(self.sum_type)
        weight = self.weight.to(self.sum_type)
        sums = self.product(shifted, weight, **self.arguments)
        result = sums.float() * self.scale.reshape(self.layer_shape)
        return result if self.bias is None else result + self.bias.reshape(self.layer_shape)


def fake_quantised(
    model: nn.Module,
    calibration: Iterable[Any],
    bits: int = 8,
    *,
    per_channel: bool = True,
    run: Callable[[nn.Module, Any], Any] = call_model,
) -> nn.Module:
    """A differentiable copy of a model in eval mode, quantised after training.

    For quantisation-aware training, train it like any model: the scales follow the weights.

    Args:
        calibration: Batches whose largest and least values set the ranges of inputs.
        bits: Number of bits of weights, 2 to 8.

    Raises:
        UsageError: nothing can be quantised, or there is no batch.
    """
    twin = copy.deepcopy(model).eval()
    disable_fused_paths(twin)
    kinds = {layer: kind for layer in twin.modules() if (kind := computes_as(layer))}
    for layer, kind in kinds.items():
        layer.original_class = type(layer)  # type: ignore[assignment]
        layer.__class__ = QUANTISED[kind]
        layer.set_up(bits, per_channel)  # type: ignore[operator]
    if not kinds:
        raise UsageError(NONE_ERROR.format("quantised"))
    count = 0
    with torch.no_grad():
        for batch in calibration:
            run(twin, batch)
            count += 1
    if not count:
        raise UsageError(
            "there is no calibration batch; give at least one, from which the ranges of activations are taken"
        )
    for quantised in quantised_layers(twin):
        quantised.observes = False
        # Another module reads the weight, or it is not used: the layer's inputs are unknown.
        if not quantised.was_called:
            quantised.take_down()
    if not quantised_layers(twin):
        raise UsageError(
            "no convolution and no linear layer is called when the model runs on the calibration batches; expected at least "
            "one: only layers that are called are quantised"
        )
    return twin


def quantised_layers(model: nn.Module) -> list[FakeQuantized]:
    """The layers of a model that are quantised."""
    return [layer for layer in model.modules() if isinstance(layer, FakeQuantized)]


def converted(twin: nn.Module) -> nn.Module:
    """A copy of a model whose quantised layers compute in integers.

    Returns the model itself if it has no such layers.
    """
    if not quantised_layers(twin):
        return twin
    result = copy.deepcopy(twin).eval()
    layers = {layer: IntegerLayer(layer) for layer in quantised_layers(result)}
    for name, layer in list(result.named_modules(remove_duplicate=False)):  # a layer may have several names
        if layer in layers:
            parent, _, child = name.rpartition(".")
            if not name:
                return layers[layer]
            setattr(result.get_submodule(parent), child, layers[layer])
    return result
