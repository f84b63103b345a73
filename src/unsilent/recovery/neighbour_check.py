"""Check that a rank computes the same results as its neighbour when it executes the neighbour's batch.

A step may use data outside of its batch, for example if a loader yields indices of samples and each rank looks them up in its own
part of the data. The neighbour then executes other data, so the absence of an alarm proves nothing. Therefore the iterations
before the first faulty one are compared: the loss and the gradients from before any reduction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Signals = NDArray[np.float64]
AGREEMENT = 0.01
"""Largest difference, as a share of the larger number, that different rounding on two device models may cause."""
NOISE = 1e-6
"""Smallest tolerance, as a share of an iteration's largest number: a gradient that is zero except for rounding varies."""
NO_EARLIER_STEP = (
    "no earlier step of the replay shows that another rank computes the same from a batch as the rank that it is of"
)
SAME_BATCHES = "the ranks computed the same in an earlier step, so that nothing shows that the batch alone decides"
DATA_ELSEWHERE = (
    "in an earlier step of the replay another rank computed other values from a batch than the rank that it is of: the step "
    "takes data from elsewhere than its batch, or a device computes wrongly"
)


class Findings(NamedTuple):
    """Findings of one execution of some iterations; only the signals differ between ranks.

    Attributes:
        ranks: Ranks with a finding in the first iteration that has one; those in what ranks do not share, if any.
        are_own: Whether none of the findings of that iteration is in what ranks share.
        clean: Number of iterations before it; all iterations if there is no finding.
        signals: float64[iterations, series] of this rank: the loss and gradients from before any reduction; NaN: not read.
        original: Signals of the job itself, before the step of the alarm; NaN from there on.
    """

    ranks: frozenset[int]
    are_own: bool
    clean: int
    signals: Signals
    original: Signals

    def usual(self) -> Signals:
        """The signals that this rank computed from its own batches, without effects of a fault."""
        result = self.signals.copy()
        result[self.clean :] = np.nan
        rows = min(len(result), len(self.original))
        known = np.isfinite(self.original[:rows])
        result[:rows][known] = self.original[:rows][known]
        return result


class Comparison(NamedTuple):
    """Result of comparing a rank with the neighbour that executed its batch.

    Attributes:
        problem: Reason why this is not evidence; empty if it is.
        iteration: Number of the compared iteration, from 0; -1: none.
    """

    problem: str
    iteration: int = -1


def compare(near: Signals, original: Signals, usual: Signals) -> Comparison:
    """Compare the first iteration with all numbers known; later ones may contain effects of the fault.

    Args:
        near: Signals of this rank with the batches of the previous rank, float64[iterations, series].
        original: Signals of the previous rank, with the same batches.
        usual: Signals of this rank with its own batches.
    """
    if near.shape[1:] != original.shape[1:] or near.shape[1:] != usual.shape[1:]:
        return Comparison(DATA_ELSEWHERE)
    for number, (row_near, row_original, row_usual) in enumerate(zip(near, original, usual, strict=False)):
        is_alike, is_same = _are_alike(row_near, row_original), _are_alike(row_usual, row_original)
        if is_alike is None or is_same is None:
            continue
        return Comparison("" if is_alike and not is_same else SAME_BATCHES if is_alike else DATA_ELSEWHERE, number)
    return Comparison(NO_EARLIER_STEP)


def _are_alike(first: Signals, second: Signals) -> bool | None:
    """Whether all numbers known in both agree; None if there are none."""
    are_known = np.isfinite(first) & np.isfinite(second)
    if not are_known.any():
        return None
    first, second = first[are_known], second[are_known]
    sizes: NDArray[Any] = np.maximum(np.abs(first), np.abs(second))
    return bool((np.abs(first - second) <= np.maximum(AGREEMENT * sizes, NOISE * sizes.max())).all())
