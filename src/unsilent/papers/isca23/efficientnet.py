"""The EfficientNet-B0 of the artifact of He et al. (ISCA 2023) for images of 32 x 32, rebuilt from facts.

It differs from that of Tan & Le: the squeeze-and-excitation stands before the second activation of a block, not behind it, and
squeezes the expanded channels to a quarter of them; the first block has a 1x1 convolution although it expands by one; nothing is
dropped. Only the convolutions of the squeeze-and-excitation have biases.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from unsilent.papers.isca23.layer_lists import MOBILE_BLOCKS, MOBILE_HEAD, MOBILE_STEM, scaled, squeezed
from unsilent.papers.isca23.layers import CLASSES, SameConv2d, make_norm
from unsilent.workloads.layers import Bias


class SqueezeExcitation(nn.Module):
    """Scales each channel by a number from 0 to 1 that follows from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce_conv = SameConv2d(channels, squeezed(channels), 1, 1)
        self.reduce_bias = Bias(squeezed(channels))
        self.expand_conv = SameConv2d(squeezed(channels), channels, 1, 1)
        self.expand_bias = Bias(channels)

    def forward(self, x: Tensor) -> Tensor:
        branch = silu(self.reduce_bias(self.reduce_conv(x.mean((2, 3), keepdim=True))))
        out: Tensor = x * self.expand_bias(self.expand_conv(branch)).sigmoid()
        return out


class MBConv(nn.Module):
    """1x1 to more channels, depthwise, squeeze-and-excitation, 1x1 to fewer; with ``shortcut`` the input is added."""

    def __init__(self, channels: int, kernels: int, expansion: int, kernel: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        wide, self.shortcut = channels * expansion, shortcut
        self.conv1 = SameConv2d(channels, wide, 1, 1)
        self.bn1 = make_norm(wide)
        self.dwconv = SameConv2d(wide, wide, kernel, stride, groups=wide)
        self.bn2 = make_norm(wide)
        self.se = SqueezeExcitation(wide)
        self.conv2 = SameConv2d(wide, kernels, 1, 1)
        self.bn3 = make_norm(kernels)

    def forward(self, x: Tensor) -> Tensor:
        y = silu(self.bn1(self.conv1(x)))
        y = silu(self.se(self.bn2(self.dwconv(y))))
        out: Tensor = self.bn3(self.conv2(y))
        return out + x if self.shortcut else out


class PublishedEfficientNet(nn.Module):
    """Normalised images [n, 3, 32, 32] -> class scores [n, 10] (before the softmax)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        channels = scaled(MOBILE_STEM, width)
        self.conv1 = SameConv2d(3, channels, 3, 2)
        self.bn1 = make_norm(channels)
        for number, (kernels, layers, stride, expansion, kernel) in enumerate(MOBILE_BLOCKS, 1):
            block, out = nn.Sequential(), scaled(kernels, width)
            for layer in range(layers):
                part = MBConv(channels, out, expansion, kernel, 1 if layer else stride, shortcut=layer > 0)
                block.add_module(f"mbconv_{layer}", part)
                channels = out
            self.add_module(f"block{number}", block)
        self.conv2 = SameConv2d(channels, scaled(MOBILE_HEAD, width), 1, 1)
        self.bn2 = make_norm(scaled(MOBILE_HEAD, width))
        self.fc = nn.Linear(scaled(MOBILE_HEAD, width), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = silu(self.bn1(self.conv1(x)))
        for number in range(1, len(MOBILE_BLOCKS) + 1):
            x = self.get_submodule(f"block{number}")(x)
        x = silu(self.bn2(self.conv2(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out
