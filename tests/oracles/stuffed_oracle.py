"""A convolution and its two gradients as convolutions of stride 1, in float64 with channels last: slow, obvious, without torch.

The three tensors of each have the layouts that published injections name. Nothing here is shared with what is tested.
"""

from __future__ import annotations

import itertools

import numpy as np

Array = np.ndarray


def zeros_around(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """How many zeros "same" padding puts before and after."""
    outputs = (size + stride - 1) // stride
    missing = 0
    while (size + missing - kernel) // stride + 1 < outputs:
        missing += 1
    return missing // 2, missing - missing // 2


def sliding(x: Array, w: Array, stride: int = 1) -> Array:
    """[N, H, W, C] with [k, l, C, O] -> [N, h, w, O], without padding."""
    rows, columns = (x.shape[1] - w.shape[0]) // stride + 1, (x.shape[2] - w.shape[1]) // stride + 1
    y = np.zeros((x.shape[0], rows, columns, w.shape[3]))
    for p, q, a, b in itertools.product(range(rows), range(columns), range(w.shape[0]), range(w.shape[1])):
        y[:, p, q] += x[:, p * stride + a, q * stride + b] @ w[a, b]
    return y


def spread(dy: Array, kernel: int) -> Array:
    """Stride 2: a zero for each element, before it where the kernel is larger than 1, else after it."""
    n, h, w, o = dy.shape
    wide = np.zeros((n, 2 * h, 2 * w, o))
    at = 1 if kernel > 1 else 0
    for p, q in itertools.product(range(h), range(w)):
        wide[:, 2 * p + at, 2 * q + at] = dy[:, p, q]
    return wide


def surrounded(x: Array, before: int, after: int) -> Array:
    """Zeros around both spatial axes."""
    return np.pad(x, ((0, 0), (before, after), (before, after), (0, 0)))


def operands(phase: str, x: Array, w: Array, dy: Array, stride: int) -> tuple[Array, Array]:
    """What ``fwd``, ``grad_in`` or ``grad_wt`` multiplies, from x [N, H, W, C], w [k, k, C, O] and dy [N, h, w, O]."""
    k = w.shape[0]
    side = (k - 1) // 2
    if phase == "fwd":
        return x.copy(), w.copy()
    wide = dy if stride == 1 else spread(dy, k)
    if phase == "grad_in":
        return surrounded(wide, side, side), np.swapaxes(w[::-1, ::-1], 2, 3).copy()
    return surrounded(x, side, side).transpose(3, 1, 2, 0).copy(), wide.transpose(1, 2, 0, 3).copy()


def computed(phase: str, first: Array, second: Array, stride: int) -> Array:
    """Their product."""
    if phase != "fwd":
        return sliding(first, second)
    return sliding(surrounded(first, *zeros_around(first.shape[1], second.shape[0], stride)), second, stride)


def corrupted(
    phase: str, operand: str, x: Array, w: Array, dy: Array, stride: int, victims: dict[tuple, float]
) -> Array:
    """The product with values put into one of its three tensors."""
    first, second = operands(phase, x, w, dy, stride)
    if operand != "out":
        for index, value in victims.items():
            (first if operand == "first" else second)[index] = value
    out = computed(phase, first, second, stride)
    if operand == "out":
        for index, value in victims.items():
            out[index] = value
    return out
