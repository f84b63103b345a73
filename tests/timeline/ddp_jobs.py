"""Recorded jobs of data-parallel trainings, made up: every operation is where a simple simulation puts it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unsilent.timeline.job import (
    BACKWARD,
    CHAIN,
    COLLECTIVE,
    COMPUTE,
    FORWARD,
    LAUNCH,
    LOADER,
    OPTIMIZER,
    WAIT,
    Edges,
    Job,
    Lane,
    Operations,
)

NAMES = ("loader", "forward", "backward", "all_reduce", "optimizer")
LENGTHS = {"loader": 0.010, "forward": 0.030, "early backward": 0.025, "late backward": 0.040, "optimizer": 0.008}
TRANSFER = 0.006


def ddp_job(
    ranks: int,
    steps: int,
    *,
    late: Mapping[tuple[int, str], float] | None = None,
    noise: float = 0.0,
    seed: int = 0,
    transfer: float = TRANSFER,
) -> Job:
    """Each rank loads, computes, launches a collective in the middle and one at the end of its backward pass, waits, and updates.

    Args:
        late: Seconds by which a part of a rank's step is longer.
        noise: Relative standard deviation of all durations.
    """
    generator = np.random.default_rng(seed)
    rows: list[tuple[int, int, int, int, int, int, float, float, int]] = []
    edges: list[tuple[int, int, int]] = []
    clock, previous = np.zeros(ranks), np.full(ranks, -1)
    for step in range(steps):
        lengths = {
            (rank, part): length * max(0.1, 1 + noise * generator.standard_normal())
            + (late or {}).get((rank, part), 0.0)
            for rank in range(ranks)
            for part, length in LENGTHS.items()
        }
        launched = np.zeros((ranks, 2))
        sources = np.zeros((ranks, 2), int)
        parts = (
            ("loader", LOADER, 0),
            ("forward", FORWARD, 1),
            ("early backward", BACKWARD, 2),
            ("late backward", BACKWARD, 2),
        )
        for rank in range(ranks):
            for part, phase, name in parts:
                length = lengths[rank, part]
                rows.append((rank, 2 * rank, name, COMPUTE, phase, step, clock[rank], length, -1))
                if previous[rank] >= 0:
                    edges.append((previous[rank], len(rows) - 1, CHAIN))
                previous[rank] = len(rows) - 1
                clock[rank] += length
                if phase == BACKWARD:
                    bucket = int(part.startswith("late"))
                    rows.append((rank, 2 * rank, 2, COMPUTE, BACKWARD, step, clock[rank], 1e-5, -1))
                    edges.append((previous[rank], len(rows) - 1, CHAIN))
                    previous[rank] = sources[rank, bucket] = len(rows) - 1
                    clock[rank] += 1e-5
                    launched[rank, bucket] = clock[rank]
        ends = np.zeros(ranks)
        for bucket in range(2):
            entered = np.maximum(launched[:, bucket], ends)
            ends = np.full(ranks, entered.max() + transfer)
            for rank in range(ranks):
                length = ends[rank] - entered[rank]
                rows.append(
                    (rank, 2 * rank + 1, 3, COLLECTIVE, BACKWARD, step, entered[rank], length, 2 * step + bucket)
                )
                edges.append((sources[rank, bucket], len(rows) - 1, LAUNCH))
                if bucket:
                    edges.append((len(rows) - 1 - ranks, len(rows) - 1, CHAIN))
        for rank in range(ranks):
            clock[rank] = max(clock[rank], ends[rank])
            length = lengths[rank, "optimizer"]
            rows.append((rank, 2 * rank, 4, COMPUTE, OPTIMIZER, step, clock[rank], length, -1))
            edges += [(previous[rank], len(rows) - 1, CHAIN), (len(rows) - 1 - ranks, len(rows) - 1, WAIT)]
            previous[rank] = len(rows) - 1
            clock[rank] += length
    return _as_job(rows, edges, ranks, steps)


def _as_job(rows: list[tuple[int, int, int, int, int, int, float, float, int]], edges: list[tuple[int, int, int]],
            ranks: int, steps: int) -> Job:  # fmt: skip
    rank, lane, name, kind, phase, step, start, duration, collective = (
        np.array(part) for part in zip(*rows, strict=True)
    )
    order = np.lexsort((start, rank))
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order))
    operations = Operations(
        rank[order].astype(np.int32), lane[order].astype(np.int32), name[order].astype(np.int32), kind[order].astype(np.int8),
        phase[order].astype(np.int8), step[order].astype(np.int32), start[order], duration[order],
        collective[order].astype(np.int32), np.where(collective[order] >= 0, 1 << 20, -1),
        np.where(collective[order] >= 0, 4, -1).astype(np.int8), NAMES,
    )  # fmt: skip
    source, target, why = np.array(edges).T
    lanes = tuple(Lane(number // 2, "stream" if number % 2 else "main", False) for number in range(2 * ranks))
    return Job(
        operations, Edges(place[source], place[target], why.astype(np.int8)), lanes, tuple(range(steps)), {}, ranks
    )
