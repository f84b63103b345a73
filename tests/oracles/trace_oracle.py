"""A small network and its gradients in numpy, float64, with loops: what every operation gives, with a fault or without.

Convolution (3x3, padding 1), ReLU, linear layer, loss = sum of squares. ``spoil(name, array)`` may return another array for
what an operation gives; everything after it is computed from that.
"""

from __future__ import annotations

import numpy as np


def intact(name, array):
    return array


def convolve(x, w, b):
    n, c_in, height, width = x.shape
    padded = np.zeros((n, c_in, height + 2, width + 2))
    padded[:, :, 1:-1, 1:-1] = x
    out = np.empty((n, len(w), height, width))
    for i in np.ndindex(out.shape):
        image, channel, row, column = i
        out[i] = (padded[image, :, row : row + 3, column : column + 3] * w[channel]).sum() + b[channel]
    return out


def convolve_weight(x, dy):
    n, c_in, height, width = x.shape
    padded = np.zeros((n, c_in, height + 2, width + 2))
    padded[:, :, 1:-1, 1:-1] = x
    out = np.empty((dy.shape[1], c_in, 3, 3))
    for channel, source, i, j in np.ndindex(out.shape):
        out[channel, source, i, j] = (padded[:, source, i : i + height, j : j + width] * dy[:, channel]).sum()
    return out


def step(x, w, b, v, spoil=intact):
    """What each operation gives: by the label that a trace has for it."""
    seen = {}

    def give(name, array):
        seen[name] = array = spoil(name, array.copy())
        return array

    y = give("conv#convolution.0", convolve(x, w, b))
    z = give("act#relu.0", np.where(y > 0, y, 0.0))
    flat = z.reshape(len(x), -1)
    out = give("fc#mm.0", np.array([[(row * weights).sum() for weights in v] for row in flat]))
    square = give("(run)#pow.0", out**2)
    give("(run)#sum.0", square.sum())
    d_out = give("(run)#pow.0 > mul.1", 2 * out)
    give(
        "fc#mm.0 > mm.0",
        np.array([[(d_out[:, k] * flat[:, f]).sum() for f in range(flat.shape[1])] for k in range(len(v))]),
    )
    d_flat = give("fc#mm.0 > mm.1", np.array([[(row * v[:, f]).sum() for f in range(flat.shape[1])] for row in d_out]))
    d_y = give("act#relu.0 > threshold_backward.0", np.where(z > 0, d_flat.reshape(z.shape), 0.0))
    give("conv#convolution.0 > convolution_backward.0", convolve_weight(x, d_y))
    give("conv#convolution.0 > convolution_backward.0/out.1", d_y.sum((0, 2, 3)))
    return seen


def numbers(golden, faulty):
    """Changed elements, largest relative and absolute change, as `unsilent.basics.fault_trace` says; element by element."""
    changed, relative, absolute, from_zero, nonfinite = 0, None, None, 0, 0
    for g, f in zip(golden.ravel(), faulty.ravel(), strict=True):
        if g.tobytes() == f.tobytes():
            continue
        changed += 1
        one, two = float(g), float(f)
        nonfinite += np.isfinite(one) and not np.isfinite(two)
        if not (np.isfinite(one) and np.isfinite(two)):
            continue
        apart = min(abs(two - one), np.finfo(float).max)
        absolute = apart if absolute is None else max(absolute, apart)
        from_zero += one == 0 and two != 0
        if one != 0:
            with np.errstate(over="ignore"):
                ratio = min(float(np.float64(abs(two - one)) / abs(np.float64(one))), np.finfo(float).max)
            relative = ratio if relative is None else max(relative, ratio)
    return changed, relative, absolute, int(from_zero), int(nonfinite)
