"""Options for the analysis and display of stored outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from unsilent.basics.errors import unknown_name_error
from unsilent.basics.options import CONFIDENCE, OUTPUT_PANEL, PRECISION_PANEL, Option, check_confidence

UNITS = ("sample", "batch")


@dataclass(frozen=True)
class PvfAnalysisOptions:
    """Options for the analysis of stored trials; one store can be analysed with any of them.

    Attributes:
        unit: ``sample`` or ``batch``; None for the default of the campaign.
    """

    unit: Annotated[str | None, Option(
        "Unit in which incorrect outputs are counted: sample or batch.", PRECISION_PANEL,
        default_text="sample, but batch for op:, input: and kv:")] = None  # fmt: skip
    confidence: Annotated[float, CONFIDENCE] = 0.95

    def __post_init__(self) -> None:
        if self.unit not in (None, *UNITS):
            raise unknown_name_error("--unit", str(self.unit), UNITS)
        check_confidence(self.confidence)


@dataclass(frozen=True)
class PvfReportOptions:
    """Options for the display of a result."""

    fit_per_bit: Annotated[
        float | None, Option("Raw FIT (failures per 1e9 hours) of one bit of memory.", OUTPUT_PANEL)
    ] = None
