"""An estimate with its confidence limits. Imports nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

COUNTED = "counted"
"""Method of a known number, which has no limits because it is not an estimate."""
PART_OF_LIST = "part of a list"
"""Ending of the method if the limits are bounds: the range of the estimate for all possible outcomes of the faults in the list
that were not run."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with two-sided confidence limits; ``n`` is the number of independent trials.

    The estimate is None if there is no trial.
    """

    estimate: float | None
    low: float
    high: float
    confidence: float
    n: int
    method: str

    @property
    def half_width(self) -> float:
        """Half the distance between the limits, for comparison with a requested precision."""
        return (self.high - self.low) / 2

    def scaled(self, factor: float) -> Interval:
        """The interval of ``factor`` times the value."""
        estimate = None if self.estimate is None else factor * self.estimate
        return replace(self, estimate=estimate, low=factor * self.low, high=factor * self.high)


def known_value(value: float, n: int) -> Interval:
    """An exactly known number of ``n`` trials as an interval; its limits are NaN."""
    return Interval(value, math.nan, math.nan, 1.0, n, COUNTED)
