"""The recorded collectives that carry the gradients of a training under DDP, and their buckets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.sizes import human_bytes
from unsilent.timeline.job import BACKWARD, COLLECTIVE, Job

_ALL_REDUCE = re.compile("all_?reduce", re.IGNORECASE)


class RecordedBuckets(NamedTuple):
    """The gradient buckets of a recorded training, equal in all steps and ranks.

    Attributes:
        gradients: Gradients of each bucket; indices in the order in which they are ready.
        carries: Whether an operation carries a bucket, bool[operations].
        item_bytes: Bytes of one number when sent; -1: unknown.
    """

    gradients: list[list[int]]
    carries: NDArray[np.bool_]
    item_bytes: int


def recorded_buckets(job: Job, sizes: NDArray[np.int64]) -> RecordedBuckets:
    """The buckets of DDP, found as the all-reduces of backward passes that carry whole gradients.

    All-reduces that carry no whole gradients are left out. Buckets are in the order in which gradients are ready.

    Args:
        job: Job on one clock.
        sizes: Bytes of each gradient, in the order in which they are ready.

    Raises:
        UsageError: Gradients are left over, for example because a communication hook sends something else, or buckets differ
            between steps.
    """
    operations, carries = job.operations, np.zeros(len(job.operations), bool)
    reduces = np.array([bool(_ALL_REDUCE.search(name)) for name in operations.names], bool)[operations.name]
    reduces &= (operations.kind == COLLECTIVE) & (operations.phase == BACKWARD) & (operations.collective >= 0)
    reductions = np.flatnonzero(reduces & (operations.step >= 0))
    reductions = reductions[
        np.lexsort((operations.collective[reductions], operations.step[reductions], operations.rank[reductions]))
    ]
    passes = operations.rank[reductions].astype(np.int64) * len(job.steps) + operations.step[reductions]
    bounds = np.searchsorted(
        passes, [rank * len(job.steps) + step for rank in job.ranks for step in range(len(job.steps))]
    )
    every = []
    for begin, end in pairwise([*bounds.tolist(), len(reductions)]):
        of_pass = reductions[begin:end]
        buckets, places = _whole_gradients(operations.size[of_pass].tolist(), sizes)
        if sum(map(len, buckets)) < len(sizes):
            carried, whole = human_bytes(int(operations.size[of_pass].sum())), human_bytes(int(sizes.sum()))
            raise UsageError(
                f"a backward pass has {whole} of gradients, and its all-reduces that all ranks show carry {carried}, which "
                "cannot be buckets of these gradients; record without a communication hook, without parameters that get no "
                "gradient, and without other all-reduces in the backward pass"
            )
        every.append(buckets)
        carries[of_pass[places]] = True
    if any(buckets != every[0] for buckets in every):
        raise UsageError("DDP's buckets differ between steps; record later steps, with a larger --warmup")
    widths = np.unique(operations.item_bytes[carries])
    return RecordedBuckets(every[0], carries, int(widths[0]) if len(widths) == 1 else -1)


def _whole_gradients(carried: Sequence[int], sizes: NDArray[np.int64]) -> tuple[list[list[int]], list[int]]:
    """The gradients in each bucket, and the positions of the collectives that carry them."""
    place_of_end = {int(end): number + 1 for number, end in enumerate(np.cumsum(sizes))}
    buckets, places, left, sent, first = list[list[int]](), list[int](), list(range(len(carried))), 0, 0
    # gloo begins two at once, sometimes the later one first
    while (
        place := next(
            (reduction for reduction in left if carried[reduction] > 0 and sent + carried[reduction] in place_of_end),
            None,
        )
    ) is not None:
        sent += carried[place]
        buckets.append(list(range(first, place_of_end[sent])))
        places.append(place)
        left.remove(place)
        first = place_of_end[sent]
    return buckets, places
