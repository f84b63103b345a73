"""Interim looks at a running campaign that may stop it, each with a share of the error level.

The number of trials of a row grows from look to look by a fixed factor. The interval of look ``i`` has confidence ``1 - alpha *
share(i)`` with ``sum share(i) = 1``, so the probability that any interval misses the true value is at most alpha (Bonferroni
over an infinite series of looks, so a budget can be raised at any time). The first look has the largest share, since the plan is
made so that it suffices.
"""

from __future__ import annotations

import math

FIRST = 0.5
"""Share of the error level for the first look. With a larger share the first look needs fewer trials (a tenth fewer at three
quarters), but a campaign that continues needs many more."""
GROWTH = 1.5
"""Ratio of the number of trials at a look to the number at the previous look."""


def error_share(look: int) -> float:
    """Share of alpha for look 0, 1, 2 …; the shares of all looks sum to 1."""
    return FIRST if look == 0 else (1 - FIRST) / (look * (look + 1))


def confidence_at(look: int, confidence: float) -> float:
    """Confidence of the interval at one look, so that all looks together reach ``confidence``."""
    return 1 - (1 - confidence) * error_share(look)


def size_at(look: int, first: int) -> int:
    """Number of trials at a look, for a stratum with ``first`` trials at look 0."""
    return math.ceil(first * GROWTH**look)
