"""The report of a trace: the fault, and every output that it changed."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from unsilent.basics.fault_trace import BEFORE_FIRST_ROW, SCHEMA, FaultTrace, TracedFault
from unsilent.basics.strictjson import fields_by_name
from unsilent.report.model import Column, Part, Plot, Report, Section, Table, TableRow, TextCell, columns
from unsilent.report.text import count_text, escape_unprintable, short
from unsilent.studies.propagation_report.plots import (
    PHASE_NAMES,
    changed_share_figure,
    faults_by_row,
    magnitude,
    relative_figure,
    share_text,
)

MOST, FAULTS = 60, 4
"""Most lines of the tables of outputs and of faults in a terminal."""
ROWS = 2000
"""Most rows of a page's tables; figures, plain mode and JSON have all rows."""
NAME = 60
"""Most characters of a name in a terminal."""
_ALWAYS = 8
"""Number of rows with faults that are always shown, even if they do not differ."""
COLUMNS = columns(
    *("operation", "phase", "tensor", "#", "changed", "changed %", "relative", "absolute", "from 0", "NaN, ∞"),
    left=("phase", "tensor"),
    priority={"tensor": 4, "#": 3, "changed": 5, "absolute": 2, "from 0": 6},
)
SHARES = (
    "Each point is one output of one operation, in the order of computation. Outputs that are the same in both runs are ticks on "
    "the line at 0. The dotted line marks the output that the fault corrupts. Hover over a mark for its name."
)
RATIOS = "The largest |faulty − golden| / |golden| of each output, over the elements where golden is not 0 and both are finite."
METHOD = (
    "The golden (fault-free) run and the faulty run start from the same state. Every output of every operation is compared bit "
    "for bit (0 and −0 differ). Operations that only return another view of the same memory are left out. The golden run was "
    "repeated and returned the same bits. An element that is 0 in the golden run has no ratio; it counts under “from 0”. A fault "
    "in a gradient acts after the operation that computes the gradient and before the operations that read it, so the output of "
    "the computing operation is still golden."
)


def report(trace: FaultTrace, title: str, facts: tuple[tuple[str, str], ...] = ()) -> Report:
    """The report on a trace; ``facts`` are pairs of term and text."""
    return Report(
        schema=SCHEMA,
        report_type="How a fault spreads",
        title=title,
        headline=headline(trace),
        estimates=_every_row(trace),
        numbers=tuple(key_numbers(trace)),
        findings=(*worst_change_sentences(trace), *(f"note: {note}" for note in trace.notes)),
        sections=tuple(_sections(trace)),
        facts=facts,
        notes=(
            "one row is one output of one operation; relative: largest |faulty - golden| / |golden|; ▶ marks what a fault "
            "corrupts",
            f"golden: the run without the fault; golden and faulty run were executed {trace.runs} times in all",
        ),
        method=METHOD,
    )


def headline(trace: FaultTrace) -> str:
    """The main finding in one sentence, without a full stop."""
    changed, every = list(trace.changed_rows), count_text(len(trace.rows), "output")
    what = "the fault" if len(trace.faults) == 1 else "the faults"
    if not trace.rows:
        return "nothing could be compared: the runs diverge before the first output"
    if not trace.faults and not changed:
        return f"no fault was injected, and none of {every} differs from the golden run"
    if not changed:
        return f"{what} changed nothing: {every} of operations, all identical to the golden run"
    first, last = (trace.rows[i].label for i in (changed[0], changed[-1]))
    where = f"at {first}" if first == last else f"first {first}, last {last}"
    return f"{what} changed {len(changed):,} of {every} of operations: {where}"


def worst_change_sentences(trace: FaultTrace) -> Iterator[str]:
    """Sentences on the largest relative change, the first NaN or infinity, and the divergence of runs."""
    rated = [row for row in trace.rows if row.change.relative is not None]
    if rated:
        row = max(rated, key=lambda row: row.change.relative or 0.0)
        yield f"largest relative change {magnitude(row.change.relative)} at {row.label}"
    bad = next((row for row in trace.rows if row.change.nonfinite), None)
    if bad is not None:
        elements = count_text(bad.elements, "element")
        yield f"NaN or infinity first appears at {bad.label}, in {bad.change.nonfinite:,} of {elements}"
    if trace.divergence is not None:
        yield trace.divergence.text


def key_numbers(trace: FaultTrace) -> Iterator[tuple[str, str, str]]:
    """Key numbers for the head of the page: term, value and small text."""
    rows = trace.rows
    changed = [rows[i] for i in trace.changed_rows]
    yield "outputs changed", f"{len(changed):,}", f"of {len(rows):,}"
    for phase, name in PHASE_NAMES.items():
        mine = [row for row in rows if row.phase == phase]
        if mine and len(mine) < len(rows):
            yield name, f"{sum(row.change.changed > 0 for row in mine):,}", f"of {len(mine):,}"
    ratios = [row.change.relative for row in changed if row.change.relative is not None]
    if ratios:
        yield "largest relative change", magnitude(max(ratios)), ""
    yield "outputs with new NaN or ∞", f"{sum(row.change.nonfinite > 0 for row in changed):,}", ""


