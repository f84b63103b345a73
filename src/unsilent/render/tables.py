"""What the tables of the HTML report show: cells as text, with the number behind each for sorting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unsilent.render.fit import FitRow
from unsilent.render.info import EVERYTHING, first_flips, is_drawn, itself, name_of, rows_of
from unsilent.render.terminal import accuracy_text, dtype_text
from unsilent.report.text import amount, clean, counted, flips_text, seconds, share, shown
from unsilent.studies.pvf.records import PvfResult, PvfRow


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, and the number to sort by (None: by text)."""

    text: str
    key: float | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table: its name, level, and cells."""

    name: str
    level: str
    cells: tuple[Cell, ...]
    bar: tuple[float, float] = (0.0, 0.0)
    """Estimate and upper limit as shares of the longest bar, where the table draws one."""
    title: str = ""
    """Shown when the row is pointed at: what is rarely needed."""


def result_columns(result: PvfResult) -> tuple[str, ...]:
    """Heads of the table of all rows."""
    estimate = f"{result.measure} %"
    counts = ("n", "masked", "benign", "silent", "detectable", "silent %")
    return ("target", "level", "part of", "flips", estimate, "interval %", *counts)


def result_table(result: PvfResult) -> list[Line]:
    """All rows, in the order of the result."""
    own = itself(result)
    return [Line(clean(name_of(row, own)), row.level, _result_cells(row), title=_title(row)) for row in result.rows]


def _title(row: PvfRow) -> str:
    unit = "batch" if row.unit == "batch" else "sample"
    sizes = f"{counted(row.elements, 'element')}, {counted(row.bits, 'bit')}, {counted(row.units, unit)} judged"
    return f"{sizes}, {counted(row.incorrect_trials, 'fault')} with an incorrect output; {clean(row.method)}"


def _result_cells(row: PvfRow) -> tuple[Cell, ...]:
    text = shown(row.estimate, row.low, row.high)
    kinds = ", ".join(f"{clean(kind)} {count:,}" for kind, count in row.due_kinds.items() if count)
    return (
        Cell(clean(row.parent)),
        Cell("–" if row.flips is None else f"{row.flips:,}", float(row.flips or 0)),
        Cell(text.estimate, -1.0 if row.estimate is None else row.estimate),
        Cell(text.limits, row.high),
        *(Cell(f"{c:,}", float(c)) for c in (row.n, row.masked, row.benign, row.sdc)),
        Cell(f"{row.due:,}", float(row.due), kinds),
        Cell(share(row.silent_share).removesuffix(" %"), -1.0 if row.silent_share is None else row.silent_share),
    )


def fit_table(rows: Sequence[FitRow]) -> list[Line]:
    """Target, bits, raw FIT, PVF, FIT and its limits; bars are relative to the largest upper limit."""
    most = max((f.high or 0.0 for f in rows), default=0.0) or 1.0
    bars = [((f.estimate or 0.0) / most, (f.high or 0.0) / most) for f in rows]
    return [Line(clean(f.row.target), f.row.level, _fit_cells(f), bar) for f, bar in zip(rows, bars, strict=True)]


def _fit_cells(found: FitRow) -> tuple[Cell, ...]:
    pvf = shown(found.row.estimate, found.row.low, found.row.high)
    return (
        Cell(f"{found.row.bits:,}"),
        Cell(amount(found.raw)),
        Cell(pvf.estimate),
        Cell(found.text.estimate),
        Cell(found.limits),
    )


def lookup_table(result: PvfResult) -> list[Line]:
    """Rows of embedding tables by how often they are looked up."""
    found = []
    for row in result.lookups:
        text = shown(row.estimate, row.low, row.high)
        rest = (text.estimate, text.limits, f"{row.n:,}")
        cells = (f"{row.rows:,}", f"{row.lookups:,}", f"{100 * row.share_of_elements:.3g} %")
        found.append(Line(clean(row.heat), "", tuple(Cell(cell) for cell in [*cells, *rest])))
    return found


def numbers(result: PvfResult) -> list[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    found = []
    model = rows_of(result, "model")
    for row in [r for r in model if r.flips == first_flips(model)][:1]:
        text = shown(row.estimate, row.low, row.high)
        value = text.estimate if row.estimate is None else f"{text.estimate} %"
        name = "whole model" if result.at == EVERYTHING else "all that was struck"
        name = "whole list" if result.spec.get("faults") else name
        name += "" if row.flips is None else f", {flips_text(row.flips)}"
        found.append((name, value, text.limits if row.estimate else ""))
    planned = "" if result.trials_done == result.trials_planned else f"of {result.trials_planned:,} planned"
    found.append(("faults tried", f"{result.trials_done:,}", planned))
    found.append(("evaluation samples", f"{result.samples:,}", ""))
    if accuracy_text(result.info):
        name, _, value = accuracy_text(result.info).rpartition(" ")
        found.append((f"fault-free {name}", value, ""))
    return [*found, ("time", seconds(result.seconds), "")]


def facts(result: PvfResult) -> list[tuple[str, str]]:
    """How this was made, as pairs of term and text."""
    versions = ", ".join(f"{clean(name)} {clean(version)}" for name, version in result.versions.items())
    trials = f"{result.trials_done:,} of {result.trials_planned:,} planned"
    known = [
        ("workload", clean(result.workload)),
        ("fault model", clean(result.fault)),
        ("where", clean(result.at)),
        ("targets", f"per {clean(result.per)}"),
        ("law", clean(result.law)),
        ("unit", clean(result.unit)),
        ("judge", clean(result.judge)),
        ("evaluation", f"{counted(result.samples, 'sample')} in {counted(result.batches, 'batch')}"),
        ("trials", trials),
        *([("confidence", f"{100 * result.confidence:g} %")] if is_drawn(result.rows) or not result.rows else []),
        ("seed", str(result.seed)),
        ("device", f"{clean(result.device)}, {dtype_text(result)}, {counted(result.threads, 'thread')}"),
        ("versions", versions),
        ("time", f"{seconds(result.seconds)}, {seconds(result.cpu_seconds)} CPU"),
        ("one fault-free evaluation", seconds(result.golden_seconds)),
        ("store", clean(result.store)),
        ("campaign", clean(result.campaign)),
    ]
    return known + [pair for key, value in result.info.items() for pair in [_info(key, value, result)]]


def _info(key: str, value: Any, result: PvfResult) -> tuple[str, str]:
    if key == "accuracy":
        return "accuracy", accuracy_text(result.info)
    if isinstance(value, Mapping):
        return clean(key), clean(", ".join(f"{k}: {v}" for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return clean(key), clean(", ".join(str(v) for v in value))
    if isinstance(value, float):
        return clean(key), f"{value:.4g}"
    return clean(key), clean(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value)
