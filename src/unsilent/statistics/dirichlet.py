"""Distribution function and quantiles of a mean of fixed values under Dirichlet weights, to full precision.

``M = sum_j D_j v_j`` with ``D ~ Dirichlet(counts)``. With gamma variables ``G_j`` of shape ``counts_j``, ``M > t`` is
``sum_j G_j (v_j - t) > 0``, whose probability is a contour integral of its moment generating function through the saddle
point. The trapezoidal rule converges exponentially on it (Rice 1980, SIAM J. Sci. Stat. Comput. 1:438, for quadratic forms).
With only two values, M has a beta distribution.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

Floats = NDArray[np.float64]
_STEP, _FEW = 0.1, 20
"""Step of the trapezoidal rule, and the number of trials on either side below which it is halved, since the integrand is less
smooth."""
_NOTHING = 32.0
"""Terms smaller than the first one by a factor of exp(-32) are negligible."""
_HUGE = 1e100
"""Largest ratio of a negative value to the greatest positive one; larger ratios give the same result."""
_STEPS = 80
"""Maximum number of Newton steps to the saddle point; about six are usual."""


def probability_above(values: Floats, counts: Floats, t: float) -> float:
    """The probability P(M > t) for the Dirichlet mean M of distinct values with positive counts, float64[m] both."""
    a = values - t
    if not (a > 0).any():
        return 0.0
    if not (a < 0).any():
        return 1.0
    if float(counts @ a) > 0:  # the saddle point lies on the other side
        return 1 - _tail(-a, counts)
    return _tail(a, counts)


def dirichlet_mean_quantile(values: Floats, counts: Floats, q: float) -> float:
    """The q-quantile of a Dirichlet mean (0 < q < 1), to a millionth of its standard deviation."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low
    if values.size == 2:
        count = float(counts[values == high][0])
        return low + (high - low) * float(betaincinv(count, float(counts.sum()) - count, q))
    # Squares of tiny values would underflow to 0, so the search uses values scaled to [0, 1].
    return low + (high - low) * _unit_quantile((values - low) / (high - low), counts, q)


def _unit_quantile(values: Floats, counts: Floats, q: float) -> float:
    """The quantile like `dirichlet_mean_quantile`, for values that range from 0 to 1."""
    from scipy.optimize import brentq  # slow to load, and no campaign needs it to start

    low, high = 0.0, 1.0
    aim = 1 - q
    total = float(counts.sum())
    middle = float(counts @ values) / total
    deviation = math.sqrt(float(counts @ (values - middle) ** 2) / (total * (total + 1)))

    @cache
    def excess(t: float) -> float:
        return probability_above(values, counts, t) - aim

    inner, step = middle, float(ndtri(q)) * deviation or deviation
    outer = min(max(inner + step, low), high)
    while low < outer < high and (excess(outer) > 0) == (step > 0):  # the quantile lies further out
        inner, outer = outer, min(max(outer + step, low), high)
    if (excess(inner) > 0) != (step > 0):  # the quantile lies on the other side of the mean
        inner, outer = inner - 2 * step, inner
    edge = 1e-13
    start, end = sorted((min(max(inner, low + edge), high - edge), min(max(outer, low + edge), high - edge)))
    if excess(end) > 0:  # closer to the end than floating point can resolve
        return high
    if excess(start) < 0:
        return low
    return float(brentq(excess, start, end, xtol=1e-6 * deviation, rtol=1e-9))


def _tail(a: Floats, c: Floats) -> float:
    """The probability P(sum c_j-gamma a_j > 0), for a mean of at most 0 and some positive a_j."""
    a = np.maximum(a, -_HUGE * a.max()) / a.max()  # the scale does not matter, but powers must be finite
    s, curve = _saddle(a, c)
    scale = 1 / math.sqrt(curve)
    if min(c[a > 0].sum(), c[a < 0].sum()) >= _FEW:
        result = _integral(a, c, s, scale, 0.0, _STEP)
        assert result is not None
        return result
    # Few events among many trials: on a straight contour the integrand decreases slowly and oscillates. On a contour that bends
    # like the path of steepest descent it decreases at once, but it may grow far away; then the straight contour is used.
    bend = float(c @ (a / (1 - a * s)) ** 3 - s**-3) * scale**3 / 3
    result = _integral(a, c, s, scale, max(-1.0, min(bend, 1.0)), _STEP / 2)
    return _integral(a, c, s, scale, 0.0, _STEP / 2) or 0.0 if result is None else result


def _integral(a: Floats, c: Floats, s: float, scale: float, bend: float, step: float) -> float | None:
    """The contour integral over half a hyperbola through the saddle point; None if the integrand grows along it."""

    def exponent(t: NDArray[Any]) -> NDArray[np.complex128]:
        y, root = np.sinh(t), np.cosh(t)  # as a function of t it decreases smoothly, whether normal or a power of y
        z = s + scale * (1j * y + bend * (root - 1))
        slope = np.log(root) + np.log(1 - 1j * bend * y / root)
        result: NDArray[np.complex128] = slope - (np.log(1 - np.multiply.outer(z, a)) @ c) - np.log(z)
        return result

    nodes = step * np.arange(16.0)
    heights = exponent(nodes)
    most, least = heights[0].real + 1, heights[0].real - _NOTHING
    heights[0] -= math.log(2)
    total = 0.0
    while True:
        if bend and heights.real.max() > most:
            return None
        total += float(np.exp(heights).real.sum())
        if heights[-1].real <= least:
            return min(1.0, max(0.0, total * step * scale / math.pi))
        nodes = nodes + 16 * step
        heights = exponent(nodes)


def _saddle(a: Floats, c: Floats) -> tuple[float, float]:
    """The minimum of ``-sum c log(1 - a s) - log s`` between 0 and its pole, and the second derivative there."""
    low, high = 0.0, 1 / float(a.max())
    s = high / 2
    for _ in range(_STEPS):
        part = a / (1 - a * s)
        slope, curve = float(c @ part) - 1 / s, float(c @ part**2) + 1 / s**2
        low, high = (low, s) if slope > 0 else (s, high)
        step = s - slope / curve
        step = step if low < step < high else (low + high) / 2
        if abs(step - s) < 1e-11 * s:
            break
        s = step
    return s, curve
