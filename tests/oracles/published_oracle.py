"""Forward passes of the published DenseNet and EfficientNet with batch statistics, in float64 with channels last, without torch.

Written from the artifact's order of layers; widths are those of the weights, which have torch's names and layouts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles.stuffed_oracle import Array, sliding, surrounded, zeros_around

Weights = Mapping[str, Array]


def conv(weights: Weights, name: str, x: Array, stride: int = 1, bias: str = "") -> Array:
    """A convolution under "same" padding and its bias, if any."""
    w = weights[f"{name}.weight"].transpose(2, 3, 1, 0)
    y = sliding(surrounded(x, *zeros_around(x.shape[1], len(w), stride)), w, stride)
    return y + weights[f"{bias}.bias"] if bias else y


def depthwise(weights: Weights, name: str, x: Array, stride: int) -> Array:
    """Each channel with a kernel of its own."""
    w = weights[f"{name}.weight"][:, 0]
    padded = surrounded(x, *zeros_around(x.shape[1], w.shape[1], stride))
    each = [sliding(padded[..., c : c + 1], w[c][:, :, None, None], stride) for c in range(len(w))]
    return np.concatenate(each, -1)


def norm(weights: Weights, name: str, x: Array) -> Array:
    """Batch norm by the statistics of the batch."""
    mean = x.mean((0, 1, 2))
    unit = (x - mean) / np.sqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-3)
    return weights[f"{name}.weight"] * unit + weights[f"{name}.bias"]


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def swish(x: Array) -> Array:
    return x * sigmoid(x)


def densenet(weights: Weights, x: Array, kept: float) -> Array:
    """Scores [N, 10]; ``kept``: what dropout multiplies the output of a bottleneck by."""
    x = relu(norm(weights, "bn", conv(weights, "conv", x, 2, "bias")))
    x = conv(weights, "conv_p", x, 2, "bias_p")
    for block, bottlenecks in zip("1234", (6, 12, 24, 16), strict=True):
        for i in range(bottlenecks):
            at = f"dense_block_{block}.bottleneck_{i}"
            y = conv(weights, f"{at}.conv1", relu(norm(weights, f"{at}.bn1", x)), 1, f"{at}.bias1")
            y = conv(weights, f"{at}.conv2", relu(norm(weights, f"{at}.bn2", y)), 1, f"{at}.bias2")
            x = np.concatenate([x, kept * y], -1)
        if block != "4":
            at = f"transition_{block}"
            x = conv(weights, f"{at}.conv", relu(norm(weights, f"{at}.bn", x)), 1, f"{at}.bias")
            x = conv(weights, f"{at}.conv_p", x, 2, f"{at}.bias_p")
    return x.mean((1, 2)) @ weights["fc.weight"].T + weights["fc.bias"]


def efficientnet(weights: Weights, x: Array) -> Array:
    """Scores [N, 10]."""
    x = swish(norm(weights, "bn1", conv(weights, "conv1", x, 2)))
    for block, (repeats, stride) in enumerate(zip((1, 2, 2, 3, 3, 4, 1), (1, 2, 2, 2, 1, 2, 1), strict=True), 1):
        for i in range(repeats):
            at = f"block{block}.mbconv_{i}"
            y = swish(norm(weights, f"{at}.bn1", conv(weights, f"{at}.conv1", x)))
            y = norm(weights, f"{at}.bn2", depthwise(weights, f"{at}.dwconv", y, stride if i == 0 else 1))
            z = y.mean((1, 2), keepdims=True)
            z = swish(conv(weights, f"{at}.se.reduce_conv", z, 1, f"{at}.se.reduce_bias"))
            y = swish(y * sigmoid(conv(weights, f"{at}.se.expand_conv", z, 1, f"{at}.se.expand_bias")))
            y = norm(weights, f"{at}.bn3", conv(weights, f"{at}.conv2", y))
            x = y + x if i else y
    x = swish(norm(weights, "bn2", conv(weights, "conv2", x)))
    return x.mean((1, 2)) @ weights["fc.weight"].T + weights["fc.bias"]