def _sections(trace: FaultTrace) -> Iterator[Section]:
    if trace.rows:
        plot = Plot("share", "Share of changed elements by operation", changed_share_figure(trace))
        yield Section("How much of each output differs", SHARES, (plot,))
    ratios = relative_figure(trace)
    if ratios is not None:
        plot = Plot("relative", "Largest relative change by operation", ratios)
        yield Section("How large the changes are", RATIOS, (plot,))
    yield Section("The fault" if len(trace.faults) == 1 else "The faults", "", (_faults_table(trace),))
    corrupted, changed = faults_by_row(trace), list(trace.changed_rows)
    shown = [i for i in range(len(trace.rows)) if i in corrupted or trace.rows[i].change.changed]
    left = len(shown) - ROWS
    same = (
        f"{len(trace.rows) - len(changed):,} of {count_text(len(trace.rows), 'output')} are bit-identical in both runs"
    )
    more = f" {left:,} more outputs that differ are only in the figures and in the JSON." if left > 0 else ""
    lead = f"{same} and not listed.{more} Click a heading to sort."
    lines = [_line(trace, line, corrupted) for line in rows_to_show(trace)]
    if BEFORE_FIRST_ROW in corrupted:
        early = count_text(len(corrupted[BEFORE_FIRST_ROW]), "fault")
        lines.insert(0, _text_row(f"▶ {early} before the first operation", strong=True))
    page = Table(COLUMNS, tuple(_row(trace, i, i in corrupted) for i in shown[:ROWS]), terminal_rows=0, sortable=True)
    parts: tuple[Part, ...] = (Table(COLUMNS, tuple(lines), terminal_rows=len(lines), on_page=False), page)
    yield Section("Outputs that differ", lead, parts)


def _faults_table(trace: FaultTrace) -> Table:
    def where(fault: TracedFault) -> str:
        if fault.row is None:
            return "place not known"
        return "before the first operation" if fault.row == BEFORE_FIRST_ROW else trace.rows[fault.row].label

    rows = [TableRow((f.text, where(f), f.bits), tooltip=f.site) for f in trace.faults[:ROWS]]
    heads = columns("fault", "corrupts", "bits changed", left=("corrupts",), priority={"corrupts": 1})
    none = TableRow(("none: the random draw selected no element", "", ""))
    more = f"and {count_text(len(rows) - FAULTS, 'fault')} more"
    sentence = "fault: {0}, corrupts {1}, bits changed: {2}"
    return Table(
        heads,
        tuple(rows) or (none,),
        terminal_rows=FAULTS,
        more_rows_text=more,
        plain_line_format=sentence if rows else "",
    )


@dataclass(frozen=True, slots=True)
class OmittedRows:
    """Consecutive rows that are omitted, and how many of them differ."""

    rows: int
    changed: int


def rows_to_show(trace: FaultTrace, most: int = MOST) -> list[int | OmittedRows]:
    """The numbers of the rows to show, and the gaps between them, at most ``most`` in total.

    Rows that differ and rows that a fault corrupts are shown. If too many rows differ, only the first and the last of them are.
    """
    corrupted = [i for i in faults_by_row(trace) if i != BEFORE_FIRST_ROW][:_ALWAYS]
    bad = [i for i, row in enumerate(trace.rows) if row.change.nonfinite][:1]
    always, changed, room = {*corrupted, *bad}, list(trace.changed_rows), most
    lines = _lines(trace, always | set(changed))
    while len(lines) > most:
        room -= 1
        head = max(room * 3 // 4, 0)
        lines = _lines(trace, always | set(changed[:head]) | set(changed[len(changed) - max(room - head, 0) :]))
    return lines


def _lines(trace: FaultTrace, shown: set[int]) -> list[int | OmittedRows]:
    items: list[int | OmittedRows] = []
    for inside, group in groupby(range(len(trace.rows)), key=shown.__contains__):
        numbers = list(group)
        left_out = OmittedRows(len(numbers), sum(trace.rows[i].change.changed > 0 for i in numbers))
        items += numbers if inside else [left_out]
    return items


def _line(trace: FaultTrace, line: int | OmittedRows, corrupted: Container[int]) -> TableRow:
    """A table row for an output, or for a gap of omitted outputs."""
    if isinstance(line, int):
        return _row(trace, line, line in corrupted, NAME)
    text = f", {line.changed:,} of them changed" if line.changed else " unchanged"
    return _text_row(f"… {count_text(line.rows, 'output')}{text}")


def _text_row(text: str, strong: bool = False) -> TableRow:
    return TableRow((text, *[""] * (len(COLUMNS) - 1)), strong)


def _row(trace: FaultTrace, number: int, corrupted: bool, width: int = 10**6) -> TableRow:
    row = trace.rows[number]
    change = row.change
    phase = PHASE_NAMES.get(row.phase, row.phase) + (f" {row.micro_step}" if row.micro_step else "")
    name = ("▶ " if corrupted else "") + short(escape_unprintable(row.label), width)
    share = TextCell(row.faulty_type or share_text(row), row.share)
    relative, absolute = _magnitude_cell(change.relative), _magnitude_cell(change.absolute)
    if change.from_zero and change.relative is None:
        relative = replace(relative, text="from 0")
    names, counts = (name, phase, row.dtype_and_shape, number), (change.from_zero, change.nonfinite)
    return TableRow((*names, change.changed, share, relative, absolute, *counts), corrupted)


def _magnitude_cell(value: float | None) -> TextCell:
    return TextCell(magnitude(value), -1.0 if value is None else value)


def _every_row(trace: FaultTrace) -> Table:
    """The full table of all rows, for output to a pipe."""
    names = ("row", "phase", "micro_step", "operation", "kernel", "output", "tensor", "elements")
    numbers = ("changed", "share", "relative", "absolute", "from_zero", "nonfinite", "fault")
    corrupted = faults_by_row(trace)
    rows = (
        {**fields_by_name(row), **fields_by_name(row.change), "row": number, "operation": row.name, "share": row.share,
         "tensor": row.dtype_and_shape, "fault": "x" if number in corrupted else ""}
        for number, row in enumerate(trace.rows)
    )  # fmt: skip
    return Table.of(rows, map(Column, (*names, *numbers)))
