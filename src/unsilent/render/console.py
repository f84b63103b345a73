"""Printing of lines and tables on a console, in plain or rich form.

Plain mode is for pipes: it writes one table without colour or boxes, whose columns are separated by two or more blanks and
contain no blanks; every other line begins with ``# ``. Names come from outside and are never read as rich markup: all text is
built from `rich.text.Text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsilent.report.text import wrapped

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDEST = 10_000
"""Line width in characters for output that is not a terminal (a pipe, a log), which gets every table row as one line."""


def print_lines(console: Console, lines: Sequence[str], plain: bool, first: str = "", no_wrap: bool = False) -> None:
    """Print lines of text.

    ``first``: the style of the first line. ``no_wrap``: lines are not wrapped.
    """
    from rich.text import Text

    whole = plain or no_wrap
    for number, line in enumerate(lines):
        style = first if number == 0 and not plain else ""
        text = f"# {line}" if plain else line if whole else "\n".join(wrapped(line, console.width))
        console.print(Text(text, style=style), soft_wrap=whole)


def print_drawn(console: Console, drawn: RenderableType) -> None:
    """Print a table or several parts.

    Output that is not a terminal is not cut or wrapped.
    """
    from rich.segment import Segments

    if console.is_terminal:
        console.print(drawn)
    else:
        segments = console.render(drawn, console.options.update(width=WIDEST))
        console.print(Segments(segments), soft_wrap=True, end="")


def print_columns(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in plain mode."""
    from rich.text import Text

    table = [[_cell_as_word(cell) for cell in row] for row in (names, *rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    for line in table:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        console.print(Text(text), soft_wrap=True)


def _cell_as_word(cell: str) -> str:
    """The text of a cell as one word: ``_`` for each space, and ``-`` for an empty cell."""
    return "_".join(cell.replace("< ", "<").replace(" %", "%").split()) or "-"
