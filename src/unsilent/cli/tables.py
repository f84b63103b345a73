"""Plain tables of text, for verbs that list things."""

from __future__ import annotations

from collections.abc import Sequence

ANY_WIDTH = 10_000
"""What is no terminal gets every row as one line."""


def show_table(rows: Sequence[Sequence[object]], heads: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Print rows under heads. Where a terminal is too narrow, ``optional`` columns are left out, the first of them first."""
    from rich.console import Console

    from unsilent.render.report_terminal import print_table
    from unsilent.report.model import Table, TableRow, columns

    console = Console()
    if not console.is_terminal:
        console = Console(width=ANY_WIDTH)
    priority = {head: len(optional) - number for number, head in enumerate(optional)}
    table = Table(
        columns(*heads, left=heads, priority=priority),
        tuple(TableRow(tuple(map(str, row))) for row in rows),
        terminal_rows=len(rows),
    )
    print_table(table, console, has_all="--json")
