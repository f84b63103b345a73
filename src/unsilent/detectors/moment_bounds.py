"""Bounds on the moments of optimizers and on the moving statistics of normalisation layers.

He et al. (ISCA 2023, DOI 10.1145/3579371.3589105) found that latent harm of training needs a very large gradient history or
moving statistic within two iterations of the fault. Therefore each such tensor has a bound on its largest magnitude:

*analytic*: 20 sqrt(n) / m for a first moment, with n the partial sums of one weight gradient (positions times samples) and m
the batch: 20 standard deviations of a sum of n independent terms of variance 1 / m². Two implementations by others say that this
is the paper's Algorithm 1. It assumes activations and gradients of unit variance. Its square bounds second moments (a choice of
these implementations, not known to be the paper's).

*calibrated*: a factor times the largest magnitude among clean steps, from the first step on.

Bounds are two-sided (on magnitudes) and safe for NaN: a value that is not at most its bound exceeds it. This module needs only
numpy; the guard applies the bounds to a training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError

SIGMAS = 20.0
FACTOR = 100.0
FLOOR = 0.1
"""Least magnitude that bounds are based on, as a share of the largest of the same kind: a tensor of zeros may change later."""
GROWTH = 2.0
"""Largest factor by which the largest magnitude may grow in one step from which bounds are learnt."""
Floats = NDArray[np.float64]


def indices_beyond_bounds(largest: Floats, bounds: Floats) -> NDArray[np.int64]:
    """The indices of values that are NaN, negative or above their bound.

    >>> indices_beyond_bounds(np.array([1.0, np.nan, np.inf, 3.0, -1.0]), np.array([2.0, 2.0, np.inf, 2.0, 2.0])).tolist()
    [1, 3, 4]
    """
    return np.flatnonzero(~((largest <= bounds) & (largest >= 0)))


def first_moment_bounds(partial_sums: Floats, batch: int, decay: float = 0.0) -> Floats:
    """Bounds of first moments, float64[n].

    Args:
        partial_sums: Number of terms that are summed into one element of each weight's gradient.
        batch: Number of samples that the loss is averaged over.
        decay: Decay of a momentum buffer that sums gradients (SGD), and so contains up to 1 / (1 - decay) of them; 0 for averages
            (Adam).

    >>> first_moment_bounds(np.array([1024.0 * 32 * 32]), 1024).tolist()
    [20.0]
    """
    if batch < 1 or not 0 <= decay < 1:
        raise UsageError(
            f"batch is {batch} and decay is {decay}; expected a batch of 1 or more, and a decay of at least 0 and below 1"
        )
    result: Floats = SIGMAS * np.sqrt(np.asarray(partial_sums, dtype=np.float64)) / batch / (1 - decay)
    return result


def updated_magnitudes(before: Floats, now: Floats) -> Floats:
    """The largest magnitudes after one more clean step, which may increase them at most by the factor `GROWTH`.

    So an unnoticed fault (in the warm-up, or just below the bound) raises the bound at most by this factor.

    >>> updated_magnitudes(np.array([0.0, 1.0, 1.0, 1.0]), np.array([5.0, 1e6, 0.5, np.nan])).tolist()
    [5.0, 2.0, 1.0, 1.0]
    """
    most = np.where(before > 0, GROWTH * before, np.inf)
    return np.fmax(before, np.minimum(np.where(np.isnan(now), before, now), most))


@dataclass(eq=False)
class CalibratedBounds:
    """Bounds learnt from the largest magnitudes of clean steps.

    Args:
        kinds: Kind of each tensor (first moments, second moments, moving statistics …), int[n].
        factor: Factor of the bounds, see the module.

    Attributes:
        largest: Largest magnitudes so far, float64[n].
        steps_seen: Number of steps from which each bound was learnt, int[n].
    """

    kinds: NDArray[np.int64]
    factor: float = FACTOR

    def __post_init__(self) -> None:
        if not (np.isfinite(self.factor) and self.factor > 1):
            raise UsageError(f"the factor of calibrated bounds is {self.factor}; expected more than 1")
        self.largest: Floats = np.zeros(len(self.kinds))
        self.steps_seen: NDArray[np.int64] = np.zeros(len(self.kinds), dtype=np.int64)

    def learn(self, largest: Floats) -> None:
        """Learn from the largest magnitudes of a clean step; NaN for a missing tensor."""
        self.largest = updated_magnitudes(self.largest, largest)
        self.steps_seen += ~np.isnan(largest)

    @property
    def bounds(self) -> Floats:
        """The current bound of each tensor, float64[n]."""
        of_kind = np.zeros(int(self.kinds.max(initial=-1)) + 1)
        np.maximum.at(of_kind, self.kinds, self.largest)
        result: Floats = self.factor * np.maximum(self.largest, FLOOR * of_kind[self.kinds])
        return result
