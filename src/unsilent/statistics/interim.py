"""Interim looks at a running campaign that may stop it, each with a share of the error level.

A row's trials grow from look to look by a fixed factor, and the interval of look ``i`` has confidence ``1 - alpha * share(i)``
with ``sum share(i) = 1``: the chance that any look misses is at most alpha (Bonferroni over an endless series of looks, so
that a budget can be raised whenever one likes). The first look has most of it, since the plan is made so that it suffices.
"""

from __future__ import annotations

import math

FIRST = 0.5
"""Share of the error that the first look may make. With more of it the first look needs fewer trials (a tenth fewer at three
quarters), but a campaign that goes on needs far more."""
GROWTH = 1.5
"""Trials of a look relative to the one before."""


def error_share(look: int) -> float:
    """Share of alpha for look 0, 1, 2 …; the shares of all looks sum to 1."""
    return FIRST if look == 0 else (1 - FIRST) / (look * (look + 1))


def confidence_at(look: int, confidence: float) -> float:
    """Confidence of the interval at one look, so that all looks together reach ``confidence``."""
    return 1 - (1 - confidence) * error_share(look)


def size_at(look: int, first: int) -> int:
    """Number of trials at a look, for a stratum with ``first`` trials at look 0."""
    return math.ceil(first * GROWTH**look)
