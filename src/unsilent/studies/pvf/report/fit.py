"""Failures in time: raw FIT per bit x bits x PVF, with the limits of the PVF.

FIT is failures per 10^9 hours. The product is the rate of single-bit faults after which an output (of the
study's unit) would be wrong. It needs PVF of what the raw rate counts: one flip, of any bit of memory that stays
(what a run computes is there for a moment only), every bit equally likely. A PVF over elements is that only where
all elements have one width: elsewhere there is no FIT, and the reason instead. The raw rate is the reader's and taken
as exact: its own uncertainty, which is often larger, is not in the limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unsilent.errors import UsageError
from unsilent.report.text import Shown, clean, shown
from unsilent.studies.pvf.records import PvfResult, PvfRow
from unsilent.studies.pvf.report.rows import at_level, main_level

NEEDS = "FIT needs PVF of single flips of any bit of parameters, drawn per element (--fault bitflip --flips 1 --law per-element)"
MIXED = "mixed element widths"
ONE_WIDTH = 0.99
"""Share of the bits that must belong to elements of one width; the error of FIT stays below the rest."""


@dataclass(frozen=True, slots=True)
class FitRow:
    """FIT of one target; ``raw`` is the rate of faults before anything is masked, ``reason`` why there is no FIT."""

    row: PvfRow
    raw: float
    estimate: float | None
    low: float | None
    high: float | None
    reason: str = ""

    @property
    def text(self) -> Shown:
        """FIT and its limits as text."""
        if self.low is None or self.high is None:
            return Shown("–", "–", "–")
        return shown(self.estimate, self.low, self.high, scale=1.0)


def check_rate(fit_per_bit: float, transient: bool = False) -> float:
    """Return the rate if it is one and there is memory it speaks of; raises ``UsageError`` otherwise.

    ``transient``: faults are injected into values of a run.
    """
    if not (math.isfinite(fit_per_bit) and fit_per_bit >= 0):
        raise UsageError(f"--fit-per-bit is {fit_per_bit!r}; expected failures per 1e9 hours and bit, 0 or more")
    if transient:
        raise UsageError(
            "no FIT: values of a run have no rate per bit of memory; leave --fit-per-bit out or use --at 'param:*'"
        )
    return fit_per_bit


def fit_of(row: PvfRow, fit_per_bit: float) -> FitRow:
    """FIT of one row: each of its numbers times rate x bits."""
    raw = fit_per_bit * row.bits
    if row.width_share < ONE_WIDTH:
        return FitRow(row, raw, None, None, None, MIXED)
    return FitRow(row, raw, None if row.estimate is None else raw * row.estimate, raw * row.low, raw * row.high)


def fit_rows(result: PvfResult, fit_per_bit: float) -> tuple[FitRow, ...]:
    """Rows of the main level at one flip, then the model; empty where a raw rate cannot be multiplied with what was measured.

    Largest FIT first. Where nothing went wrong the upper limit ranks: a large part that might dominate
    stays visible.
    """
    check_rate(fit_per_bit)
    if result.transient or result.fault != "bitflip" or result.law != "per-element":
        return ()
    level = main_level(result)
    single = [row for row in result.rows if row.flips == 1]
    parts = [fit_of(row, fit_per_bit) for row in at_level(single, level) if level != "model"]
    parts.sort(key=lambda f: -1.0 if f.high is None else f.estimate or f.high, reverse=True)
    return (*parts, *(fit_of(row, fit_per_bit) for row in at_level(single, "model")))


def surprise(rows: Sequence[FitRow]) -> str:
    """Says where size beats vulnerability: most FIT and highest PVF are two targets and their joint limits separate."""
    parts = [f for f in rows if f.row.level != "model" and f.estimate is not None]
    if len(parts) < 2:
        return ""
    most = max(parts, key=lambda f: f.estimate or 0.0)
    worst = max(parts, key=lambda f: (f.row.estimate or 0.0, f.row.high))
    more = most.raw * most.row.joint_low > worst.raw * worst.row.joint_high
    if most.row.target == worst.row.target or not more or most.row.joint_high >= worst.row.joint_low:
        return ""
    return (
        f"{clean(most.row.target)} has more FIT than {clean(worst.row.target)} although its PVF is lower: "
        f"it holds {most.row.bits / max(worst.row.bits, 1):,.0f} times as many bits."
    )
