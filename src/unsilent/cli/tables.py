"""Plain tables of text, for verbs that list things."""

from __future__ import annotations

from collections.abc import Sequence


def show_table(rows: Sequence[Sequence[object]], heads: Sequence[str], whole: Sequence[str] = ()) -> None:
    """Print rows under heads; long cells wrap at the width of the terminal, those under heads in ``whole`` never.

    What is no terminal gets every row as one line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold", no_wrap=head in whole)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.measure(table).maximum, 1))
    console.print(table)
