"""Plain tables of text, for verbs that list things."""

from __future__ import annotations

from collections.abc import Sequence


def show_table(
    rows: Sequence[Sequence[object]], heads: Sequence[str], optional: Sequence[str] = (), *, plain: bool = False
) -> None:
    """Print rows under heads. Where a terminal is too narrow, ``optional`` columns are left out, the first of them first.

    ``plain``: in columns without boxes, one line for each row.
    """
    from rich.console import Console

    from unsilent.render.console import print_columns
    from unsilent.render.report_terminal import print_table
    from unsilent.report.model import Table, TableRow, columns

    if plain:
        print_columns(Console(), heads, [tuple(map(str, row)) for row in rows])
        return
    priority = {head: len(optional) - number for number, head in enumerate(optional)}
    table = Table(
        columns(*heads, left=heads, priority=priority),
        tuple(TableRow(tuple(map(str, row))) for row in rows),
        terminal_rows=len(rows),
    )
    print_table(table, Console(), has_all="--json")


def show_lines(*lines: str, plain: bool = False) -> None:
    """Print lines of text; on a terminal wrapped at blanks and indented as they begin.

    ``plain``: each as one comment, ``# …``, without lines that are empty.
    """
    from rich.console import Console

    from unsilent.render.console import print_lines
    from unsilent.report.text import wrapped

    console = Console()
    if plain:
        print_lines(console, [line.strip() for line in lines if line], plain=True)
        return
    for line in lines:
        text = line.lstrip()
        indent = " " * (len(line) - len(text))
        parts = wrapped(text, console.width - len(indent)) if console.is_terminal and text else [text]
        print_lines(console, [indent + part for part in parts], plain=False, no_wrap=True)
