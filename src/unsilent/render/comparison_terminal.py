"""A comparison in the terminal: what A and B are, both numbers of each row, difference, ratio and whether they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsilent.render.comparison_info import (
    TOP,
    cells,
    headline,
    how_many,
    limits,
    missing,
    pairing,
    rows_at,
    second_line,
    sentence,
    top_rows,
)
from unsilent.render.console import NAME_LEAST, print_columns, print_lines, print_table, room
from unsilent.render.info import itself, name_of
from unsilent.render.terminal import meaning
from unsilent.report.text import clean, counted, factor, flips_count, short, shown, signed
from unsilent.studies.pvf.comparison import Change, ComparedRow, Comparison
from unsilent.studies.pvf.records import PvfResult

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("A %", "B %", "B - A", "interval", "B / A", "interval", "p", "B is")
RATIO = 4
"""Where the two columns of the ratio begin."""
PLAIN = (
    *("level", "target", "parent", "flips", "a%", "a_n", "b%", "b_n", "points", "low", "high"),
    *("ratio", "ratio_low", "ratio_high", "p", "b_is", "paired"),
)
NO_ROOM = "ratios B / A: widen the terminal, or --plain"
VALUE = 40
"""Characters of a value that is told as changed."""


def render_comparison(found: Comparison, console: Console, plain: bool) -> None:
    """Write the comparison to the console."""
    main = [*rows_at(found, "component"), *rows_at(found, "model")]
    layers, more = top_rows(found, repeats=plain)
    print_lines(console, header(found), plain, "bold")
    if plain:
        print_columns(console, PLAIN, [_plain(row) for row in [*main, *layers]])
    else:
        _tables(found, console, main, layers)
    print_lines(console, footer(found, more), plain)


def _tables(found: Comparison, console: Console, main: Sequence[ComparedRow], layers: Sequence[ComparedRow]) -> None:
    """Without columns that would say the same in every row, and without ratios where there is no room for them."""
    rows = [*main, *layers]
    with_flips = len({row.flips for row in found.rows}) > 1
    with_pairs = any(row.paired for row in found.rows)

    def line(names_or_cells: Sequence[str], flips: str, paired: str, ratios: bool) -> list[str]:
        found = [*names_or_cells[:RATIO], *names_or_cells[RATIO if ratios else RATIO + 2 :]]
        return [*([flips] if with_flips else []), *found, *([paired] if with_pairs else [])]

    def cells_of(row: ComparedRow, ratios: bool) -> list[str]:
        return line(cells(row), flips_count(row.flips), "yes" if row.paired else "no", ratios)

    ratios = room(console, line(COLUMNS, "flips", "paired", True), [cells_of(r, True) for r in rows]) >= NAME_LEAST
    columns = line(COLUMNS, "flips", "paired", ratios)
    print_table(console, main, columns, lambda row: cells_of(row, ratios))
    if layers:
        own = itself(found.a)
        title = f"The {TOP} layers least like chance" if len(layers) == TOP else "Layers"
        print_table(console, layers, columns, lambda r: cells_of(r, ratios), title, lambda r: name_of(r.a, own))
    if not ratios:
        print_lines(console, [NO_ROOM], plain=False)


def header(found: Comparison) -> list[str]:
    """What is compared, and the finding."""
    a = found.a
    return [
        f"{meaning(a)}: B against A, {clean(a.fault)}",
        f"A: {_campaign(a)}",
        f"B: {_campaign(found.b)}",
        f"unit {clean(a.unit)}, judge {clean(a.judge)}, law {clean(a.law)}, per {clean(a.per)}",
        *([f"not the same: {', '.join(map(change_text, found.changes))}"] if found.changes else []),
        *(sentence(parts) for parts in (headline(found), second_line(found)) if parts),
    ]


def footer(found: Comparison, more: int) -> list[str]:
    """What is not shown, how to read it, and what limits it."""
    lines = [f"… and {counted(more, 'more row')}: --json and the HTML report have every row."] if more else []
    lines += missing(found)
    lines.append(f"{'; '.join(how_many(found))} (p after Holm's correction for the rows of a level)")
    lines.append(f"{limits(found)}, B - A in percentage points; {pairing(found)}")
    return lines + [f"note: {clean(note)}" for note in found.notes]


def change_text(change: Change) -> str:
    """``dtype (none, bfloat16)``; of hashes the first digits tell them apart."""
    return f"{clean(change.what)} ({_value(change.a)}, {_value(change.b)})"


def _value(text: str) -> str:
    hashed = len(text) >= 16 and set(text) <= set("0123456789abcdef")
    return text[:8] if hashed else short(clean(text), VALUE)


def _campaign(result: PvfResult) -> str:
    struck = f"{result.trials_done:,} trials on {counted(result.samples, 'sample')}"
    return f"{clean(result.store)}, {clean(result.workload)} at {clean(result.at)}, {struck}, {clean(result.dtype)}"


def _plain(row: ComparedRow) -> list[str]:
    a, b = (shown(r.estimate, r.low, r.high).estimate for r in (row.a, row.b))
    apart = signed(row.difference.estimate, row.difference.low, row.difference.high)
    times = factor(row.ratio.estimate, row.ratio.low, row.ratio.high)
    *_, p, differs = cells(row)
    names = [row.level, clean(row.target), clean(row.parent), flips_count(row.flips)]
    told = [a, str(row.a.n), b, str(row.b.n), apart.estimate, apart.low, apart.high]
    return [*names, *told, times.estimate, times.low, times.high, p, differs or "-", "yes" if row.paired else "no"]
