"""An estimate with its limits: the record that statistics makes and reports show. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


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
