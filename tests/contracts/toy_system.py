"""A system without a campaign, as small as can be: a number whose bits flip. The page on architecture shows this code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from unsilent.basics.options import FAULTS_PANEL, WORKLOAD_PANEL, Option, Request, check_count
from unsilent.command import EXPLAIN, Command
from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown


@dataclass(frozen=True)
class FlipOptions:
    """Which bits of which number are flipped."""

    number: Annotated[
        float, Option("A number.", WORKLOAD_PANEL, missing_error="no number was given; give one, like 0.5")
    ]
    bits: Annotated[tuple[int, ...], Option("Bits, each flipped alone.", FAULTS_PANEL, separator=",")] = (31,)

    def __post_init__(self) -> None:
        for bit in self.bits:
            check_count("--bits", bit, 0, 31)


@dataclass(frozen=True, repr=False)
class Flips(Shown):
    """A float32 number after each flip, by bit."""

    number: float
    values: dict[int, float]

    def report(self) -> Report:
        """A row for each bit."""
        rows = [{"bit": bit, "value": value} for bit, value in self.values.items()]
        table = Table.of(rows, (Column.count("bit"), Column("value", "number")))
        largest = max(abs(value) for value in self.values.values())
        headline = f"The largest magnitude after a flip is {largest:.3g}"
        section = Section("Flips", "One bit is flipped at a time.", (table,))
        return Report("unsilent/flips/1", "flips", f"Flips of {self.number:g}", headline, table, sections=(section,))


def flip(request: Request) -> Flips:
    """Show what a float32 number becomes when one of its bits flips."""
    options = request[FlipOptions]
    word = np.float32(options.number).view(np.uint32)
    return Flips(options.number, {bit: float((word ^ np.uint32(1 << bit)).view(np.float32)) for bit in options.bits})


COMMAND = Command("flips", EXPLAIN, "unsilent flips 0.5 --bits 30,31", (FlipOptions,), flip, has_report=True)
