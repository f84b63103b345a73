"""The DenseNet-121 of the artifact of He et al. (ISCA 2023) for images of 32 x 32, rebuilt from facts.

It differs from that of Huang et al.: 3x3 convolutions of stride 2 (``conv_p``) stand where pooling was, behind the stem and in
each transition, without a norm or an activation of their own; every convolution has a bias; half of what a bottleneck adds is
dropped; and no norm or activation follows the last dense block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unsilent.papers.isca23.layer_lists import DENSE_LAYERS
from unsilent.papers.isca23.layers import CLASSES, SameConv2d, make_norm
from unsilent.workloads.layers import Bias

DROPOUT = 0.5


class Bottleneck(nn.Module):
    """Channels that a dense block adds: norm, ReLU, 1x1 to four times as many, norm, ReLU, 3x3, dropout."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = make_norm(channels)
        self.conv1 = SameConv2d(channels, 4 * growth, 1, 1)
        self.bias1 = Bias(4 * growth)
        self.bn2 = make_norm(4 * growth)
        self.conv2 = SameConv2d(4 * growth, growth, 3, 1)
        self.bias2 = Bias(growth)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bias1(self.conv1(self.bn1(x).relu()))
        out: Tensor = self.dropout(self.bias2(self.conv2(self.bn2(x).relu())))
        return out


class DenseBlock(nn.Module):
    """Bottlenecks, each of which reads the input and what all before it added: [n, c, h, w] -> [n, c + layers * growth, h, w]."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        for layer in range(layers):
            self.add_module(f"bottleneck_{layer}", Bottleneck(channels + layer * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        for bottleneck in self.children():
            x = torch.cat([x, bottleneck(x)], 1)
        return x


class Transition(nn.Module):
    """Half as many channels of half the size: norm, ReLU, 1x1, then 3x3 of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = make_norm(channels)
        self.conv = SameConv2d(channels, channels // 2, 1, 1)
        self.bias = Bias(channels // 2)
        self.conv_p = SameConv2d(channels // 2, channels // 2, 3, 2)
        self.bias_p = Bias(channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bias(self.conv(self.bn(x).relu()))
        out: Tensor = self.bias_p(self.conv_p(x))
        return out


class PublishedDenseNet(nn.Module):
    """Normalised images [n, 3, 32, 32] -> class scores [n, 10] (before the softmax)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = SameConv2d(3, width, 7, 2)
        self.bias = Bias(width)
        self.bn = make_norm(width)
        self.conv_p = SameConv2d(width, width, 3, 2)
        self.bias_p = Bias(width)
        channels, growth = width, width // 2
        self.blocks = []
        for number, layers in enumerate(DENSE_LAYERS, 1):
            self.add_module(f"dense_block_{number}", DenseBlock(channels, growth, layers))
            self.blocks.append(f"dense_block_{number}")
            channels += layers * growth
            if number < len(DENSE_LAYERS):
                self.add_module(f"transition_{number}", Transition(channels))
                self.blocks.append(f"transition_{number}")
                channels //= 2
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.bias(self.conv(x))).relu()
        x = self.bias_p(self.conv_p(x))
        for block in self.blocks:
            x = self.get_submodule(block)(x)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out
