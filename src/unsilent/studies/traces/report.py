"""The report of a trace: what the fault was, what it changed, one row for every output that differs."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import groupby

from unsilent.report.model import Column, Part, Plot, Report, Row, Section, Shown, Table
from unsilent.report.text import clean, counted, short
from unsilent.studies.traces.figures import PHASE_NAMES, magnitude, marks, relative_figure, share_figure, share_text
from unsilent.traced import BEFORE, SCHEMA, Placed, Trace

MOST, FAULTS = 60, 4
"""Lines of the tables of outputs and of faults in a terminal."""
ROWS = 2000
"""Rows of a page's tables; the figures, plain mode and the JSON have all."""
NAME = 60
"""Characters of a name in a terminal."""
_ALWAYS = 8
"""Rows with faults that are shown whatever happens to them."""
COLUMNS = (
    Column("operation"),
    Column("phase", left=True),
    Column("tensor", left=True, priority=4),
    Column("#", priority=3),
    Column("changed", priority=5),
    Column("changed %"),
    Column("relative"),
    Column("absolute", priority=2),
    Column("from 0", priority=6),
    Column("NaN, ∞"),
)
SHARES = (
    "One point is one output of one operation, in the order they are computed. What is the same in both runs is a tick on the "
    "line at 0. The dotted line is where the fault corrupts. Point at anything for its name."
)
RATIOS = "The largest |faulty − golden| / |golden| among the elements of an output, where golden is not 0 and both are finite."
METHOD = (
    "A golden and a faulty run begin from the same state; every output of every operation is compared bit for bit (0 and −0 "
    "differ). What only gives another view of memory is left out. The golden run was repeated and gave the same bits. An element "
    "that is 0 in the golden run has no ratio: it counts under “from 0”. A fault in a gradient corrupts it on its way to who "
    "reads it: the kernel that gave it is golden, what reads it is not."
)


def report(trace: Trace, title: str, facts: tuple[tuple[str, str], ...] = ()) -> Report:
    """All that is shown of a trace; ``title``: what it is of, ``facts``: pairs of term and text."""
    return Report(
        schema=SCHEMA,
        kicker="How a fault spreads",
        title=title,
        headline=headline(trace),
        estimates=_every_row(trace),
        numbers=tuple(numbers(trace)),
        findings=(*worst(trace), *(f"note: {note}" for note in trace.notes)),
        sections=tuple(_sections(trace)),
        facts=facts,
        notes=(
            "one row is one output of one operation; relative: largest |faulty - golden| / |golden|; ▶ is what a fault corrupts",
            f"golden and faulty runs: {trace.runs}",
        ),
        method=METHOD,
    )


def headline(trace: Trace) -> str:
    """The finding in one sentence, without a full stop."""
    changed, every = list(trace.changed), counted(len(trace.rows), "output")
    what = "the fault" if len(trace.faults) == 1 else "the faults"
    if not trace.rows:
        return "nothing could be compared: the runs part at once"
    if not trace.faults and not changed:
        return f"there was no fault, and nothing differs in {every}"
    if not changed:
        return f"{what} changed nothing: {every} of operations, all identical to the golden run"
    first, last = (trace.rows[i].label for i in (changed[0], changed[-1]))
    where = f"at {first}" if first == last else f"first {first}, last {last}"
    return f"{what} changed {len(changed):,} of {every} of operations: {where}"


def worst(trace: Trace) -> Iterator[str]:
    """The largest relative change, where NaN or infinity come first, and where the runs part."""
    rated = [row for row in trace.rows if row.change.relative is not None]
    if rated:
        row = max(rated, key=lambda row: row.change.relative or 0.0)
        yield f"largest relative change {magnitude(row.change.relative)} at {row.label}"
    bad = next((row for row in trace.rows if row.change.nonfinite), None)
    if bad is not None:
        yield f"NaN or infinity first at {bad.label}: {bad.change.nonfinite:,} of {counted(bad.elements, 'element')}"
    if trace.parting is not None:
        yield trace.parting.text


