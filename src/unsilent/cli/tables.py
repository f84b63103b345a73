"""Tables, lines and JSON objects printed by commands without a report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unsilent.basics.options import Request
from unsilent.command import DisplayOptions


def show_result(request: Request, schema: str, command: str, fields: Mapping[str, Any], *lines: str) -> None:
    """Print the result of a command as one JSON object, as lines, or as comments in plain mode.

    Lines are never wrapped, as they contain paths and commands.
    """
    display = request[DisplayOptions]
    if display.as_json:
        print(json.dumps({"schema": schema, "command": command, **fields}, indent=2))
    else:
        print("\n".join(f"# {line.strip()}" if display.plain else line for line in lines))


def show_table(
    rows: Sequence[Sequence[object]], heads: Sequence[str], optional: Sequence[str] = (), *, plain: bool = False
) -> None:
    """Print a table.

    On a narrow terminal, ``optional`` columns are left out, beginning with the first of them.

    With ``plain``, the table has columns without boxes, and one line for each row.
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
    """Print lines of text.

    On a terminal, long lines are wrapped with their indentation.

    With ``plain``, each line is a comment, ``# …``, and empty lines are left out.
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
