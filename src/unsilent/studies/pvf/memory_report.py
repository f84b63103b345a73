"""The section of a report on the failure rates of memories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsilent.basics.interval import Interval
from unsilent.basics.sizes import human_bytes
from unsilent.report.dots import Dots, rate_hover_text, rates_figure
from unsilent.report.estimates import Estimate
from unsilent.report.model import Part, Plot, Section, Table, TableRow, TextCell, columns
from unsilent.report.text import number_text, rate_text
from unsilent.report.theme import OUTCOME_COLOURS, Figure
from unsilent.studies.pvf.memory_records import NOTHING_TRIED, MemoryFacts, MemoryFitRow
from unsilent.studies.pvf.records import MOST_LAYERS_SHOWN, PvfResult

FIT_LEAD = (
    "Failures in 10⁹ device hours (FIT) of what the memories hold. A failure is an event in a memory that makes an inference "
    "call incorrect, judged on one call. Silent: a call is incorrect and nothing reports it. Detectable: the memory reports "
    "an error, or the call ends with an error or a number that is not finite. Raw FIT are events in bits that are needed; a "
    "code corrects some. Silent calls per 10⁹ hours count every call that a fault meets until the content of the memory is "
    "written again. Limits come from the trials, and from the shares of what codes make of events where a note says that these "
    "were counted from drawn events; rates of the description are taken as exact. Where the limits are 'by "
    "description', no event comes through the protection, so that no trial was run: silent FIT is 0, detectable FIT what the "
    "memory reports."
)

FIGURE_LEAD = (
    "In the figure, bars are limits; a hollow triangle is the upper limit where no failure was seen; a rate that is exactly 0 "
    "has no mark on this scale."
)
APART = 0.16
"""Distance of each of the two marks from the middle of its row."""
BY_DESCRIPTION = "by description"
FIT_ESTIMATE_NAMES = ("level", "target", "measure", "")


def memory_section(result: PvfResult) -> Section:
    """The section on the failure rates and the sizes of memories."""
    sizes = Table(
        columns("memory", "size", "most held", "calls per fault", "nothing at", left=("nothing at",)),
        tuple(_size_row(facts) for facts in result.memories),
        "Memories",
    )
    parts = [row for row in result.memory_fit if row.level in ("memory", "pattern", "component", "model")]
    layers = sorted((row for row in result.memory_fit if row.level == "layer"), key=lambda row: -row.silent.high)
    tables: list[Part] = [_table(parts, "Failures in 1e9 device hours (FIT)")]
    if any(max(row.silent.high, row.detectable.high) > 0 for row in result.memory_fit):
        tables.insert(0, Plot("fit", "Failures in 10⁹ device hours (FIT)", fit_figure(result.memory_fit)))
    if layers:
        tables.append(_table(layers, "FIT of layers", MOST_LAYERS_SHOWN))
    return Section("Failure rate of memories", f"{FIT_LEAD} {FIGURE_LEAD}", (*tables, sizes))


def fit_figure(rows: Sequence[MemoryFitRow]) -> Figure:
    """The figure of silent and detectable FIT, by memory and component and for the model."""
    shown = [row for level in ("memory", "component", "model") for row in rows if row.level == level]
    names = [f"{row.name} ({row.level})" if row.level != "model" else row.name for row in shown]
    series = []
    for kind, outcome, shift in (("silent", "sdc", -APART), ("detectable", "due", APART)):
        rates = [getattr(row, kind) for row in shown]
        if not any(rate.high for rate in rates):
            continue
        hover = [rate_hover_text(rate, name, f"{kind} FIT") for rate, name in zip(rates, names, strict=True)]
        places = [(place + shift, rate, text) for place, (rate, text) in enumerate(zip(rates, hover, strict=True))]
        series.append(Dots(kind, OUTCOME_COLOURS[outcome], "circle" if shift < 0 else "square", places))
    return rates_figure(series, names, "FIT (failures in 10⁹ device hours)")


def _size_row(facts: MemoryFacts) -> TableRow:
    calls = TextCell(number_text(facts.calls_per_fault), facts.calls_per_fault)
    return TableRow((facts.name, human_bytes(facts.size), human_bytes(facts.held), calls, " ".join(facts.unmatched)))


def _table(rows: Sequence[MemoryFitRow], title: str, most: int | None = None) -> Table:
    heads = (
        *("level", "of", "raw FIT", "corrected"),
        *("silent FIT", "interval", "detectable FIT", "interval ", "silent calls", "n"),
    )
    shown = columns(*heads, left=("level", "of"), priority={"corrected": 2, "silent calls": 3, "n": 1, "interval ": 1})
    return Table(shown, tuple(map(_row, rows)), title, terminal_rows=len(rows) if most is None else most, sortable=True)


def _row(row: MemoryFitRow) -> TableRow:
    calls = ("", "") if row.wrong_calls is None else _cells(row.wrong_calls)
    return TableRow(
        (row.level, row.name, _number(row.raw), _number(row.corrected), *_cells(row.silent), *_cells(row.detectable), calls[0],
         row.silent.n),
        row.level == "model",
    )  # fmt: skip


def _number(value: float) -> TextCell:
    return TextCell(number_text(value), value)


def _cells(interval: Interval) -> tuple[TextCell, TextCell]:
    text = rate_text(interval)
    limits = BY_DESCRIPTION if text.exact and interval.method == NOTHING_TRIED else text.limits
    return TextCell(text.estimate, interval.estimate or 0.0), TextCell(limits, interval.high)


def memory_estimates(result: PvfResult) -> Iterator[Estimate]:
    """The silent and detectable FIT of each row as machine-readable estimates."""
    for row in result.memory_fit:
        for measure, interval in (("silent FIT", row.silent), ("detectable FIT", row.detectable)):
            yield Estimate({"level": row.level, "target": row.name, "measure": measure}, interval)


def memory_data(result: PvfResult) -> Mapping[str, Any]:
    """The failure rates of memories as values of the JSON object."""
    return {"memories": result.memories, "memory_fit": result.memory_fit}
