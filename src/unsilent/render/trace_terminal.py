"""A trace in the terminal: what the fault was, what it changed, one line for every output that differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.render.console import print_columns, print_lines
from unsilent.render.trace_info import (
    PHASE_NAMES,
    Gap,
    TraceInfo,
    folded_rows,
    headline,
    magnitude,
    marks,
    share_text,
    worst,
)
from unsilent.report.text import clean, counted, short
from unsilent.traced import BEFORE, TraceRow

if TYPE_CHECKING:
    from rich.console import Console

NAME_LEAST = 24
FAULTS = 4
PLAIN = (
    *("row", "phase", "micro_step", "operation", "kernel", "output", "tensor", "elements"),
    *("changed", "changed%", "relative", "absolute", "from_zero", "nonfinite", "fault"),
)


def render_trace(info: TraceInfo, console: Console, plain: bool) -> None:
    """Write a trace to the console; plain mode has every row."""
    print_lines(console, header(info), plain, "bold")
    if plain:
        struck = marks(info.trace)
        cells = [[str(i), *_plain(row), "x" if i in struck else ""] for i, row in enumerate(info.trace.rows)]
        print_columns(console, PLAIN, cells)
    else:
        _table(info, console)
    print_lines(console, footer(info), plain)


def header(info: TraceInfo) -> list[str]:
    """What it is of, the faults, the finding."""
    trace = info.trace
    bits = ["" if f.bits is None else f" ({counted(f.bits, 'bit')} changed)" for f in trace.faults]
    faults = [f"fault: {clean(f.text)}{told}" for f, told in zip(trace.faults, bits, strict=True)]
    more = len(faults) - FAULTS
    if more > 0:
        faults[FAULTS:] = [f"and {counted(more, 'fault')} more"]
    return [clean(info.title), *faults, headline(trace), *worst(trace)]


def footer(info: TraceInfo) -> list[str]:
    """How to read the table, and notes."""
    legend = "one line is one output of one operation; relative: largest |faulty - golden| / |golden|"
    return [legend, f"golden and faulty runs: {info.trace.runs}", *(f"note: {clean(n)}" for n in info.trace.notes)]


def _table(info: TraceInfo, console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows, struck = info.trace.rows, marks(info.trace)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0 if console.width < 100 else 1))
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("operation", overflow="fold", min_width=NAME_LEAST)
    roomy = console.width >= 110
    for name in (*(("tensor",) if roomy else ()), "changed %", "relative", "absolute", "NaN, ∞"):
        table.add_column(name, justify="right", no_wrap=True)
    phase, blank = "", [""] * (5 if roomy else 4)
    if BEFORE in struck:
        table.add_row("", Text(f"▶ {counted(len(struck[BEFORE]), 'fault')} before the first operation", style="bold"))
    for line in folded_rows(info.trace):
        if isinstance(line, Gap):
            table.add_row("", Text(line.text, style="dim"), *blank)
            continue
        row = rows[line]
        if row.phase != phase:
            phase = row.phase
            step = f", micro-step {row.micro_step}" if row.micro_step else ""
            table.add_row("", Text(f"{PHASE_NAMES.get(phase, phase)}{step}", style="dim italic"), *blank)
        name = ("▶ " if line in struck else "") + short(clean(row.label), 60)
        cells = [*([row.kind] if roomy else []), *_cells(row)]
        table.add_row(str(line), Text(name, style="bold" if line in struck else ""), *map(Text, cells))
    console.print(table)


def _cells(row: TraceRow) -> list[str]:
    change = row.change
    if row.other:
        return [row.other, "–", "–", "–"]
    ratio = magnitude(change.relative)
    if change.from_zero and change.relative is None:
        ratio = "from 0"
    return [share_text(row), ratio, magnitude(change.absolute), f"{change.nonfinite:,}" if change.nonfinite else "–"]


def _plain(row: TraceRow) -> list[str]:
    change = row.change
    words = [row.phase, str(row.micro_step), clean(row.name), row.kernel, str(row.output), row.kind, str(row.elements)]
    numbers = [str(change.changed), share_text(row), magnitude(change.relative), magnitude(change.absolute)]
    return [*words, *numbers, str(change.from_zero), str(change.nonfinite)]
