"""Readers of layers: they reduce each run of a layer to a few numbers per sample, which rules judge.

The first dimension of an output is the sample. Channels are the second dimension of the outputs of convolutions, batch norms and
the layers that follow them, and the last dimension of all other outputs; the other dimensions are positions. A reader is made
with the first output that it gets, and with the right weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from unsilent.detectors.activations.rule import CHECKSUM, RANGE, SITES
from unsilent.protection.layer_watch import LayerRun, module_name
from unsilent.sites.modules import named_modules

Reader = Callable[[LayerRun, Tensor | None], Tensor]
"""Function of a run of a layer and of memory to write to; returns float32[samples, numbers] on the device of the output."""
SITES_OF_LAYER = 16
"""Number of channels whose means are read, besides the smallest and largest value of the output."""
QUANTILE_LEVELS = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
QUANTILE_VALUES = 1024
"""Number of values of a sample, equally spaced in memory, that quantiles are computed from."""
_CHANNELS_SECOND = (
    nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
)  # fmt: skip
_WITH_CHECKSUM = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


READING_SHARE, MEMORY_SHARE = 0.008, 0.0015
"""Shares of a model's computing time and of its weights' memory that reading sites may take."""
FEWEST_LAYERS, MOST_LAYERS_OF_SMALL, SMALL = 8, 128, 10**8
"""Number of layers that are read whatever the cost; most layers read of a small model; and the multiplications per sample below
which a model is small. A small model is fast whatever is read, so detecting more matters more than the share."""
STRIDES = (1, 2, 4, 8, 16)
"""Strides of the positions that are read: every position, every second one …"""
OPERATIONS_OF_VALUE, OPERATIONS_OF_LAYER, OPERATIONS_OF_SCORE = 60, 16_000_000, 60_000_000
"""Numbers of multiplications that take as long as reading a value, as the calls that read a layer, and as scoring all layers.
Measured on one CPU core, where 6.8 billion multiplications of a Llama took 108 ms."""
BYTES_OF_LAYER = 6500
_TABLES = (nn.Embedding, nn.EmbeddingBag)


class ChosenLayers(NamedTuple):
    """The layers that are read, and the stride of positions.

    Attributes:
        modules: Names of modules.
        stride: Distance between two positions that are read.
    """

    modules: tuple[str, ...]
    stride: int = 1


class LayerCosts:
    """Chooses the layers that are read by default.

    These are all embedding tables, because norms hide their corrupted values from later layers, and products at equal distances
    in the order in which they run, including the last one: as many as can be read within a share of the time of all products.
    Every position of these layers is read, or every second one and so on. In a small model up to `MOST_LAYERS_OF_SMALL` layers
    are read.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Cost] = {}
        self._every: dict[str, None] = {}
        self._samples = 1

    def add(self, layer: LayerRun) -> None:
        """Count the cost of one run of a layer."""
        if layer.output.ndim < 2 or not isinstance(layer.compute, nn.Module):
            return
        self._every[layer.module_name] = None
        self._samples = max(self._samples, len(layer.output))
        weight = getattr(layer.compute, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim < 2:
            return
        channels, values = layer.output.shape[channel_axis(layer)], layer.output.numel()
        known = self._runs.setdefault(layer.module_name, _Cost(isinstance(layer.compute, _TABLES)))
        known.runs += 1
        known.values += values
        known.values_of_sites += values * min(SITES_OF_LAYER, channels) // channels if _has_planes(layer) else values
        if not known.is_table:
            known.multiplications += weight.numel() // max(1, channels) * values

    def choose(self, weight_bytes: int) -> ChosenLayers:
        """The chosen layers, or none if no layer is a product."""
        every = sum(cost.multiplications for cost in self._runs.values())
        if every < SMALL * self._samples:
            return ChosenLayers(_evenly_spread_names(list(self._every), MOST_LAYERS_OF_SMALL))
        tables = tuple(name for name, cost in self._runs.items() if cost.is_table)
        names = [name for name, cost in self._runs.items() if not cost.is_table]
        most = min(len(names), max(FEWEST_LAYERS, int(MEMORY_SHARE * weight_bytes / BYTES_OF_LAYER)))
        for count in range(most, FEWEST_LAYERS, -1):
            modules = tables + _evenly_spread_names(names, count)
            for stride in STRIDES:
                cost = sum(self._runs[name].reading(stride) for name in modules)
                if OPERATIONS_OF_SCORE + cost <= READING_SHARE * every:
                    return ChosenLayers(modules, stride)
        return ChosenLayers(tables + _evenly_spread_names(names, FEWEST_LAYERS), STRIDES[-1])


@dataclass
class _Cost:
    """Numbers of multiplications and values of the runs of a layer in one pass.

    Attributes:
        is_table: Whether the layer looks up values instead of multiplying.
        values, values_of_sites: Number of all output values, and of those in the channels that are read with a stride.
    """

    is_table: bool
    multiplications: int = 0
    values: int = 0
    values_of_sites: int = 0
    runs: int = 0

    def reading(self, stride: int) -> float:
        """Cost of reading the layer, as a number of multiplications that take as long."""
        values = self.values if stride == 1 else self.values_of_sites / stride
        return OPERATIONS_OF_VALUE * values + OPERATIONS_OF_LAYER * self.runs


def _evenly_spread_names(names: list[str], most: int) -> tuple[str, ...]:
    """Names selected from a list at even distances, at most ``most`` and including the last one."""
    count = min(most, len(names))
    return tuple(names[(number + 1) * len(names) // count - 1] for number in range(count))


class LayerReaders:
    """Readers of layers, each created when its layer is first read.

    Args:
        kind: Kind of reading, one of `unsilent.detectors.activations.rule.READINGS`.
        seed: Seed of the choice of sites.
        stride: Distance between two positions of sites that are read.
    """

    def __init__(self, kind: str, seed: int, stride: int = 1) -> None:
        self._kind, self._seed, self.stride = kind, seed, stride
        self._readers: dict[str, Reader] = {}
        self._summed: dict[str, SummedWeights] = {}
        self._scratch = Scratch()

    @property
    def nbytes(self) -> int:
        """Bytes of the summed weights."""
        return sum(t.numel() * t.element_size() for sums in self._summed.values() for t in sums if t is not None)

    def can_read(self, layer: LayerRun) -> bool:
        """Whether a run of a layer can be read.

        The output needs a second dimension; a checksum needs weights or a watched function.
        """
        if layer.output.ndim < 2:
            return False
        if self._kind == CHECKSUM:
            return isinstance(layer.compute, _WITH_CHECKSUM) or not isinstance(layer.compute, nn.Module)
        return isinstance(layer.compute, nn.Module)

    def prepare(self, model: nn.Module, runs: Iterable[str]) -> None:
        """Sum the weights of a model before its layers run, while the weights are right."""
        modules = dict(named_modules(model))
        for run in runs if self._kind == CHECKSUM else ():
            module = modules.get(module_name(run))
            if isinstance(module, _WITH_CHECKSUM):
                self._readers[run] = self._checksum_reader(run, module)

    def key(self, layer: LayerRun) -> Hashable:
        """Key of a reading: readers with equal keys for a run read the same numbers."""
        sums = self._summed.get(layer.module_name, ())
        content = tuple(tensor.numpy(force=True).tobytes() for tensor in sums if tensor is not None)
        return self._kind, self._seed, self.stride, layer.number, layer.name, content

    def read(self, layer: LayerRun, memory: Tensor | None = None) -> Tensor:
        """The numbers read of a run, float32[samples, numbers].

        They are written to ``memory`` if it is given.
        """
        if layer.name not in self._readers:
            if self._kind == CHECKSUM and isinstance(layer.compute, nn.Module):
                self._readers[layer.name] = self._checksum_reader(layer.name, layer.compute)
            else:
                self._readers[layer.name] = make_reader(self._kind, layer, self._seed, self.stride, self._scratch)
        return self._readers[layer.name](layer, memory)

    def _checksum_reader(self, run: str, module: nn.Module) -> Reader:
        """The checksum reader of a layer; all runs of a module share the summed weights."""
        name = module_name(run)
        if name not in self._summed:
            self._summed[name] = sum_weights(module)
        return _reader_into_memory(checksum_reader(module, self._summed[name]))


class Scratch:
    """Reused memory for temporary copies, as large as the largest copy so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def copy(self, value: Tensor) -> Tensor:
        """A contiguous copy of the values in float32, valid until the next copy."""
        if self._memory.device != value.device or self._memory.numel() < value.numel():
            self._memory = torch.empty(value.numel(), device=value.device)
        return self._memory[: value.numel()].view(value.shape).copy_(value)


def make_reader(kind: str, layer: LayerRun, seed: int = 0, stride: int = 1, scratch: Scratch | None = None) -> Reader:
    """Create the reader of a layer for a kind of reading.

    The kind is one of `unsilent.detectors.activations.rule.READINGS`.

    Args:
        layer: A run of the layer, with the right weights.
        seed: Seed of the choice of sites.
        stride: Distance between two positions of sites that are read.
        scratch: Memory that the reader may share with other readers.
    """
    if kind == SITES:
        return _site_reader(layer, seed + crc32(layer.module_name.encode()), stride, scratch or Scratch())
    if kind == CHECKSUM:
        compute = layer.compute
        if isinstance(compute, nn.Module):
            return _reader_into_memory(checksum_reader(compute, sum_weights(compute)))
        return _reader_into_memory(read_product)
    return _reader_into_memory(_read_range if kind == RANGE else _read_quantiles)


def _reader_into_memory(read: Callable[[LayerRun], Tensor]) -> Reader:
    return lambda layer, memory: read(layer) if memory is None else memory.copy_(read(layer))


def channel_axis(layer: LayerRun) -> int:
    """The dimension of the channels in the output."""
    return 1 if isinstance(layer.compute, _CHANNELS_SECOND) else layer.output.ndim - 1


def _has_planes(layer: LayerRun) -> bool:
    """Whether the values of a channel are contiguous."""
    return channel_axis(layer) == 1 and layer.output.ndim > 2


def _site_reader(layer: LayerRun, seed: int, stride: int, scratch: Scratch) -> Reader:
    """A reader of the means of some channels over positions, and of the smallest and largest value.

    Channels are equally spaced, and so are positions along their first dimension. Both begin at places that the seed chooses, so
    that layers read different positions. The smallest and the largest value are those of all channels. With a stride, and if the
    values of a channel are adjacent in memory, they are only those of the channels of the means, which are quick to read. These
    are copied first, because their first reading, from distant memory, takes longest.
    """
    axis, ndim = channel_axis(layer), layer.output.ndim
    channels = layer.output.shape[axis]
    every = max(1, channels // SITES_OF_LAYER)
    first, first_position = seed % every, seed // 64 % stride
    sites = len(range(first, channels, every)[:SITES_OF_LAYER])
    reads_sites_alone = stride > 1 and _has_planes(layer)
    positions = [dim for dim in range(1, ndim) if dim != axis]
    where = [slice(None)] * ndim
    where[axis] = slice(first, first + every * sites, every)
    site_slices, value_axes = tuple(where), tuple(range(1, ndim))
    strided = (*[slice(None)] * (positions[0] if positions else 1), slice(first_position, None, stride))
    last: list[Tensor] = []
    """Memory of the last call, and its parts."""

    def read(layer: LayerRun, memory: Tensor | None) -> Tensor:
        value = layer.output
        if memory is None:
            memory = torch.empty(len(value), sites + 2, dtype=torch.float32, device=value.device)
        if not last or last[0] is not memory:
            last[:] = [memory, memory[:, :sites], memory[:, sites], memory[:, sites + 1]]
        if stride > 1 and positions and value.shape[positions[0]] > first_position:
            value = value[strided]
        if reads_sites_alone:
            value = chosen = scratch.copy(value[site_slices])
        else:
            value = value.float()
            chosen = value[site_slices]
        if positions:
            torch.mean(chosen, positions, out=last[1])
        else:
            last[1].copy_(chosen)
        torch.amin(value, value_axes, out=last[2])
        torch.amax(value, value_axes, out=last[3])
        return memory

    return read


def _read_range(layer: LayerRun) -> Tensor:
    """The smallest and the largest value of each sample, NaN if one is NaN."""
    flat = layer.output.flatten(1)
    return torch.stack([flat.amin(1), flat.amax(1)], 1).float()


def _read_quantiles(layer: LayerRun) -> Tensor:
    """Quantiles of each sample, estimated from some of its values.

    The smallest and largest value are exact, over all values.
    """
    flat = layer.output.flatten(1)
    some = flat[:, :: max(1, flat.shape[1] // QUANTILE_VALUES)].float().sort(1).values
    places = [round(level * (some.shape[1] - 1)) for level in QUANTILE_LEVELS[1:-1]]
    return torch.cat([flat.amin(1, keepdim=True).float(), some[:, places], flat.amax(1, keepdim=True).float()], 1)


def read_product(layer: LayerRun) -> Tensor:
    """The largest checksum residual of each sample of a product or attention, in rounding errors.

    The checksum is the sum over the last dimension, computed from the inputs: A (B 1) for a product A B, and attention to (V 1)
    for attention, whose probabilities are computed again.
    """
    wide = torch.float64 if layer.output.dtype == torch.float64 else torch.float32
    first, *rest = (
        tensor.to(wide) if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor
        for tensor in layer.inputs
    )
    last = rest.pop(0) if layer.module_name == "matmul" else rest.pop(1)
    sums = last.sum(-1, keepdim=True), last.abs().sum(-1, keepdim=True)
    if layer.module_name == "matmul":
        total, size = first @ sums[0], first.abs() @ sums[1]
    else:
        key, *further_inputs = rest
        total, size = (layer.compute(first, key, summed, *further_inputs, **layer.named_inputs) for summed in sums)
    residual = (layer.output.to(wide).sum(-1, keepdim=True) - total).abs()
    unit = (torch.finfo(layer.output.dtype).eps * size).clamp_min(torch.finfo(wide).tiny)
    return torch.as_tensor(residual / unit).flatten(1).amax(1, keepdim=True).float()


class SummedWeights(NamedTuple):
    """Sums of the weights of a linear layer or a convolution over the output channels, by group.

    Attributes:
        weights: [groups, inputs, ...], in float32 or float64.
        magnitudes: Sums of absolute values.
        biases: [groups]; ``None`` if there are no biases.
        bias_magnitudes: Sums of absolute values.
    """

    weights: Tensor
    magnitudes: Tensor
    biases: Tensor | None
    bias_magnitudes: Tensor | None


def sum_weights(module: nn.Module) -> SummedWeights:
    """The sums of the present weights of a layer."""
    assert isinstance(module, _WITH_CHECKSUM)
    weight, groups = module.weight.detach(), getattr(module, "groups", 1)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    by_group = weight.unflatten(0, (groups, -1)).to(dtype)
    if module.bias is None:
        return SummedWeights(by_group.sum(1), by_group.abs().sum(1), None, None)
    bias = module.bias.detach().to(dtype).unflatten(0, (groups, -1))
    return SummedWeights(by_group.sum(1), by_group.abs().sum(1), bias.sum(1), bias.abs().sum(1))


def checksum_reader(module: nn.Module, summed: SummedWeights) -> Callable[[LayerRun], Tensor]:
    """A function that returns the largest checksum residual of each sample, in rounding errors.

    The checksum is the sum over output channels, expected from the right weights.

    |sum of outputs - (input applied to the summed weights)| / (epsilon * input magnitudes applied to summed weight magnitudes)
    """
    assert isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    groups, dtype, epsilon = getattr(module, "groups", 1), summed.weights.dtype, torch.finfo(module.weight.dtype).eps

    def apply(inputs: Tensor, to: Tensor, add: Tensor | None) -> Tensor:
        if isinstance(module, nn.Linear):
            return functional.linear(inputs, to, add)
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = nn.functional.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[inputs.ndim - 3]
        result: Tensor = convolution(padded, to, add, module.stride, 0, module.dilation, groups)
        return result

    def read(layer: LayerRun) -> Tensor:
        layer_input, value = layer.inputs[0].to(dtype), layer.output
        axis = value.ndim - 1 if isinstance(module, nn.Linear) else 1
        total = value.to(dtype).unflatten(axis, (groups, -1)).sum(axis + 1)
        size = apply(layer_input.abs(), summed.magnitudes, summed.bias_magnitudes)
        expected = apply(layer_input, summed.weights, summed.biases)
        residual: Tensor = (total - expected).abs() / (epsilon * size).clamp_min(torch.finfo(dtype).tiny)
        # NaN and infinity of inputs are found in the layer that causes them; here they would hide errors of this layer.
        return residual.flatten(1).amax(1, keepdim=True).float()

    return read
