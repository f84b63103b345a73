"""What may be asked of stored outcomes: options of whoever reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from unsilent.errors import UsageError, unknown
from unsilent.options import CONFIDENCE, PRECISION, Option

UNITS = ("sample", "batch")
INTERVALS = ("clopper-pearson", "wilson")


@dataclass(frozen=True)
class PvfReading:
    """How stored trials are read; the same store answers any of them.

    Attributes:
        unit: None: what is usual for the campaign. interval: ``clopper-pearson`` (its generalisation where one fault is scored
            on many samples, and for strata), or ``wilson`` where that holds: one stratum of trials that are right or wrong as a
            whole, enough of either.
    """

    unit: Annotated[str | None, Option(
        "What an incorrect output is counted on: sample or batch.", PRECISION,
        usual="sample; batch for op:, input: and kv:")] = None  # fmt: skip
    confidence: Annotated[float, CONFIDENCE] = 0.95
    interval: Annotated[str, Option("clopper-pearson, or wilson where that holds.", PRECISION)] = "clopper-pearson"

    def __post_init__(self) -> None:
        if self.unit not in (None, *UNITS):
            raise unknown("--unit", str(self.unit), UNITS)
        if self.interval not in INTERVALS:
            raise unknown("--interval", self.interval, INTERVALS)
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"--confidence is {self.confidence}; expected a value from 0.5 to below 1, like 0.95")
