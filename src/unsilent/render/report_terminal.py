"""A report in a terminal: headline, findings and tables, or plain lines of estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unsilent.render.cells import filled_columns, header_text, texts
from unsilent.render.console import WIDEST, print_columns, print_drawn, print_lines
from unsilent.render.report_json import row_object
from unsilent.report.model import Column, Report, Table
from unsilent.report.text import escape_unprintable, wrapped

if TYPE_CHECKING:
    from rich.console import Console

LIMITS = ("estimate", "low", "high", "n")
FIRST_LEAST, NAME_MOST = 14, 24
"""Word lengths above which words in texts may be folded: above the second if there is too little room, above the first if there
is very little."""
GAP = 2
"""Number of blanks between columns."""
NOTEBOOK_WIDTH = 120
PREFORMATTED = '<pre style="overflow-x: auto; line-height: 1.3">{code}</pre>'


def render_report(report: Report, console: Console, plain: bool) -> None:
    """Print a report on the console."""
    print_lines(
        console, [escape_unprintable(line) for line in (report.headline, report.title, *report.findings)], plain, "bold"
    )
    tables = [part for section in report.sections for part in section.parts if isinstance(part, Table)]
    if plain:
        if report.estimates.columns:
            _columns(report.estimates, console)
        for table in tables:
            for row in table.rows if table.plain_line_format else ():
                print_lines(console, [table.plain_line_format.format(*texts(table.columns, row))], plain)
    else:
        for table in tables:
            print_table(table, console)
        if any(table.terminal_rows for table in tables):
            console.print()
    print_lines(console, [escape_unprintable(line) for line in report.notes], plain)
    if report.repeat_command:
        print_lines(console, [f"repeat with: {escape_unprintable(report.repeat_command)}"], plain, no_wrap=True)


def report_as_preformatted_html(report: Report) -> str:
    """The terminal text of a report as a small HTML fragment without scripts, for notebooks."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=NOTEBOOK_WIDTH)
    render_report(report, console, plain=False)
    return console.export_html(inline_styles=True, code_format=PREFORMATTED)


def _columns(table: Table, console: Console) -> None:
    names = machine_names(table)
    lines = [
        [_plain_number(result.get(name)) for name in names] for result in (row_object(table, row) for row in table.rows)
    ]
    print_columns(console, names, lines)


def machine_names(table: Table) -> list[str]:
    """Column names of a machine-readable table, in which an interval has several columns."""
    return [n for c in table.columns if not c.priority for n in (LIMITS if c.kind == "estimate" else [c.name])]


def _plain_number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if value == value else ""
    return "" if value is None else escape_unprintable(str(value))


def print_table(table: Table, console: Console, has_all: str = "--plain") -> None:
    """Print a table without its empty columns.

    Columns with a high ``priority`` are left out if a terminal is too narrow; the option ``has_all`` shows them. Output that is
    not a terminal gets all columns, and every row as one line.
    """
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    if not table.terminal_rows:
        return
    rows = table.rows[: table.terminal_rows]
    every = [texts(table.columns, row) for row in rows]
    filled = filled_columns(table.columns, every)
    columns = [table.columns[number] for number in filled]
    heads = [header_text(column) for column in columns]
    cells = [[line[number] for number in filled] for line in every]
    lines = [heads, *cells]
    widths = fit_columns(columns, lines, console.width + 1) if console.is_terminal else whole_columns(lines)
    console.print()
    if table.title:
        print_lines(console, [escape_unprintable(table.title)], False, "bold")
    drawn = Drawn(box=box.SIMPLE_HEAD, show_header=any(heads), show_edge=False, padding=(0, GAP - 1, 0, 0))
    for number, width in widths.items():
        right = number and not columns[number].left_aligned
        name = Text("\n".join(wrapped(heads[number], width)))
        drawn.add_column(name, justify="right" if right else "left", width=width, overflow="fold")
    for row, line in zip(rows, cells, strict=True):
        style = "bold" if row.emphasised else ""
        drawn.add_row(*(Text("\n".join(wrapped(line[n], width)), style) for n, width in widths.items()))
    print_drawn(console, drawn)
    if left := [header_text(column) for number, column in enumerate(columns) if number not in widths]:
        print_lines(
            console, [f"columns that do not fit: {', '.join(left)}; widen the terminal, or use {has_all}"], False
        )
    if len(table.rows) > len(rows):
        print_lines(console, [table.more_rows_text.format(shown=len(rows), left=len(table.rows) - len(rows))], False)


def whole_columns(lines: Sequence[Sequence[str]]) -> dict[int, int]:
    """The widths of all columns, by number, at which no text is wrapped."""
    return {n: min(max(len(line[n]) for line in lines), WIDEST) or 1 for n in range(len(lines[0]))}


def fit_columns(columns: Sequence[Column], lines: Sequence[Sequence[str]], room: int) -> dict[int, int]:
    """The columns that fit into ``room``, by number, with their widths.

    Columns with the highest ``priority`` are left out until all words in texts and heads stay whole, and cells that are compared
    stay on one line. If this is not possible, such cells are broken at blanks, and then words are broken.
    """

    def longest(number: int, only: Sequence[Sequence[str]]) -> int:
        return max((len(word) for line in only for word in line[number].split()), default=1)

    def floors(text: Callable[[int], int], compared: Callable[[int], int]) -> list[int]:
        return [text(n) if columns[n].left_aligned or not n else compared(n) for n in range(len(columns))]

    whole = [min(max(len(line[n]) for line in lines), room) for n in range(len(columns))]
    words = [longest(n, lines) for n in range(len(columns))]
    cells = [max(longest(n, lines[:1]), *(len(line[n]) for line in lines[1:]), 1) for n in range(len(columns))]
    roomy = floors(lambda n: min(whole[n], NAME_MOST if n else 2 * NAME_MOST), cells.__getitem__)
    least = floors(lambda n: min(words[n] if n else whole[n], NAME_MOST), cells.__getitem__)
    broken = floors(lambda n: min(words[n], FIRST_LEAST), words.__getitem__)
    columns_left = list(range(len(columns)))
    while sum(least[n] + GAP for n in columns_left) > room and any(columns[n].priority for n in columns_left):
        columns_left.remove(max(columns_left, key=lambda n: (columns[n].priority, n)))
    widths = {n: max(whole[n], 1) for n in columns_left}
    for floor in (roomy, least, broken, [1] * len(columns)):
        while sum(widths.values()) + GAP * len(columns_left) > room:
            widest = max((n for n in columns_left if widths[n] > floor[n]), key=lambda n: widths[n], default=None)
            if widest is None:
                break
            widths[widest] -= 1
    return widths
