"""Lists of the published networks' convolutions that injections can name, without torch.

The published name of a layer is the name of the module here with ``_`` for the dots; all names in DenseNet begin with
``densenet_``. The depthwise convolutions of EfficientNet are not listed, as the artifact corrupts none of their operations.
Tables of layers are those of the artifact at width 64; narrower networks are for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

from unsilent.basics.errors import unknown_name_error
from unsilent.papers.isca23.geometry import IMAGE, Convolution

NETWORKS = ("resnet18", "resnet18_nobn", "resnet18_sgd", "densenet", "effnet")
"""Published models that are implemented here; the three ResNets have equal convolutions."""
STAGES = ((1, 1, 1), (2, 2, 2), (3, 4, 2), (4, 8, 2))
"""ResNet: number, width over the width of the stem, stride of the first block."""
DENSE_LAYERS = (6, 12, 24, 16)
"""DenseNet: bottlenecks of each dense block."""
MOBILE_BLOCKS = ((16, 1, 1, 1, 3), (24, 2, 2, 6, 3), (40, 2, 2, 6, 5), (80, 3, 2, 6, 3), (112, 3, 1, 6, 5),
                 (192, 4, 2, 6, 5), (320, 1, 1, 6, 3))  # fmt: skip
"""EfficientNet: channels, layers, stride of the first layer, expansion, depthwise kernel."""
MOBILE_STEM, MOBILE_HEAD = 32, 1280
Row = tuple[str, int, int, int, int, int]
"""Module, input channels, output channels, height and width of the input, kernel size, stride."""


@lru_cache(maxsize=16)
def convolutions(images: int, width: int = 64, network: str = "resnet18") -> Mapping[str, Convolution]:
    """Convolutions of a published network by published name, the stem first.

    ``images`` is the number of images of one worker.
    """
    if network not in NETWORKS:
        raise unknown_name_error("published network", network, NETWORKS)
    rows, prefix = {"densenet": (_densenet, "densenet_"), "effnet": (_efficientnet, "")}.get(network, (_resnet18, ""))
    listed = []
    for module, channels, kernels, size, kernel, stride in rows(width):
        layer = prefix + module.replace(".", "_")
        listed.append(Convolution(layer, module, images, channels, kernels, size, kernel, stride))
    return MappingProxyType({c.layer: c for c in listed})


def scaled(channels: int, width: int) -> int:
    """Number of channels at the given width, for an EfficientNet layer with ``channels`` at width 64."""
    return max(1, channels * width // 64)


def squeezed(channels: int) -> int:
    """Number of inner channels of a squeeze-and-excitation with the given number of outer channels."""
    return max(1, channels // 4)


def _resnet18(width: int) -> Iterator[Row]:
    yield "conv1", 3, width, IMAGE, 7, 2
    channels, size = width, IMAGE // 2
    for number, times, stride in STAGES:
        for block in range(2):
            name, step, out = f"basicblock_{number}.basic_{block}", 1 if block else stride, times * width
            if step > 1:
                yield f"{name}.downsample", channels, out, size, 1, step
            yield f"{name}.conv1", channels, out, size, 3, step
            yield f"{name}.conv2", out, out, size // step, 3, 1
            channels, size = out, size // step


def _densenet(width: int) -> Iterator[Row]:
    growth, channels, size = width // 2, width, IMAGE // 4
    yield "conv", 3, width, IMAGE, 7, 2
    yield "conv_p", width, width, IMAGE // 2, 3, 2
    for number, layers in enumerate(DENSE_LAYERS, 1):
        for layer in range(layers):
            name = f"dense_block_{number}.bottleneck_{layer}"
            yield f"{name}.conv1", channels, 4 * growth, size, 1, 1
            yield f"{name}.conv2", 4 * growth, growth, size, 3, 1
            channels += growth
        if number < len(DENSE_LAYERS):
            yield f"transition_{number}.conv", channels, channels // 2, size, 1, 1
            yield f"transition_{number}.conv_p", channels // 2, channels // 2, size, 3, 2
            channels, size = channels // 2, size // 2


def _efficientnet(width: int) -> Iterator[Row]:
    channels, size = scaled(MOBILE_STEM, width), IMAGE // 2
    yield "conv1", 3, channels, IMAGE, 3, 2
    for number, (kernels, layers, stride, expansion, _) in enumerate(MOBILE_BLOCKS, 1):
        for layer in range(layers):
            name, wide, step = f"block{number}.mbconv_{layer}", channels * expansion, 1 if layer else stride
            yield f"{name}.conv1", channels, wide, size, 1, 1
            size //= step
            yield f"{name}.se.reduce_conv", wide, squeezed(wide), 1, 1, 1
            yield f"{name}.se.expand_conv", squeezed(wide), wide, 1, 1, 1
            channels = scaled(kernels, width)
            yield f"{name}.conv2", wide, channels, size, 1, 1
    yield "conv2", channels, scaled(MOBILE_HEAD, width), size, 1, 1
