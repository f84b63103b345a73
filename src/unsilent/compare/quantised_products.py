"""Errors that quantisation causes in convolutions and linear layers, measured and expected.

Rounding a value to a step s has a mean squared error of s^2/12. Carried through the layer, an output channel has a mean squared
error of ``sum_i E[x_i^2] s_w^2 / 12 + sum_i w_i^2 s_x^2 / 12``. Steps are those that the original's weights and inputs need,
because the scales of the deployed layer may be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unsilent.compare.lock_step import LayerCall

PRODUCTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d, nn.functional.linear)
INPUT_LEVELS = 255
"""Number of steps of quantised inputs with 8 bits."""
Floats = Tensor


@dataclass
class LayerNoise:
    """Sums of errors of one convolution or linear layer.

    Each is float64[output channels] on the CPU unless stated otherwise.

    Attributes:
        kind: Class of the original's module, and whether it is depthwise.
        largest_weight: Largest magnitude of the original's weights.
        weight_change: Largest change of a weight; ``None`` if the deployed layer's weights cannot be read.
        kept_change: Largest change of weights that are not 0 in the deployed layer; pruning keeps these.
        weight_step: Step between two values of the deployed weights; ``None`` if it cannot be read.
        input_range: The least and the largest quantised input; ``None`` if they cannot be read.
        inputs: The least and the largest input of the original's layer.
        cut, count: Number of inputs outside that range by more than a step, and number of all inputs.
        error, signal: Sums of squares of the local difference and of the original's outputs, for inputs within that range.
        unexplained: Sum of squares of the difference from the output of the deployed layer's weights for unrounded inputs;
            ``None`` if the weights cannot be read.
        carried_weights: Addition to ``error`` from rounding the weights, for a step of 1.
        carried_inputs: Addition to ``error`` from rounding the inputs, for a step of 1.
    """

    kind: str
    largest_weight: Floats
    weight_change: Floats | None
    kept_change: Floats | None
    weight_step: Floats | None
    input_range: tuple[float, float] | None
    inputs: tuple[float, float]
    cut: int
    count: int
    error: Floats
    unexplained: Floats | None
    signal: Floats
    carried_weights: Floats
    carried_inputs: Floats

    def joined(self, noise: LayerNoise) -> LayerNoise:
        """The sums over the inputs of both records."""
        self.inputs = (min(self.inputs[0], noise.inputs[0]), max(self.inputs[1], noise.inputs[1]))
        for name in ("cut", "count", "error", "unexplained", "signal", "carried_weights", "carried_inputs"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name) + getattr(noise, name))
        return self

    @property
    def input_step(self) -> float:
        """Step of 8-bit quantisation for the range of the original's inputs and 0."""
        return (max(self.inputs[1], 0.0) - min(self.inputs[0], 0.0)) / INPUT_LEVELS


