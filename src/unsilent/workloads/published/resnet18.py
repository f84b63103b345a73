"""The ResNet-18 of the artifact of He et al. (ISCA 2023) for images of 32 x 32, rebuilt from facts.

A 7x7 stem of stride 2 without pooling; four stages of two basic blocks; every convolution has a bias of its own behind it, so
that the output of the convolution is what the artifact corrupts. Dropout follows the first activation of a block and its last
one. Batch norm has Keras's momentum 0.9 (0.1 here) and epsilon 1e-3; paddings are TensorFlow's "same". The final softmax is
part of the loss.

Modules are named so that the published name of a layer is theirs with ``_`` for the dots: see `geometry.convolutions`.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unsilent.errors import UsageError, unknown_name_error
from unsilent.workloads.published.geometry import STAGES, built_in_padding, same_padding
from unsilent.workloads.published.mapping import NETWORKS

CLASSES = 10
DROPOUT = 0.15
_TRUNCATED = 0.87962566103423978
"""Deviation of a unit normal that is cut at two, by which Keras widens its truncated normals."""


class SameConv2d(nn.Conv2d):
    """A convolution without bias under TensorFlow's "same" padding; [n, c, h, w] -> [n, o, ceil(h/s), ceil(w/s)]."""

    def __init__(self, channels: int, kernels: int, kernel: int, stride: int) -> None:
        super().__init__(channels, kernels, kernel, stride, padding=built_in_padding(kernel, stride), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = []
        for axis in (1, 0):  # pad wants the last axis first
            zeros = same_padding(x.shape[2 + axis], self.kernel_size[axis], self.stride[axis])
            given += [n - int(self.padding[axis]) for n in zeros]
        return super().forward(pad(x, given) if any(given) else x)


class Bias(nn.Module):
    """One number for each channel, added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias[:, None, None]


def _norm(channels: int, norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1) if norm else nn.Identity()


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the stride is 2."""

    def __init__(self, channels: int, kernels: int, stride: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.strided = stride > 1
        if self.strided:
            self.downsample = SameConv2d(channels, kernels, 1, stride)
            self.bias3 = Bias(kernels)
            self.bn3 = _norm(kernels, norm)
        self.conv1 = SameConv2d(channels, kernels, 3, stride)
        self.bias1 = Bias(kernels)
        self.bn1 = _norm(kernels, norm)
        self.dropout1 = nn.Dropout(dropout)
        self.conv2 = SameConv2d(kernels, kernels, 3, 1)
        self.bias2 = Bias(kernels)
        self.bn2 = _norm(kernels, norm)
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
        self.bn1 = _norm(width, norm)
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


def untrained_resnet18(name: str = "resnet18", *, width: int = 64, seed: int = 123) -> PublishedResNet18:
    """A fresh network in training mode, its weights drawn by Glorot's truncated normal law.

    Args:
        name: ``resnet18``, ``resnet18_nobn`` (no batch norm) or ``resnet18_sgd`` (no dropout).
        width: Channels of the stem, 64 as published; narrower ones are for tests.
    """
    if name not in NETWORKS:
        raise unknown_name_error("published network", name, NETWORKS)
    if width < 1:
        raise UsageError(f"width is {width}; expected 1 or more (64 in the published network)")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = PublishedResNet18(
            width, norm=name != "resnet18_nobn", dropout=0.0 if name == "resnet18_sgd" else DROPOUT
        )
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    _glorot(module.weight)
            model.fc.bias.zero_()
    return model.train()


def _glorot(weight: Tensor) -> None:
    """Keras's ``GlorotNormal``."""
    reach = math.prod(weight.shape[2:])
    deviation = math.sqrt(2 / (reach * (weight.shape[0] + weight.shape[1]))) / _TRUNCATED
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
