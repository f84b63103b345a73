"""Whether a neighbour that executed the batch of another rank computed what that rank computes from it.

A step may take data from elsewhere than its batch, as where a loader yields numbers of samples and each rank looks them up in a
part of the data of its own. The neighbour then executes other data, and that it has no alarm says nothing. So the iterations
before the first faulty one are compared: the loss and the gradients from before any reduction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Signals = NDArray[np.float64]
AGREEMENT = 0.01
"""Of the larger one: two device models round otherwise, but do not come to numbers that lie further apart."""
NOISE = 1e-6
"""Of the largest number of an iteration: a gradient that is zero but for rounding has other numbers each time."""
NO_EARLIER_STEP = (
    "no earlier step of the replay shows that another rank computes the same from a batch as the rank that it is of"
)
SAME_BATCHES = "the ranks computed the same in the earlier steps, so that nothing shows that the batch alone decides"
DATA_ELSEWHERE = (
    "in an earlier step of the replay another rank computed other values from a batch than the rank that it is of: the step "
    "takes data from elsewhere than its batch, or a device computes wrongly"
)


class Findings(NamedTuple):
    """What was found in one execution of some iterations; all but the signals are the same in every rank.

    Attributes:
        ranks: With a finding in the first iteration that has one. Where some of these are in what ranks do not share: those.
        are_own: Whether none of the findings of that iteration is in what ranks share.
        clean: Iterations before it; all where nothing was found.
        signals: float64[iterations, series] of this rank: the loss and gradients from before any reduction; NaN: not read.
    """

    ranks: frozenset[int]
    are_own: bool
    clean: int
    signals: Signals


class Comparison(NamedTuple):
    """What one rank says of a batch that it executed for the rank before.

    Attributes:
        problem: Why this is no evidence; empty where it is.
        iterations: That were compared.
        are_told_apart: Whether this rank computed something else from its own batch in one of them.
    """

    problem: str
    iterations: int
    are_told_apart: bool


def compare(near: Signals, theirs: Signals, own: Signals) -> Comparison:
    """Compare iterations before the first faulty one, each float64[iterations, series].

    Args:
        near: Of this rank with the batches of the rank before.
        theirs: Of the rank before, with the same batches.
        own: Of this rank with batches of its own.
    """
    if near.shape[1:] != theirs.shape[1:] or near.shape[1:] != own.shape[1:]:
        return Comparison(DATA_ELSEWHERE, 0, False)
    rows = list(zip(near, theirs, own, strict=False))
    alike = [known for one, other, _ in rows if (known := _are_alike(one, other)) is not None]
    if not all(alike):
        return Comparison(DATA_ELSEWHERE, len(alike), False)
    is_told_apart = any(_are_alike(mine, other) is False for _, other, mine in rows)
    return Comparison("" if alike else NO_EARLIER_STEP, len(alike), is_told_apart)


def _are_alike(one: Signals, other: Signals) -> bool | None:
    """Whether all numbers that both have agree; None where there are none."""
    are_known = np.isfinite(one) & np.isfinite(other)
    if not are_known.any():
        return None
    one, other = one[are_known], other[are_known]
    sizes: NDArray[Any] = np.maximum(np.abs(one), np.abs(other))
    return bool((np.abs(one - other) <= np.maximum(AGREEMENT * sizes, NOISE * sizes.max())).all())
