"""An estimate with its limits: the record that statistics makes and reports show. Imports nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

COUNTED = "counted"
"""The method of a number without limits: nothing was estimated."""
PART_OF_LIST = "part of a list"
"""Ending of the method where limits are bounds: what the faults of the list that were not run could make of the estimate."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with two-sided limits; ``n`` counts independent trials; None where n is 0."""

    estimate: float | None
    low: float
    high: float
    confidence: float
    n: int
    method: str

    @property
    def half_width(self) -> float:
        """Half the distance between the limits: what a requested precision is compared with."""
        return (self.high - self.low) / 2

    def scaled(self, factor: float) -> Interval:
        """The interval of ``factor`` times the value."""
        estimate = None if self.estimate is None else factor * self.estimate
        return replace(self, estimate=estimate, low=factor * self.low, high=factor * self.high)


def known_value(value: float, n: int) -> Interval:
    """A number that is known, of ``n`` trials; its limits are NaN."""
    return Interval(value, math.nan, math.nan, 1.0, n, COUNTED)
