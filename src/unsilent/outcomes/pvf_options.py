"""What may be asked of stored outcomes: options of whoever reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from unsilent.errors import UsageError, unknown_name_error
from unsilent.options import CONFIDENCE, OUTPUT_PANEL, PRECISION_PANEL, Option

UNITS = ("sample", "batch")
INTERVALS = ("gaffke", "wilson")


@dataclass(frozen=True)
class PvfAnalysisOptions:
    """How stored trials are read; the same store answers any of them.

    Attributes:
        unit: None: what is usual for the campaign.
        interval: ``gaffke`` (Clopper and Pearson's where trials are right or wrong as a whole), or ``wilson`` where that
            holds: one stratum of trials that are right or wrong as a whole, enough of either.
    """

    unit: Annotated[str | None, Option(
        "Unit in which incorrect outputs are counted: sample or batch.", PRECISION_PANEL,
        default_text="sample, but batch for op:, input: and kv:")] = None  # fmt: skip
    confidence: Annotated[float, CONFIDENCE] = 0.95
    interval: Annotated[
        str,
        Option(
            "Interval method: gaffke or wilson. Rows where wilson is not valid use gaffke.",
            PRECISION_PANEL,
        ),
    ] = "gaffke"

    def __post_init__(self) -> None:
        if self.unit not in (None, *UNITS):
            raise unknown_name_error("--unit", str(self.unit), UNITS)
        if self.interval not in INTERVALS:
            raise unknown_name_error("--interval", self.interval, INTERVALS)
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"--confidence is {self.confidence}; expected a value from 0.5 to below 1, like 0.95")


@dataclass(frozen=True)
class PvfReportOptions:
    """How a result is shown."""

    fit_per_bit: Annotated[
        float | None, Option("Raw FIT (failures per 1e9 hours) of one bit of memory.", OUTPUT_PANEL)
    ] = None
