"""The choice of the engine for a campaign.

The choice changes the cost of a result, never the result.
"""

from __future__ import annotations

from unsilent.basics.errors import unknown_name_error
from unsilent.engine.cached import CachedEngine
from unsilent.engine.graphed import GraphedEngine
from unsilent.engine.plain import PlainEngine
from unsilent.outcomes.base import Judge
from unsilent.outcomes.scores import Score
from unsilent.workloads.base import InferenceWorkload

ENGINES = ("auto", "plain")


def make_engine(
    workload: InferenceWorkload,
    *,
    engine: str = "auto",
    memory: int | None = None,
    worker_count: int = 1,
    device: str = "cpu",
    dtype: str | None = None,
    judge: Judge | None = None,
    score: Score | None = None,
    sampled: bool = False,
) -> PlainEngine:
    """The engine that evaluates the workload in a campaign.

    ``engine``: ``auto`` uses every shortcut that passes its checks, ``plain`` uses none.

    Args:
        memory: Bytes for golden values; default: a quarter of the free memory.
        worker_count: Number of processes that share the memory.
        score: Score of faulty outputs, besides the judge.
        sampled: Whether trials will be evaluated on some samples of a batch.

    Raises:
        UsageError: errors of `PlainEngine`; an unknown engine; a memory budget below the minimum.
    """
    if engine not in ENGINES:
        raise unknown_name_error("--engine", engine, ENGINES)
    if engine == "plain":
        return PlainEngine(workload, device=device, dtype=dtype, judge=judge, score=score)
    engine_class = GraphedEngine if device.startswith("cuda") else CachedEngine
    return engine_class(
        workload,
        device=device,
        dtype=dtype,
        judge=judge,
        score=score,
        memory=memory,
        worker_count=worker_count,
        sampled=sampled,
    )
