"""Operations of jobs that are made by hand."""

from __future__ import annotations

import numpy as np

from unsilent.timeline.job import COLLECTIVE, COMPUTE, OTHER, Operations


def operations(rows, names=("compute", "gloo:all_reduce")):
    """Operations of rows (rank, lane, start, end, collective), in their order; those with a collective have the second name."""
    rank, lane, start, end, collective = (np.array(column) for column in zip(*rows, strict=True))
    is_collective = collective >= 0
    count = len(rows)
    return Operations(
        rank=rank.astype(np.int32),
        lane=lane.astype(np.int32),
        name=is_collective.astype(np.int32),
        kind=np.where(is_collective, COLLECTIVE, COMPUTE).astype(np.int8),
        phase=np.full(count, OTHER, np.int8),
        step=np.zeros(count, np.int32),
        start=start.astype(np.float64),
        duration=(end - start).astype(np.float64),
        collective=collective.astype(np.int32),
        size=np.full(count, -1, np.int64),
        item_bytes=np.full(count, -1, np.int8),
        names=names,
    )
