"""The ResNet-18 of the artifact of He et al. (ISCA 2023) for images of 32 x 32, rebuilt from facts.

A 7x7 stem of stride 2 without pooling; four stages of two basic blocks; every convolution has a bias behind it. Dropout follows
the first activation of a block and its last one.

Modules are named so that the published name of a layer is theirs with ``_`` for the dots: see `layer_lists.convolutions`.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from unsilent.papers.isca23.layer_lists import STAGES
from unsilent.papers.isca23.layers import CLASSES, SameConv2d, make_norm
from unsilent.workloads.layers import Bias

DROPOUT = 0.15


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the stride is 2."""

    def __init__(self, channels: int, kernels: int, stride: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.strided = stride > 1
        if self.strided:
            self.downsample = SameConv2d(channels, kernels, 1, stride)
            self.bias3 = Bias(kernels)
            self.bn3 = make_norm(kernels, norm)
        self.conv1 = SameConv2d(channels, kernels, 3, stride)
        self.bias1 = Bias(kernels)
        self.bn1 = make_norm(kernels, norm)
        self.dropout1 = nn.Dropout(dropout)
        self.conv2 = SameConv2d(kernels, kernels, 3, 1)
        self.bias2 = Bias(kernels)
        self.bn2 = make_norm(kernels, norm)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.bn3(self.bias3(self.downsample(x))) if self.strided else x
        x = self.dropout1(self.bn1(self.bias1(self.conv1(x))).relu())
        x = self.bn2(self.bias2(self.conv2(x)))
        out: Tensor = self.dropout2((shortcut + x).relu())
        return out


class PublishedResNet18(nn.Module):
    """Normalised images [n, 3, 32, 32] -> class scores [n, 10] (before the softmax)."""

    def __init__(self, width: int = 64, norm: bool = True, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.conv1 = SameConv2d(3, width, 7, 2)
        self.bias1 = Bias(width)
        self.bn1 = make_norm(width, norm)
        channels = width
        for number, times, stride in STAGES:
            out = times * width
            blocks = [
                ("basic_0", Block(channels, out, stride, norm, dropout)),
                ("basic_1", Block(out, out, 1, norm, dropout)),
            ]
            self.add_module(f"basicblock_{number}", nn.Sequential(OrderedDict(blocks)))
            channels = out
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.bias1(self.conv1(x))).relu()
        for number, _, _ in STAGES:
            x = self.get_submodule(f"basicblock_{number}")(x)
        out: Tensor = self.fc(x.mean((2, 3)))
        return out
