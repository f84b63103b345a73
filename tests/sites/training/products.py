"""Products as loops over numbers in float64, and their gradients by unit vectors: nothing here knows of autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Array = np.ndarray


def convolved(stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Callable[[Array, Array], Array]:
    def product(x: Array, w: Array) -> Array:
        n, c, h, b = x.shape
        o, per, kh, kw = w.shape
        padded = np.zeros((n, c, h + 2 * padding, b + 2 * padding))
        padded[:, :, padding : padding + h, padding : padding + b] = x
        rows = (padded.shape[2] - dilation * (kh - 1) - 1) // stride + 1
        cols = (padded.shape[3] - dilation * (kw - 1) - 1) // stride + 1
        y = np.zeros((n, o, rows, cols))
        for k, p, q, i, u, v in itertools.product(*map(range, (o, rows, cols, per, kh, kw))):
            source = k // (o // groups) * per + i
            y[:, k, p, q] += padded[:, source, p * stride + u * dilation, q * stride + v * dilation] * w[k, i, u, v]
        return y

    return product


def transposed(stride: int = 1, padding: int = 0) -> Callable[[Array, Array], Array]:
    def product(x: Array, w: Array) -> Array:
        n, c, h, b = x.shape
        _, o, kh, kw = w.shape
        full = np.zeros((n, o, (h - 1) * stride + kh, (b - 1) * stride + kw))
        for i, k, p, q, u, v in itertools.product(*map(range, (c, o, h, b, kh, kw))):
            full[:, k, p * stride + u, q * stride + v] += x[:, i, p, q] * w[i, k, u, v]
        end = -padding or None
        return full[:, :, padding:end, padding:end]

    return product


def matmul(x: Array, w: Array) -> Array:
    return np.einsum("...ik,...kj->...ij", x, w)


def looked_up(indices: Array, w: Array) -> Array:
    return w[indices.astype(int)]


def bagged(indices: Array, w: Array) -> Array:
    return np.stack([w[i].sum(0) for i in indices.astype(int)])


class Product(NamedTuple):
    """A product: torch's call, the same as loops, shapes of both operands, name and role of its operation."""

    call: Callable[[Tensor, Tensor], Tensor]
    loops: Callable[[Array, Array], Array]
    x: tuple[int, ...]
    w: tuple[int, ...]
    site: str
    integer: int = 0
    """Operand x holds indices below this."""


BAG = nn.EmbeddingBag(5, 3, mode="sum").double()
PRODUCTS: dict[str, Product] = {
    "conv": Product(F.conv2d, convolved(), (2, 3, 4, 4), (4, 3, 3, 3), "convolution"),
    "conv, stride and padding": Product(
        lambda x, w: F.conv2d(x, w, stride=2, padding=1), convolved(2, 1), (2, 3, 5, 5), (4, 3, 3, 3), "convolution"
    ),
    "conv, groups": Product(
        lambda x, w: F.conv2d(x, w, padding=1, groups=2),
        convolved(1, 1, 1, 2),
        (2, 4, 4, 3),
        (4, 2, 3, 3),
        "convolution",
    ),
    "conv, depthwise, dilation": Product(
        lambda x, w: F.conv2d(x, w, dilation=2, groups=3),
        convolved(1, 0, 2, 3),
        (2, 3, 5, 5),
        (3, 1, 2, 2),
        "convolution",
    ),
    "transposed conv": Product(
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        transposed(2, 1),
        (2, 3, 3, 3),
        (3, 2, 3, 3),
        "convolution",
    ),
    "linear": Product(lambda x, w: F.linear(x, w.t()), matmul, (4, 3), (3, 5), "mm"),
    "linear with bias": Product(
        lambda x, w: F.linear(x, w.t(), torch.zeros(5, dtype=torch.float64)), matmul, (4, 3), (3, 5), "addmm"
    ),
    "mm of a transposed matrix": Product(lambda x, w: x.t().contiguous().t() @ w, matmul, (4, 3), (3, 5), "mm"),
    "bmm": Product(torch.bmm, matmul, (2, 4, 3), (2, 3, 5), "bmm"),
    "baddbmm": Product(
        lambda x, w: torch.baddbmm(torch.zeros(5, dtype=torch.float64), x, w), matmul, (2, 4, 3), (2, 3, 5), "baddbmm"
    ),
    "embedding": Product(lambda x, w: F.embedding(x, w), looked_up, (4, 2), (5, 3), "embedding", 5),
    "embedding bag": Product(
        lambda x, w: F.embedding_bag(x, w, mode="sum"), bagged, (4, 2), (5, 3), "_embedding_bag", 5
    ),
}


def gradients(product: Callable[[Array, Array], Array], x: Array, w: Array, dy: Array) -> tuple[Array, Array]:
    """Of ``<dy, product(x, w)>`` with respect to x and w: a product is linear in each, so unit vectors tell all."""

    def along(of: Array, f: Callable[[Array], Array]) -> Array:
        found = np.zeros(of.size)
        for i in range(of.size):
            unit = np.zeros(of.size)
            unit[i] = 1
            found[i] = (dy * f(unit.reshape(of.shape))).sum()
        return found.reshape(of.shape)

    return along(x, lambda e: product(e, w)), along(w, lambda e: product(x, e))


def array(tensor: Any) -> Array:
    return tensor.detach().numpy().copy()
