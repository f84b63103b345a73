"""Compares how often two models fail at the same fault rate per bit: PVF times bits.

A model with half the bits is hit half as often, so the model with the higher PVF may fail less often. The ratio of the PVF of two
rows, times the ratio of their bits, is the ratio of their failure rates (FIT) at any raw rate. Its limits are those of the ratio
of PVF times the ratio of bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from unsilent.basics.interval import Interval
from unsilent.report.model import Column, Section, Table
from unsilent.report.text import EstimateText, escape_unprintable, listed, ratio_text
from unsilent.studies.pvf.analysis import MIXED_WIDTHS_REASON, ONE_WIDTH, make_fit_row
from unsilent.studies.pvf.comparison import ComparedRow, Comparison
from unsilent.studies.pvf.records import PvfResult, PvfRow, at_level, main_level, row_label

NOT_ESTABLISHED = "which of them fails more often is not established"


@dataclass(frozen=True)
class FailureRates:
    """The ratio of the failure rates of one target, B / A, with its compared PVF row."""

    row: ComparedRow
    ratio: Interval

    @property
    def direction(self) -> str:
        """Whether B fails ``more`` or ``less`` often than A; empty if no difference is shown."""
        return "more" if self.ratio.low > 1 else "less" if self.ratio.high < 1 else ""

    @property
    def text(self) -> EstimateText:
        """The ratio and its limits as text."""
        return ratio_text(self.ratio)


def has_failure_rates(result: PvfResult) -> bool:
    """Whether a fault rate per bit can be multiplied with the measured PVF.

    It can for bit flips in parameters that are drawn per element.
    """
    return not result.transient and result.fault == "bitflip" and result.law == "per-element"


def failure_rates(comparison: Comparison) -> tuple[FailureRates, ...]:
    """The failure rates of the rows at one flip whose elements all have the same width."""
    rows = [row for row in _single_flips(comparison) if _has_one_width(row) and row.difference.estimate is not None]
    return tuple(FailureRates(row, row.ratio.scaled(row.b.bits / row.a.bits)) for row in rows)


def mixed_widths_text(comparison: Comparison, fit_per_bit: float | None) -> str:
    """A sentence on the rows that have no failure rate because their elements differ in width."""
    rows = _single_flips(comparison)
    without = [escape_unprintable(row.target) for row in rows if not _has_one_width(row)]
    if not without or (fit_per_bit is None and all(row.a.bits == row.b.bits for row in rows)):
        return ""
    return f"no failure rate for {listed(without)}: {MIXED_WIDTHS_REASON}"


def _single_flips(comparison: Comparison) -> list[ComparedRow]:
    """The rows of the main level and of the model at one flip; empty if no failure rate applies."""
    if not (has_failure_rates(comparison.a) and has_failure_rates(comparison.b)):
        return []
    level = main_level(comparison.a)
    rows = [row for row in at_level(comparison.rows, level) if level != "model"] + at_level(comparison.rows, "model")
    return [row for row in rows if row.flips == 1 and row.a.bits > 0]


def _has_one_width(row: ComparedRow) -> bool:
    return min(row.a.widest_share_of_bits, row.b.widest_share_of_bits) >= ONE_WIDTH


def are_bits_alike(rates: tuple[FailureRates, ...]) -> bool:
    """Whether every target has equally many bits in both campaigns."""
    return all(r.row.a.bits == r.row.b.bits for r in rates)


def _model(rates: tuple[FailureRates, ...]) -> FailureRates | None:
    return next((rate for rate in rates if rate.row.level == "model"), None)


def failure_rates_text(rates: tuple[FailureRates, ...]) -> str:
    """A sentence on how often the whole model fails in B against A; empty if there is no such row."""
    if (model := _model(rates)) is None:
        return ""
    bits = model.row.b.bits / model.row.a.bits
    why = f"B holds {bits:.3g} times as many bits"
    if model.ratio.estimate is None:
        return (
            f"At the same fault rate per bit, how often B fails compared with A is not known, because A has no wrong output; "
            f"{why}."
        )
    text = f"{model.text.estimate} times{model.text.limits_in_sentence} as often as A"
    if not model.direction:
        return f"At the same fault rate per bit, {NOT_ESTABLISHED}: B fails {text}; {why}."
    return f"At the same fault rate per bit, B fails {model.direction} often: {text}; {why}."


def fit_headline(rates: tuple[FailureRates, ...], fit_per_bit: float) -> str:
    """A sentence on the FIT of the whole model in A and B; empty if there is no such row."""
    if (model := _model(rates)) is None:
        return ""
    a, b = (make_fit_row(row, fit_per_bit).text.in_sentence for row in (model.row.a, model.row.b))
    values = f"B {b}, A {a}"
    if not model.direction:
        return f"Which of both has more FIT (failures per 10⁹ hours) is not established: {values}."
    return f"FIT (failures per 10⁹ hours) is {'higher' if model.direction == 'more' else 'lower'} in B: {values}."


def failure_rates_section(rates: tuple[FailureRates, ...], fit_per_bit: float | None) -> Section:
    """The section on ratios of failure rates, with FIT if a fault rate is given."""
    columns = [
        Column.text("target", lambda target: escape_unprintable(row_label(target.row, frozenset()))),
        Column.count("bits A", "row.a.bits"),
        Column.count("bits B", "row.b.bits"),
        Column.text("fails B / A", "text.estimate"),
        Column.text("its interval", "text.limits"),
    ]
    if fit_per_bit is not None:
        columns += [
            Column.text("FIT A", lambda target: _fit_text(target.row.a, fit_per_bit)),
            Column.text("FIT B", lambda target: _fit_text(target.row.b, fit_per_bit)),
        ]
    rate = "" if fit_per_bit is None else f" FIT is at {fit_per_bit:.3g} failures per 10⁹ hours and bit."
    lead = f"PVF × bits: how often B fails compared with A if every bit is hit equally often, whatever the rate.{rate}"
    rows = sorted(rates, key=lambda target: target.row.level == "model")
    return Section("Failure rates", lead, (Table.of(rows, tuple(columns)),))


def _fit_text(row: PvfRow, fit_per_bit: float) -> str:
    text = make_fit_row(row, fit_per_bit).text
    return f"{text.estimate} {text.limits}"
