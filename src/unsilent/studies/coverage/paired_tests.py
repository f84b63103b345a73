"""Compares two detectors on the same faults: the difference of their shares, and an exact sign test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr

from unsilent.basics.interval import Interval
from unsilent.statistics.comparing import holm, paired


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference between two detectors on the same faults.

    Attributes:
        difference: Difference of the shares of detected faults.
        only_one, only_other: Number of faults that the first, or the second, detector detected more often.
        p_value: P value of McNemar's exact test, adjusted by Holm over all comparisons.
    """

    difference: Interval
    only_one: int
    only_other: int
    p_value: float


def paired_differences(gaps: Sequence[NDArray[Any]], confidence: float) -> list[PairedDifference]:
    """The tested difference of each comparison, from per-fault differences between -1 and 1."""
    counts = [(int((gap > 0).sum()), int((gap < 0).sum())) for gap in gaps]
    adjusted = holm([mcnemar_p_value(*pair) for pair in counts])
    return [
        PairedDifference(paired(np.asarray(gap), confidence), *pair, p)
        for gap, pair, p in zip(gaps, counts, adjusted, strict=True)
    ]


def mcnemar_p_value(first: int, second: int) -> float:
    """The exact two-sided p value of McNemar's test.

    >>> mcnemar_p_value(5, 0)
    0.0625
    """
    return min(1.0, 2 * float(bdtr(min(first, second), first + second, 0.5)))
