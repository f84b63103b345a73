"""Small quantised copies of networks, with faults to be planted; the products of PyTorch's own fake quantisation."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional


class Quantised:
    """What makes a product a quantised one: inputs of 8 bits, weights of one step per channel."""

    def set_up(self, x, levels=127):
        most = self.weight.detach().abs().flatten(1).amax(1)
        self.levels = levels
        self.weight_scale = most / levels
        low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
        self.input_scale, self.input_zero = (high - low) / 255, round(-low / (high - low) * 255)

    def rounded(self, x):
        return torch.fake_quantize_per_tensor_affine(x, self.input_scale, self.input_zero, 0, 255)

    def rounded_weight(self):
        zeros = torch.zeros(len(self.weight), dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(
            self.weight, self.weight_scale, zeros, 0, -self.levels, self.levels
        )


class QuantisedConv(Quantised, nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(self.rounded(x), self.rounded_weight(), self.bias)


class QuantisedLinear(Quantised, nn.Linear):
    def forward(self, x):
        return functional.linear(self.rounded(x), self.rounded_weight(), self.bias)


CLASSES = {nn.Conv2d: QuantisedConv, nn.Linear: QuantisedLinear}


def quantised(model, x, levels=127):
    """A copy whose products are quantised, with ranges from one batch."""
    result = copy.deepcopy(model).eval()
    layers = [layer for layer in result.modules() if type(layer) in CLASSES]
    seen = {}
    hooks = [layer.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]})) for layer in layers]
    with torch.no_grad():
        result(x)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        layer.__class__ = CLASSES[type(layer)]
        layer.set_up(seen[layer], levels)
    return result


def network(seed=0):
    """Convolutions, one of them depthwise, batch norm, and a linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 1), nn.Hardswish(), nn.Flatten(), nn.Linear(16 * 36, 10),
    ).eval()  # fmt: skip


def images(n=8, seed=1):
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
