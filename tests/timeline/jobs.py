"""Small jobs for tests: built by hand, or drawn at random with the times that the obvious replay gives them."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from oracles.replay_oracle import replay
from unsilent.timeline.job import CHAIN, COLLECTIVE, COMPUTE, FORWARD, PIPELINE, Edges, Job, Lane, Operations


def make_job(
    start, duration, *, edges=(), collective=None, step=None, rank=None, name=None, names=("a", "b"), stages=None
):
    """A job of operations in lanes of their own; ``edges``: source, target, kind."""
    n = len(start)
    rank = np.zeros(n, np.int32) if rank is None else np.asarray(rank, np.int32)
    collective = np.full(n, -1, np.int32) if collective is None else np.asarray(collective, np.int32)
    source, target, kind = zip(*edges, strict=True) if edges else ((), (), ())
    steps = np.zeros(n, np.int32) if step is None else np.asarray(step, np.int32)
    operations = Operations(
        rank, np.arange(n, dtype=np.int32), np.zeros(n, np.int32) if name is None else np.asarray(name, np.int32),
        np.where(collective < 0, COMPUTE, COLLECTIVE).astype(np.int8), np.full(n, FORWARD, np.int8), steps,
        np.asarray(start, np.float64), np.asarray(duration, np.float64), collective, np.full(n, -1),
        np.full(n, -1, np.int8), names,
    )  # fmt: skip
    lanes = tuple(Lane(int(r), f"thread {i}", False) for i, r in enumerate(rank))
    job_edges = Edges(np.array(source, np.int32), np.array(target, np.int32), np.array(kind, np.int8))
    return Job(operations, job_edges, lanes, tuple(range(int(steps.max()) + 1)), stages or {}, len(set(rank.tolist())))


class Drawn(NamedTuple):
    """A job, and the arguments that the obvious replay takes for it."""

    job: Job
    predecessors: list[list[int]]
    collective: list[int]
    durations: list[float]
    gaps: list[float]
    release: list[float]


eighths = st.integers(0, 80).map(lambda k: k / 8)
"""Seconds that are added without rounding."""


@st.composite
def drawn_jobs(draw):
    """Operations in layers: they depend on those of earlier layers, and are in collectives with those of their own."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    layer = [at for at, size in enumerate(sizes) for _ in range(size)]
    n, bounds = len(layer), np.concatenate([[0], np.cumsum(sizes)])
    predecessors = [
        sorted(draw(st.sets(st.integers(0, int(bounds[at]) - 1), max_size=3))) if at else [] for at in layer
    ]
    collective = [draw(st.sampled_from([-1, 2 * at, 2 * at + 1])) for at in layer]
    values = lambda: draw(st.lists(eighths, min_size=n, max_size=n))  # noqa: E731
    durations, gaps, split = values(), values(), draw(st.integers(0, len(sizes) - 1))
    step = [int(at > split) for at in layer]
    rank = [i % 3 for i in range(n)]
    depends = any(step[p] < step[i] for i, ps in enumerate(predecessors) for p in ps)
    # Whoever waits for nothing begins with its step, which begins when its first operation does: of its rank where a step
    # depends on another one.
    parts = [(of, number if depends else 0) for of, number in zip(step, rank, strict=True)]
    release = [0.0] * n
    for _ in range(2):
        starts, ends = replay(predecessors, collective, durations, gaps, release)
        begins = {s: min(start for start, of in zip(starts, parts, strict=True) if of == s) for s in set(parts)}
        release = [begins[s] for s in parts]
    measured = [
        s - (max(ends[p] for p in ps) if ps else r) for s, ps, r in zip(starts, predecessors, release, strict=True)
    ]
    edges = [(p, i, (CHAIN, PIPELINE)[(p + i) % 2]) for i, ps in enumerate(predecessors) for p in ps]
    recorded = np.subtract(ends, starts)
    job = make_job(starts, recorded, edges=edges, collective=collective, step=step, rank=rank)
    return Drawn(job, predecessors, collective, durations, measured, release)


def two_ranks():
    """Rank 1 computes 4 s, rank 0 only 1 s, then both reduce for 1 s; the second step begins where the first one ends."""
    start, duration, step = [], [], []
    for begin in (0.0, 5.0):
        start += [begin, begin + 1, begin, begin + 4]
        duration += [1, 4, 4, 1]
        step += [len(start) // 4 - 1] * 4
    edges = [(at, at + 1, CHAIN) for at, _ in pairwise(range(8)) if at % 2 == 0]
    collective = [-1, 0, -1, 0, -1, 1, -1, 1]
    return make_job(
        start, duration, edges=edges, collective=collective, step=step, rank=[0, 0, 1, 1] * 2, name=[0, 1] * 4
    )
