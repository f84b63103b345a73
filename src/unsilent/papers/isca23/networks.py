"""The networks of He et al. (ISCA 2023) for images of 32 x 32, rebuilt from published facts.

Every convolution is one operation without its bias, which is added after it, so that the artifact's corrupted tensor is the
output of the convolution. Batch norm has Keras's momentum 0.9 (0.1 here) and epsilon 1e-3; paddings are TensorFlow's "same".
The final softmax is part of the loss.

ResNet-18: a 7x7 stem of stride 2 without pooling; four stages of two basic blocks; every convolution is followed by a bias.
Dropout follows the first activation of a block and its last one. The published name of a layer is the name of the module here
with ``_`` for the dots: see `layer_lists.convolutions`.

DenseNet-121 differs from that of Huang et al.: 3x3 convolutions of stride 2 (``conv_p``) replace pooling after the stem and in
each transition, without their own norm or activation; every convolution has a bias; dropout removes half of the output of a
bottleneck; and no norm or activation follows the last dense block.

EfficientNet-B0 differs from that of Tan & Le: the squeeze-and-excitation is placed before the second activation of a block, not
after it, and squeezes the expanded channels to a quarter of them; the first block has a 1x1 convolution although it expands by
one; nothing is dropped. Only the convolutions of the squeeze-and-excitation have biases.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from unsilent.papers.isca23.geometry import built_in_padding, same_padding
from unsilent.papers.isca23.layer_lists import (
    DENSE_LAYERS,
    MOBILE_BLOCKS,
    MOBILE_HEAD,
    MOBILE_STEM,
    STAGES,
    scaled,
    squeezed,
)
from unsilent.workloads.layers import Bias

CLASSES = 10
_TRUNCATED = 0.87962566103423978
"""Standard deviation of a unit normal truncated at two; Keras divides by it to widen its truncated normals."""


class SameConv2d(nn.Conv2d):
    """A convolution without bias and with TensorFlow's "same" padding.

    [n, c, h, w] -> [n, o, ceil(h/s), ceil(w/s)].
    """

    def __init__(self, channels: int, kernels: int, kernel: int, stride: int, groups: int = 1) -> None:
        built_in = built_in_padding(kernel, stride)
        super().__init__(channels, kernels, kernel, stride, padding=built_in, bias=False, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        margins = []
        for axis in (1, 0):  # pad wants the last axis first
            zeros = same_padding(x.shape[2 + axis], self.kernel_size[axis], self.stride[axis])
            margins += [n - int(self.padding[axis]) for n in zeros]
        return super().forward(pad(x, margins) if any(margins) else x)


def make_norm(channels: int, norm: bool = True) -> nn.Module:
    """A batch norm with Keras's defaults and the published momentum, or an identity."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1) if norm else nn.Identity()


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draw kernels by Keras's ``GlorotNormal``, and set biases of linear layers to 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            reach = math.prod(module.weight.shape[2:])
            deviation = math.sqrt(2 / (reach * sum(module.weight.shape[:2]))) / _TRUNCATED
            nn.init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if isinstance(module, nn.Linear):
            module.bias.zero_()


DROPOUT = 0.15


class Block(nn.Module):
    """A residual block of two 3x3 convolutions and a shortcut.

    With stride 2, the shortcut is a 1x1 convolution.
    """

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
    """The published ResNet-18, from normalised images [n, 3, 32, 32] to class scores [n, 10]."""

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


BOTTLENECK_DROPOUT = 0.5


class Bottleneck(nn.Module):
    """A bottleneck of DenseNet, which computes the channels that are added.

    Norm, ReLU, 1x1 convolution to four times as many channels, norm, ReLU, 3x3 convolution, dropout.
    """

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = make_norm(channels)
        self.conv1 = SameConv2d(channels, 4 * growth, 1, 1)
        self.bias1 = Bias(4 * growth)
        self.bn2 = make_norm(4 * growth)
        self.conv2 = SameConv2d(4 * growth, growth, 3, 1)
        self.bias2 = Bias(growth)
        self.dropout = nn.Dropout(BOTTLENECK_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bias1(self.conv1(self.bn1(x).relu()))
        out: Tensor = self.dropout(self.bias2(self.conv2(self.bn2(x).relu())))
        return out


class DenseBlock(nn.Module):
    """Bottlenecks that each read the block's input and all earlier outputs.

    [n, c, h, w] -> [n, c + layers * growth, h, w].
    """

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        for layer in range(layers):
            self.add_module(f"bottleneck_{layer}", Bottleneck(channels + layer * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        for bottleneck in self.children():
            x = torch.cat([x, bottleneck(x)], 1)
        return x


class Transition(nn.Module):
    """A transition of DenseNet, which halves the number of channels and the image size.

    Norm, ReLU, 1x1 convolution, 3x3 convolution of stride 2.
    """

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
    """The published DenseNet, from normalised images [n, 3, 32, 32] to class scores [n, 10]."""

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


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor from 0 to 1 that is computed from the means of all channels."""

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
    """A block of EfficientNet with a depthwise convolution and squeeze-and-excitation.

    A 1x1 convolution before them adds channels, one after them removes channels. With ``shortcut`` the input is added.
    """

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
    """The published EfficientNet, from normalised images [n, 3, 32, 32] to class scores [n, 10]."""

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
