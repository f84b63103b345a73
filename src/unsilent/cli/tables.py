"""Plain tables of text, for verbs that list things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

ANY_WIDTH = 10_000
"""What is no terminal gets every row as one line."""


def show_table(rows: Sequence[Sequence[object]], heads: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Print rows under heads, behind an empty line. Columns without any text are left out.

    Where a terminal is too narrow, ``optional`` columns are left out, too, the first of them first.
    """
    from unsilent.render.report_terminal import print_table
    from unsilent.report.model import Table, TableRow, columns

    filled = [number for number in range(len(heads)) if any(str(row[number]) for row in rows)]
    heads = [heads[number] for number in filled]
    priority = {head: len(optional) - number for number, head in enumerate(optional)}
    table = Table(
        columns(*heads, left=heads, priority=priority),
        tuple(TableRow(tuple(str(row[number]) for number in filled)) for row in rows),
        terminal_rows=len(rows),
    )
    print_table(table, _console(), has_all="--json")


def show_lines(*lines: str) -> None:
    """Print lines of text, wrapped at blanks on a terminal."""
    from unsilent.render.console import print_lines

    print_lines(_console(), lines, plain=False)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=ANY_WIDTH)
