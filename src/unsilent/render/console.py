"""Lines and tables on a console, plain or rich, shared by everything that is shown in a terminal.

Plain mode writes one table of columns separated by two or more blanks, without blanks inside a column, colour or boxes, and every
other line behind ``# ``: fit for pipes. Names come from outside and are never read as rich markup: everything is built from
`rich.text.Text`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from unsilent.report.text import clean, folded, short

if TYPE_CHECKING:
    from rich.console import Console

NAME_WIDTH, NAME_LEAST = 48, 14
WIDE = 100
"""Columns of a console on which cells stand further apart."""


class Named(Protocol):
    """What every row of a table has, whatever its cells are."""

    @property
    def target(self) -> str: ...
    @property
    def level(self) -> str: ...
    @property
    def parent(self) -> str: ...


Row = TypeVar("Row", bound=Named)


def _target(row: Named) -> str:
    return row.target


def print_lines(console: Console, lines: Sequence[str], plain: bool, first: str = "", whole: bool = False) -> None:
    """Lines of text; ``first`` is the style of the first one, ``whole`` lines are not wrapped."""
    from rich.text import Text

    for number, line in enumerate(lines):
        style = first if number == 0 and not plain else ""
        console.print(Text(f"# {line}" if plain else line, style=style), soft_wrap=plain or whole)


def print_columns(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The table of plain mode."""
    from rich.text import Text

    table = [[_joined(cell) for cell in row] for row in (names, *rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    for line in table:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        console.print(Text(text), soft_wrap=True)


def print_table(
    console: Console,
    rows: Sequence[Row],
    columns: Sequence[str],
    cells_of: Callable[[Row], list[str]],
    title: str = "",
    name_of: Callable[[Row], str] = _target,
) -> None:
    """One line a row: its name, layers and tensors under what they belong to, and its cells; a rule before the model."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [cells_of(row) for row in rows]
    roomy = console.width >= WIDE and room(console, columns, cells, 1) >= NAME_LEAST
    gap = 1 if roomy else 0  # beside the one that the box has
    width = max(NAME_LEAST, min(room(console, columns, cells, gap), NAME_WIDTH))
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", padding=(0, gap))
    table.add_column("target", overflow="fold", min_width=NAME_LEAST)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    parent = ""
    for number, row in enumerate(rows):
        if row.level in ("layer", "tensor") and row.parent != parent:
            parent = row.parent
            table.add_row(Text("\n".join(folded(short(clean(parent), NAME_WIDTH), width)), style="dim"))
        indent = "  " if row.parent and row.level != "component" else ""
        style = "bold" if row.level == "model" else ""
        lines = folded(short(clean(name_of(row)), NAME_WIDTH), width - len(indent))
        name = indent + f"\n{indent}".join(lines)
        if row.level == "model" and number and rows[number - 1].level != "model":
            table.add_section()
        table.add_row(*(Text(cell, style=style) for cell in (name, *cells[number])))
    console.print(table)


def room(console: Console, columns: Sequence[str], cells: Sequence[Sequence[str]], gap: int = 0) -> int:
    """Columns that are left for names beside these cells."""
    wide = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    return console.width - sum(wide) - (2 * gap + 1) * (len(columns) + 1) - 1


def _joined(cell: str) -> str:
    """One word: blanks become ``_``, ``-`` for nothing, so that columns can be split at blanks."""
    return "_".join(cell.replace("< ", "<").replace(" %", "%").split()) or "-"