class LayerProbe(TorchFunctionMode):
    """Reads the weights that a deployed layer uses while it runs with the original's inputs."""

    def __init__(self, call: LayerCall, deployed: nn.Module) -> None:
        super().__init__()
        self._call, self._deployed = call, deployed
        self._weights: list[Tensor] = []

    @property
    def is_for_product(self) -> bool:
        """Whether the original's layer is a convolution or linear layer."""
        layer = self._call.module
        return type(layer) in PRODUCTS and bool(self._call.inputs) and isinstance(layer.weight, Tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            self._weights.append(args[1] if len(args) > 1 else kwargs["weight"])
        return func(*args, **(kwargs or {}))

    def noise(self, output: Tensor, before: LayerNoise | None) -> LayerNoise | None:
        """The sums of errors of this call, added to those of earlier calls.

        ``None`` if the original's layer is not a product.
        """
        if not self.is_for_product:
            return None
        layer: Any = self._call.module
        weight = layer.weight.detach()
        step = weight_step(self._deployed, len(weight))
        deployed = self._weights[0].detach().to(weight) if len(self._weights) == 1 else None
        deployed = None if deployed is None or deployed.shape != weight.shape else in_units_of(weight, deployed, step)
        result = _noise_of_call(layer, self._call.inputs[0], output, deployed, input_range(self._deployed))
        if before is not None:
            return before.joined(result)
        result.weight_step = step
        if deployed is not None:
            change = (deployed.double() - weight.double()).abs().flatten(1)
            result.weight_change = change.amax(1).cpu()
            result.kept_change = change.where(deployed.flatten(1) != 0, 0).amax(1).cpu()
        return result


def _noise_of_call(
    layer: Any, x: Tensor, output: Tensor, deployed: Tensor | None, known_range: tuple[float, float] | None
) -> LayerNoise:
    is_linear, weight, bias = isinstance(layer, nn.Linear), layer.weight.detach(), layer.bias
    groups = 1 if is_linear else layer.groups

    def product(values: Tensor, weights: Tensor, plus: Tensor | None = None) -> Tensor:
        return nn.functional.linear(values, weights, plus) if is_linear else layer._conv_forward(values, weights, plus)

    def channel_sums(values: Tensor) -> Tensor:
        return _channel_sums(values, is_linear, weight.ndim)

    # Inputs that the range cuts off are judged by the range, so that they do not hide other faults.
    cut = x if known_range is None else x.clamp(*known_range)
    output, original = output.to(x), product(cut, weight, bias)
    error = channel_sums((output - original).square())
    unexplained = None if deployed is None else channel_sums((output - product(cut, deployed, bias)).square())
    by_group = channel_sums(product(x.square(), torch.ones_like(weight[:groups])))
    ones = torch.ones_like(x[:1] if x.ndim > 1 else x)
    carried = channel_sums(product(ones, (weight if deployed is None else deployed).square()))
    return LayerNoise(
        kind=type(layer).__name__ + (" depthwise" if 1 < groups == len(weight) else ""),
        largest_weight=weight.double().abs().flatten(1).amax(1).cpu(),
        weight_change=None, kept_change=None, weight_step=None, input_range=known_range,
        inputs=(float(x.min()), float(x.max())), count=x.numel(),
        cut=0 if known_range is None else int(((x - cut).abs() > (known_range[1] - known_range[0]) / INPUT_LEVELS).sum()),
        error=error, unexplained=unexplained,
        signal=channel_sums(original.square()),
        carried_weights=by_group.repeat_interleave(len(weight) // groups) / 12,
        carried_inputs=carried * (x.numel() / ones.numel()) / 12,
    )  # fmt: skip


def _channel_sums(values: Tensor, is_linear: bool, ndim: int) -> Tensor:
    """Sum over all dimensions except output channels, float64 on the CPU."""
    axis = values.ndim - 1 if is_linear else values.ndim - ndim + 1
    return values.double().movedim(axis, 0).flatten(1).sum(1).cpu() if values.ndim > 1 else values.double().cpu()


def in_units_of(weight: Tensor, deployed: Tensor, step: Tensor | None) -> Tensor:
    """Weights of the deployed layer in the units of the original's.

    Integers are multiplied by their step, or by a fitted factor if it is unknown.
    """
    original_rows, deployed_rows = weight.flatten(1), deployed.flatten(1)
    if not (deployed_rows == deployed_rows.round()).all():
        return deployed
    if step is None:
        step = (original_rows * deployed_rows).sum(1) / deployed_rows.square().sum(1).clamp_min(
            torch.finfo(deployed_rows.dtype).tiny
        )
    return (deployed_rows * step.to(deployed_rows)[:, None]).reshape(deployed.shape)


def weight_step(module: Any, channels: int) -> Tensor | None:
    """Step of a layer's quantised weights for each output channel, float64[channels].

    ``None`` if the layer does not have it.
    """
    step = getattr(module, "weight_scale", None)
    if step is None and hasattr(module, "input_scale") and hasattr(module, "scale"):
        step = torch.as_tensor(module.scale) / module.input_scale
    if step is None:
        return None
    step = torch.as_tensor(step).detach().double().cpu().flatten()
    return step.expand(channels) if step.numel() in (1, channels) else None


def input_range(module: Any) -> tuple[float, float] | None:
    """The range of a layer's quantised inputs, or None if the layer does not state it."""
    scale, zero = getattr(module, "input_scale", None), getattr(module, "input_zero", None)
    if scale is None or zero is None:
        return None
    return (0 - int(zero)) * float(scale), (INPUT_LEVELS - int(zero)) * float(scale)
