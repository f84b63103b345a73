"""A report in a terminal: headline, findings, tables as wide as there is room; or, plain, one line for each estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.render.cells import head, texts
from unsilent.render.console import print_columns, print_lines, room
from unsilent.render.report_json import row_object
from unsilent.report.model import Report, Row, Table
from unsilent.report.text import clean, folded

if TYPE_CHECKING:
    from rich.console import Console

LIMITS = ("estimate", "low", "high", "n")
FIRST_LEAST = 14
"""Characters that are left for the first column before others are left out."""


def render_report(report: Report, console: Console, plain: bool) -> None:
    """Write a report to the console."""
    print_lines(console, [clean(line) for line in (report.headline, report.title, *report.findings)], plain, "bold")
    tables = [part for section in report.sections for part in section.parts if isinstance(part, Table)]
    if plain:
        _columns(report.estimates, console)
        for table in tables:
            for row in table.rows if table.sentence else ():
                print_lines(console, [table.sentence.format(*texts(table.columns, row))], plain)
    else:
        for table in tables:
            _table(table, console)
    print_lines(console, [clean(line) for line in report.notes], plain)


def _columns(table: Table, console: Console) -> None:
    names = [n for c in table.columns if not c.priority for n in (LIMITS if c.kind == "estimate" else [c.name])]
    lines = [[_plain(found.get(name)) for name in names] for found in (row_object(table, row) for row in table.rows)]
    print_columns(console, names, lines)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if value == value else ""
    return "" if value is None else clean(str(value))


def _table(table: Table, console: Console) -> None:
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    if not table.terminal_rows:
        return
    rows = table.rows[: table.terminal_rows]
    kept = _fitting(table, rows, console)
    title = clean(table.title) or None
    drawn = Drawn(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1))
    for number in kept:
        column = table.columns[number]
        drawn.add_column(Text(head(column)), justify="right" if number and not column.left else "left", overflow="fold")
    lines = [[texts(table.columns, row)[number] for number in kept] for row in rows]
    width = room(console, [head(table.columns[number]) for number in kept[1:]], [line[1:] for line in lines], 1)
    for row, (first, *others) in zip(rows, lines, strict=True):
        name = "\n".join(folded(first, width)) if width >= FIRST_LEAST else first
        drawn.add_row(*(Text(cell, style="bold" if row.strong else "") for cell in (name, *others)))
    console.print(drawn)
    if left := [head(column) for number, column in enumerate(table.columns) if number not in kept]:
        print_lines(console, [f"no room for {', '.join(left)}: widen the terminal, or --plain"], False)
    if len(table.rows) > len(rows):
        print_lines(console, [table.cut.format(shown=len(rows), left=len(table.rows) - len(rows))], False)


def _fitting(table: Table, rows: tuple[Row, ...], console: Console) -> list[int]:
    """Columns for which there is room: those of the highest priority are left out first."""

    def needed(kept: list[int]) -> int:
        cells = [[texts(table.columns, row)[n] for n in kept[1:]] for row in rows]
        return FIRST_LEAST - room(console, [head(table.columns[n]) for n in kept[1:]], cells, 1)

    kept = list(range(len(table.columns)))
    while needed(kept) > 0 and any(table.columns[n].priority for n in kept):
        kept.remove(max(kept, key=lambda n: (table.columns[n].priority, n)))
    return kept
