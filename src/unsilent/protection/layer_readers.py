"""Reads the numbers that rules on activations judge: of one layer's output, for each sample.

The first dimension of an output is the sample. Channels are the second dimension of what convolutions and batch norms give, and
the last one of what all other layers give; the rest are positions. A reader is made with the first output that it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unsilent.detectors.activations.rule import CHECKSUM, QUANTILES, RANGE, SITES

Reader = Callable[[tuple[Any, ...], Tensor], Tensor]
"""Takes the inputs and the output [samples, ...] of a layer; returns float32[samples, numbers] on the device of the output."""
SITES_OF_LAYER = 64
QUANTILE_LEVELS = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
QUANTILE_VALUES = 1024
"""Values of a sample, equally far apart in memory, that quantiles are taken of."""
_CHANNELS_SECOND = (
    nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
)  # fmt: skip


def make_reader(kind: str, module: nn.Module, output: Tensor, generator: torch.Generator) -> Reader:
    """What reads a layer for a kind of rule, one of `unsilent.detectors.activations.rule.READINGS`.

    Args:
        module: The layer, with the weights that are right.
        output: Of the layer, [samples, ...].
        generator: Chooses sites.
    """
    if kind == SITES:
        return _site_reader(module, output, generator)
    if kind == CHECKSUM:
        return checksum_reader(module)
    return {RANGE: _read_range, QUANTILES: _read_quantiles}[kind]


def has_reader(kind: str, module: nn.Module, output: Any) -> bool:
    """Whether a layer can be read: its output is a tensor of numbers with a dimension besides that of samples."""
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim < 2 or not output.numel():
        return False
    return kind != CHECKSUM or isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def _site_reader(module: nn.Module, output: Tensor, generator: torch.Generator) -> Reader:
    """The mean over positions of some channels."""
    axis = 1 if isinstance(module, _CHANNELS_SECOND) else output.ndim - 1
    channels = output.shape[axis]
    chosen = torch.randperm(channels, generator=generator)[:SITES_OF_LAYER].sort().values.to(output.device)
    takes_all = len(chosen) == channels

    def read(inputs: tuple[Any, ...], value: Tensor) -> Tensor:
        sites = value if takes_all else value.index_select(axis, chosen)
        others = [dim for dim in range(1, value.ndim) if dim != axis]
        return sites.mean(others, dtype=torch.float32) if others else sites.float()

    return read


def _read_range(inputs: tuple[Any, ...], value: Tensor) -> Tensor:
    """Smallest and largest value; NaN where one is NaN."""
    low, high = value.flatten(1).aminmax(dim=1)
    return torch.stack([low, high], 1).float()


def _read_quantiles(inputs: tuple[Any, ...], value: Tensor) -> Tensor:
    """Quantiles of some values, the ends of all of them."""
    flat = value.flatten(1)
    some = flat[:, :: max(1, flat.shape[1] // QUANTILE_VALUES)].float().sort(1).values
    places = [round(level * (some.shape[1] - 1)) for level in QUANTILE_LEVELS[1:-1]]
    low, high = flat.aminmax(dim=1)
    return torch.cat([low.float()[:, None], some[:, places], high.float()[:, None]], 1)


def checksum_reader(module: nn.Module) -> Reader:
    """The largest residual of a sample, in rounding errors: of the sum over output channels, with the weights of now.

    |sum of outputs - (input applied to the summed weights)| / (epsilon * input magnitudes applied to summed weight magnitudes)
    """
    assert isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    weight, groups = module.weight.detach(), getattr(module, "groups", 1)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    by_group = weight.unflatten(0, (groups, -1)).to(dtype)
    sums, magnitudes = by_group.sum(1), by_group.abs().sum(1)
    bias = None if module.bias is None else module.bias.detach().to(dtype).unflatten(0, (groups, -1))
    offset = None if bias is None else bias.sum(1)
    epsilon = torch.finfo(weight.dtype).eps

    def apply(inputs: Tensor, to: Tensor, add: Tensor | None) -> Tensor:
        if isinstance(module, nn.Linear):
            return functional.linear(inputs, to, add)
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        padded = nn.functional.pad(
            inputs,
            module._reversed_padding_repeated_twice,
            mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
        )
        convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[inputs.ndim - 3]
        result: Tensor = convolution(padded, to, add, module.stride, 0, module.dilation, groups)
        return result

    def read(inputs: tuple[Any, ...], value: Tensor) -> Tensor:
        given = inputs[0].to(dtype)
        axis = value.ndim - 1 if isinstance(module, nn.Linear) else 1
        total = value.to(dtype).unflatten(axis, (groups, -1)).sum(axis + 1)
        size = (
            apply(given.abs(), magnitudes, None) if bias is None else apply(given.abs(), magnitudes, bias.abs().sum(1))
        )
        residual: Tensor = (total - apply(given, sums, offset)).abs() / (epsilon * size).clamp_min(
            torch.finfo(dtype).tiny
        )
        # NaN and infinity of inputs are found where they arise; here they would hide what this layer adds.
        return residual.flatten(1).amax(1, keepdim=True).float()

    return read
