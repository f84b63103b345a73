"""Layers of the published networks as TensorFlow and Keras have them.

Every convolution is one operation without its bias, which is added behind it, so that the output of the convolution is what the
artifact corrupts. Batch norm has Keras's momentum 0.9 (0.1 here) and epsilon 1e-3; paddings are TensorFlow's "same". The final
softmax is part of the loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unsilent.papers.isca23.geometry import built_in_padding, same_padding

CLASSES = 10
_TRUNCATED = 0.87962566103423978
"""Deviation of a unit normal that is cut at two, by which Keras widens its truncated normals."""


class SameConv2d(nn.Conv2d):
    """A convolution without bias under TensorFlow's "same" padding; [n, c, h, w] -> [n, o, ceil(h/s), ceil(w/s)]."""

    def __init__(self, channels: int, kernels: int, kernel: int, stride: int, groups: int = 1) -> None:
        own = built_in_padding(kernel, stride)
        super().__init__(channels, kernels, kernel, stride, padding=own, bias=False, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        given = []
        for axis in (1, 0):  # pad wants the last axis first
            zeros = same_padding(x.shape[2 + axis], self.kernel_size[axis], self.stride[axis])
            given += [n - int(self.padding[axis]) for n in zeros]
        return super().forward(pad(x, given) if any(given) else x)


def make_norm(channels: int, norm: bool = True) -> nn.Module:
    """Batch norm with Keras's defaults and the published momentum, or nothing."""
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1) if norm else nn.Identity()


@torch.no_grad()
def draw_weights(model: nn.Module) -> None:
    """Draw kernels by Glorot's truncated normal law, Keras's ``GlorotNormal``; biases of linear layers become 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            reach = math.prod(module.weight.shape[2:])
            deviation = math.sqrt(2 / (reach * sum(module.weight.shape[:2]))) / _TRUNCATED
            nn.init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if isinstance(module, nn.Linear):
            module.bias.zero_()
