"""Reads the numbers that rules on activations judge: of one run of a layer, for each sample.

The first dimension of an output is the sample. Channels are the second dimension of what convolutions, batch norms and what
follows them give, and the last one of what all other layers give; the rest are positions. A reader is made with the first output
that it sees, and with the weights that are right.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from unsilent.detectors.activations.rule import CHECKSUM, QUANTILES, RANGE, SITES
from unsilent.protection.layer_watch import LayerRun

Reader = Callable[[LayerRun], Tensor]
"""Takes a run of a layer; returns float32[samples, numbers] on the device of the output."""
SITES_OF_LAYER = 64
QUANTILE_LEVELS = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
QUANTILE_VALUES = 1024
"""Values of a sample, equally far apart in memory, that quantiles are taken of."""
_CHANNELS_SECOND = (
    nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
)  # fmt: skip
_WITH_CHECKSUM = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def choose_layers(model: nn.Module, kind: str) -> tuple[str, ...]:
    """Globs over names of the layers that are read by default."""
    return ("*",)


class LayerReaders:
    """What reads each layer, made when it is first read.

    Args:
        kind: What is read: of `unsilent.detectors.activations.rule.READINGS`.
        seed: Of the choice of sites.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._seed = kind, seed
        self._readers: dict[str, Reader] = {}
        self.nbytes = 0
        """Memory of summed weights."""

    def can_read(self, layer: LayerRun) -> bool:
        """Whether a run of a layer has what is read: a dimension besides that of samples, weights for a checksum."""
        if layer.output.ndim < 2:
            return False
        if self._kind == CHECKSUM:
            return isinstance(layer.compute, _WITH_CHECKSUM) or not isinstance(layer.compute, nn.Module)
        return isinstance(layer.compute, nn.Module)

    def read(self, layer: LayerRun) -> Tensor:
        """float32[samples, numbers]."""
        if layer.name not in self._readers:
            generator = torch.Generator().manual_seed(self._seed + len(self._readers))
            self._readers[layer.name] = make_reader(self._kind, layer, generator)
        return self._readers[layer.name](layer)


def make_reader(kind: str, layer: LayerRun, generator: torch.Generator) -> Reader:
    """What reads a layer for a kind of rule, one of `unsilent.detectors.activations.rule.READINGS`.

    Args:
        layer: A run of it, with the weights that are right.
        generator: Chooses sites.
    """
    if kind == SITES:
        return _site_reader(layer, generator)
    if kind == CHECKSUM:
        return checksum_reader(layer.compute) if isinstance(layer.compute, nn.Module) else read_product
    return {RANGE: _read_range, QUANTILES: _read_quantiles}[kind]


def channel_axis(layer: LayerRun) -> int:
    """Which dimension of the output counts channels."""
    return 1 if isinstance(layer.compute, _CHANNELS_SECOND) else layer.output.ndim - 1


def _site_reader(layer: LayerRun, generator: torch.Generator) -> Reader:
    """The mean over positions of some channels."""
    axis = channel_axis(layer)
    channels = layer.output.shape[axis]
    chosen = torch.randperm(channels, generator=generator)[:SITES_OF_LAYER].sort().values.to(layer.output.device)
    takes_all = len(chosen) == channels

    def read(layer: LayerRun) -> Tensor:
        value = layer.output
        sites = value if takes_all else value.index_select(axis, chosen)
        others = [dim for dim in range(1, value.ndim) if dim != axis]
        return sites.mean(others, dtype=torch.float32) if others else sites.float()

    return read


def _read_range(layer: LayerRun) -> Tensor:
    """Smallest and largest value; NaN where one is NaN."""
    low, high = layer.output.flatten(1).aminmax(dim=1)
    return torch.stack([low, high], 1).float()


def _read_quantiles(layer: LayerRun) -> Tensor:
    """Quantiles of some values, the ends of all of them."""
    flat = layer.output.flatten(1)
    some = flat[:, :: max(1, flat.shape[1] // QUANTILE_VALUES)].float().sort(1).values
    places = [round(level * (some.shape[1] - 1)) for level in QUANTILE_LEVELS[1:-1]]
    low, high = flat.aminmax(dim=1)
    return torch.cat([low.float()[:, None], some[:, places], high.float()[:, None]], 1)


def read_product(layer: LayerRun) -> Tensor:
    """The largest residual of a sample of a product or of attention, in rounding errors, computed from the inputs.

    The checksum is the sum over the last dimension: of a product A B it is A (B 1), of attention it is attention to (V 1). The
    probabilities of attention are computed again for it.
    """
    wide = torch.float64 if layer.output.dtype == torch.float64 else torch.float32
    first, *rest = (
        one.to(wide) if isinstance(one, Tensor) and one.is_floating_point() else one for one in layer.inputs
    )
    last = rest.pop(0) if layer.module_name == "matmul" else rest.pop(1)
    sums = last.sum(-1, keepdim=True), last.abs().sum(-1, keepdim=True)
    if layer.module_name == "matmul":
        total, size = first @ sums[0], first.abs() @ sums[1]
    else:
        key, *others = rest
        total, size = (layer.compute(first, key, one, *others, **layer.named_inputs) for one in sums)
    residual = (layer.output.to(wide).sum(-1, keepdim=True) - total).abs()
    unit = (torch.finfo(layer.output.dtype).eps * size).clamp_min(torch.finfo(wide).tiny)
    return torch.as_tensor(residual / unit).flatten(1).amax(1, keepdim=True).float()


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

    def read(layer: LayerRun) -> Tensor:
        given, value = layer.inputs[0].to(dtype), layer.output
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
