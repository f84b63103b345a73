"""Two campaigns of struck trainings as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unsilent.render.console import print_columns, print_lines
from unsilent.report.text import clean, shown, signed
from unsilent.statistics.intervals import Interval
from unsilent.studies.trainings.records import Contrast

if TYPE_CHECKING:
    from rich.console import Console

HEADS = ("outcome", "A %", "B %", "B - A, points")
JOINT = "limits of A and of B are for each row by itself; those of B - A hold for all {} rows together ({:.4g} %, Bonferroni)"


def render_beside(found: Sequence[Contrast], console: Console, plain: bool) -> None:
    """Write a comparison to the console."""
    first = found[0]
    lines = [
        f"A: {clean(first.first)}",
        f"B: {clean(first.second)}",
        JOINT.format(len(found), 100 * first.difference.confidence),
    ]
    print_lines(console, lines, plain)
    rows = [[c.name, _share(c.one), _share(c.other), _signed(c.difference)] for c in found]
    if plain:
        print_columns(console, HEADS, rows)
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def beside_json(found: Sequence[Contrast]) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "a": found[0].first,
        "b": found[0].second,
        "method": found[0].difference.method,
        "rows": [
            {"outcome": c.name, "a": _json(c.one), "b": _json(c.other), "difference": _json(c.difference)}
            for c in found
        ],
    }


def _share(interval: Interval) -> str:
    text = shown(interval.estimate, interval.low, interval.high)
    return f"{text.estimate}{text.behind}"


def _signed(interval: Interval) -> str:
    text = signed(interval.estimate, interval.low, interval.high)
    return f"{text.estimate}{text.behind}"


def _json(interval: Interval) -> dict[str, Any]:
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high, "n": interval.n}
