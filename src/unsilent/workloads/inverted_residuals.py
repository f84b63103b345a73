"""Two digit classifiers with inverted residual blocks: `DigitsMobileNet` and `DigitsEfficientNet`.

`DigitsMobileNet` follows Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (CVPR 2018): depthwise
convolutions and ReLU6. `DigitsEfficientNet` follows Tan & Le, "EfficientNet: Rethinking Model Scaling" (ICML 2019): the same
blocks with squeeze-and-excitation and SiLU. Both are scaled down to 8x8 images, without stochastic depth or dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

CLASSES = 10
FEATURES = 64
"""Number of channels before the last layer."""


class Stage(NamedTuple):
    """A stage of ``blocks`` inverted residual blocks of one width, of which the first has the stride."""

    expansion: int
    channels: int
    blocks: int
    stride: int


STEM = 16
"""Number of channels of the first layer."""
STAGES = (Stage(1, 8, 1, 1), Stage(4, 16, 2, 2), Stage(4, 24, 2, 2))
SQUEEZE = 4
"""Number of input channels of a block per channel of its squeezed layer."""


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all channels.

    [n, c, h, w] -> the same shape.
    """

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.act = nn.SiLU()
        self.restore = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        out: Tensor = x * torch.sigmoid(self.restore(self.act(self.reduce(means))))
        return out


class InvertedResidual(nn.Module):
    """An inverted residual block: [n, c_in, h, w] -> [n, c_out, h/stride, w/stride].

    A 1x1 convolution widens it, a 3x3 one filters each channel, and another 1x1 one, without activation, narrows it again.
    The input is added if it has the same shape as the output.
    """

    def __init__(
        self, c_in: int, c_out: int, stride: int, expansion: int, act: Callable[[], nn.Module], squeeze: bool
    ) -> None:
        super().__init__()
        wide = c_in * expansion
        self.expand = convolution(c_in, wide, 1, act) if expansion != 1 else nn.Identity()
        self.depthwise = convolution(wide, wide, 3, act, stride=stride, groups=wide)
        self.excite = SqueezeExcitation(wide, max(1, c_in // SQUEEZE)) if squeeze else nn.Identity()
        self.project = convolution(wide, c_out, 1)
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(self.excite(self.depthwise(self.expand(x))))
        return x + out if self.residual else out


def convolution(
    c_in: int, c_out: int, kernel: int, act: Callable[[], nn.Module] | None = None, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A sequence of convolution without bias, batch norm, and optionally an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(c_out),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


class _InvertedResidualNet(nn.Module):
    """Base of both networks: images [n, 1, 8, 8] -> class scores [n, 10]."""

    def __init__(self, act: Callable[[], nn.Module], squeeze: bool) -> None:
        super().__init__()
        self.stem = convolution(1, STEM, 3, act)
        blocks, channels = [], STEM
        for stage in STAGES:
            for i in range(stage.blocks):
                stride = stage.stride if i == 0 else 1
                blocks.append(InvertedResidual(channels, stage.channels, stride, stage.expansion, act, squeeze))
                channels = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.features = convolution(channels, FEATURES, 1, act)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(self.blocks(self.stem(x))))
        return out


class DigitsMobileNet(_InvertedResidualNet):
    """A network of inverted residual blocks with ReLU6: images [n, 1, 8, 8] -> class scores [n, 10]."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU6, squeeze=False)


class DigitsEfficientNet(_InvertedResidualNet):
    """A network of inverted residual blocks with squeeze-and-excitation and SiLU.

    Images [n, 1, 8, 8] -> class scores [n, 10].
    """

    def __init__(self) -> None:
        super().__init__(nn.SiLU, squeeze=True)