def numbers(trace: Trace) -> Iterator[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    rows = trace.rows
    changed = [rows[i] for i in trace.changed]
    yield "outputs changed", f"{len(changed):,}", f"of {len(rows):,}"
    for phase, name in PHASE_NAMES.items():
        mine = [row for row in rows if row.phase == phase]
        if mine and len(mine) < len(rows):
            yield name, f"{sum(row.change.changed > 0 for row in mine):,}", f"of {len(mine):,}"
    ratios = [row.change.relative for row in changed if row.change.relative is not None]
    if ratios:
        yield "largest relative change", magnitude(max(ratios)), ""
    yield "with new NaN or ∞", f"{sum(row.change.nonfinite > 0 for row in changed):,}", ""


def _sections(trace: Trace) -> Iterator[Section]:
    if trace.rows:
        plot = Plot("share", "Share of changed elements by operation", share_figure(trace))
        yield Section("How much of each output differs", SHARES, (plot,))
    ratios = relative_figure(trace)
    if ratios is not None:
        yield Section("By how much", RATIOS, (Plot("relative", "Largest relative change by operation", ratios),))
    yield Section("The fault" if len(trace.faults) == 1 else "The faults", "", (_faults_table(trace),))
    corrupted, changed = marks(trace), list(trace.changed)
    shown = [i for i in range(len(trace.rows)) if i in corrupted or trace.rows[i].change.changed]
    left = len(shown) - ROWS
    lead = (
        f"{len(trace.rows) - len(changed):,} of {counted(len(trace.rows), 'output')} are the same, bit for bit, and not listed."
        + (f" {left:,} more that differ are in the figures and in the JSON alone." if left > 0 else "")
        + " Click a heading to sort."
    )
    lines = [_line(trace, line, corrupted) for line in folded_rows(trace)]
    if BEFORE in corrupted:
        lines.insert(0, _words(f"▶ {counted(len(corrupted[BEFORE]), 'fault')} before the first operation", strong=True))
    page = Table(COLUMNS, tuple(_row(trace, i, i in corrupted) for i in shown[:ROWS]), terminal_rows=0, long=True)
    parts: tuple[Part, ...] = (Table(COLUMNS, tuple(lines), terminal_rows=len(lines), on_page=False), page)
    yield Section("Outputs that differ", lead, parts)


def _faults_table(trace: Trace) -> Table:
    def where(fault: Placed) -> str:
        if fault.row is None:
            return "place not known"
        return "before the first operation" if fault.row == BEFORE else trace.rows[fault.row].label

    rows = [Row((f.text, where(f), f.bits), hint=f.site) for f in trace.faults[:ROWS]]
    columns = (Column("fault"), Column("corrupts", left=True, priority=1), Column("bits changed", "number"))
    none = Row(("none: the draw hit nothing", "", ""))
    more = f"and {counted(len(rows) - FAULTS, 'fault')} more"
    sentence = "fault: {0}, corrupts {1}, bits changed: {2}"
    return Table(columns, tuple(rows) or (none,), terminal_rows=FAULTS, cut=more, sentence=sentence if rows else "")


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that are left out between two that are shown, and how many of them differ."""

    rows: int
    changed: int


def folded_rows(trace: Trace, most: int = MOST) -> list[int | Gap]:
    """Numbers of the rows to show, and gaps, at most ``most`` together.

    Shown are rows that differ and those that a fault corrupts; where they are too many, the first and the last of them.
    """
    corrupted = [i for i in marks(trace) if i != BEFORE][:_ALWAYS]
    bad = [i for i, row in enumerate(trace.rows) if row.change.nonfinite][:1]
    always, changed, room = {*corrupted, *bad}, list(trace.changed), most
    lines = _lines(trace, always | set(changed))
    while len(lines) > most:
        room -= 1
        head = max(room * 3 // 4, 0)
        lines = _lines(trace, always | set(changed[:head]) | set(changed[len(changed) - max(room - head, 0) :]))
    return lines


def _lines(trace: Trace, kept: set[int]) -> list[int | Gap]:
    items: list[int | Gap] = []
    for inside, group in groupby(range(len(trace.rows)), key=kept.__contains__):
        numbers = list(group)
        left_out = Gap(len(numbers), sum(trace.rows[i].change.changed > 0 for i in numbers))
        items += numbers if inside else [left_out]
    return items


def _line(trace: Trace, line: int | Gap, corrupted: Container[int]) -> Row:
    """A row that is shown in a terminal, or how many are left out."""
    if isinstance(line, int):
        return _row(trace, line, line in corrupted, NAME)
    text = f", {line.changed:,} of them changed" if line.changed else " unchanged"
    return _words(f"… {counted(line.rows, 'output')}{text}")


def _words(text: str, strong: bool = False) -> Row:
    return Row((text, *[""] * (len(COLUMNS) - 1)), strong)


def _row(trace: Trace, number: int, corrupted: bool, width: int = 10**6) -> Row:
    row = trace.rows[number]
    change = row.change
    phase = PHASE_NAMES.get(row.phase, row.phase) + (f" {row.micro_step}" if row.micro_step else "")
    born = bool(change.from_zero) and change.relative is None
    return Row(
        (
            ("▶ " if corrupted else "") + short(clean(row.label), width),
            phase,
            row.kind,
            number,
            change.changed,
            Shown(row.other or share_text(row), row.share),
            Shown(
                "from 0" if born else magnitude(change.relative), -1.0 if change.relative is None else change.relative
            ),
            Shown(magnitude(change.absolute), -1.0 if change.absolute is None else change.absolute),
            change.from_zero,
            change.nonfinite,
        ),
        corrupted,
    )


def _every_row(trace: Trace) -> Table:
    """The table for pipes."""
    names = ("row", "phase", "micro_step", "operation", "kernel", "output", "tensor", "elements")
    numbers = ("changed", "share", "relative", "absolute", "from_zero", "nonfinite", "fault")
    corrupted = marks(trace)
    rows = []
    for i, row in enumerate(trace.rows):
        words = (i, row.phase, row.micro_step, row.name, row.kernel, row.output, row.kind, row.elements)
        c, fault = row.change, "x" if i in corrupted else ""
        rows.append(Row((*words, c.changed, row.share, c.relative, c.absolute, c.from_zero, c.nonfinite, fault)))
    return Table(tuple(map(Column, (*names, *numbers))), tuple(rows))
