"""What an engine says about its own work, in the terminal: how much of a run a fault re-executes, and what is off and why.

Plain mode as in `terminal`: one table of columns separated by two or more blanks, every other line behind ``# ``. Names
come from outside and are never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from unsilent.explained import Explanation, Holding, Shortcut, Work
from unsilent.render.console import NAME_WIDTH, print_columns, print_lines
from unsilent.report.text import clean, counted, folded, seconds, short
from unsilent.sizes import human_bytes

if TYPE_CHECKING:
    from rich.console import Console

TOP = 20
"""Layers shown; the rest is counted."""
COLUMNS = ("elements", "faults %", "operations %", "CPU %")
REASONS = 8
"""Different reasons told."""


def render_explanation(explanation: Explanation, console: Console, plain: bool) -> None:
    """Write the explanation to the console."""
    rows, more = shown_rows(explanation.rows)
    print_lines(console, header(explanation), plain, "bold")
    if plain:
        _plain(console, rows)
    else:
        _rich(console, rows)
    print_lines(console, footer(explanation, more), plain)


def header(said: Explanation) -> list[str]:
    """What is recorded and what a fault costs on average."""
    model = next((row for row in said.rows if row.level == "model"), None)
    lines = [f"{clean(said.workload)}: what a fault makes the engine run again"]
    run = f"a plain run ({seconds(said.golden_seconds)})"
    if said.engine == "plain":
        return [*lines, f"the plain engine re-executes everything: {run} of each batch that a fault acts in"]
    if not said.recorded:
        lines.append(f"nothing could be recorded, so everything is re-executed: {run}")
    elif model is not None:
        took, again = _percent(model.seconds), _percent(model.remade)
        again = f", {again} of these {took} % to make golden values again that are not held" if model.remade else ""
        lines.append(
            f"on average over elements, a fault re-executes at most {_percent(model.operations)} % of the operations and "
            f"takes at most {took} % of the CPU time of {run}{again}"
        )
    setup = "" if said.setup_seconds is None else f", recorded and checked in {seconds(said.setup_seconds)} CPU"
    lines.append(f"{said.recorded} of {counted(said.batches, 'batch')} on tape, {said.operations:,} operations{setup}")
    return lines


def footer(said: Explanation, more: int) -> list[str]:
    """Memory, shortcuts, and why what is off is off."""
    lines = [f"… and {counted(more, 'more layer')}: --json has every row."] if more else []
    if said.recorded:
        lines.append(_memory(said.holding, said.remade))
    lines += [_shortcut(s) for s in said.shortcuts]
    batches: dict[str, list[int]] = {}
    for reason in said.reasons:
        batches.setdefault(reason.why, []).append(reason.batch)
    for why, numbers in list(batches.items())[:REASONS]:
        noun = "batch" if len(numbers) == 1 else "batches"
        lines.append(f"{noun} {_numbers(numbers)} plainly: {clean(why)}")
    if len(batches) > REASONS:
        lines.append(f"… and {counted(len(batches) - REASONS, 'more reason')}: --json has all.")
    return lines + [f"note: {clean(note)}" for note in said.notes]


def shown_rows(rows: Sequence[Work]) -> tuple[list[Work], int]:
    """Components each followed by its dearest layers, then the model; and how many layers are left out.

    A component that is one layer of the same name is said already.
    """
    layers = [r for r in rows if r.level == "layer"]
    alone = {r.name for r in rows if r.level == "component"}
    layers = [r for r in layers if not (r.name == r.parent and r.name in alone)]
    kept = {id(r) for r in sorted(layers, key=lambda r: -r.seconds)[:TOP]}
    found: list[Work] = []
    for row in (r for r in rows if r.level == "component"):
        found += [row, *(r for r in layers if id(r) in kept and r.parent == row.name)]
    return [*found, *(r for r in rows if r.level == "model")], len(layers) - len(kept)


def _memory(holding: Holding, remade: float) -> str:
    several = holding.sharers > 1
    text = f"golden values: {human_bytes(holding.held)} held" + (
        f" in each of {holding.sharers} workers" if several else ""
    )
    if holding.announced is not None:
        text += f" of {human_bytes(holding.announced)} allowed" + (" to all" if several else "")
    if holding.held < holding.wanted:
        text += f", {human_bytes(holding.wanted)} wanted" + (" in each" if several else "")
    if remade:
        text += f"; making the rest again takes {_percent(remade)} % of a run a trial"
    if holding.enough is not None:
        text += f", which --memory '{human_bytes(holding.enough, up=True)}' avoids"
    return text


def _shortcut(shortcut: Shortcut) -> str:
    return f"{clean(shortcut.name)}: {'on' if shortcut.on else 'off'}" + (shortcut.why and f" ({clean(shortcut.why)})")


def _numbers(numbers: Iterable[int]) -> str:
    """``0-3, 7``; of many, the first ones."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:REASONS]) + (", …" if len(texts) > REASONS else "")


def _percent(share: float) -> str:
    """Two digits, rounded up at the small end so that some work never reads as none."""
    value = 100 * share
    if value == 0 or value >= 10:
        return f"{value:.0f}"
    return "<0.01" if value < 0.01 else f"{value:.2g}"


def _cells(row: Work) -> list[str]:
    return [f"{row.elements:,}", *(_percent(share) for share in (row.share, row.operations, row.seconds))]


def _plain(console: Console, rows: Sequence[Work]) -> None:
    names = ["level", "target", "parent", "elements", "faults%", "operations%", "cpu%"]
    table = [[row.level, clean(row.name), clean(row.parent), str(row.elements), *_cells(row)[1:]] for row in rows]
    print_columns(console, names, table)


def _rich(console: Console, rows: Sequence[Work]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [_cells(row) for row in rows]
    wide = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    width = max(14, min(console.width - sum(wide) - 3 * (len(COLUMNS) + 1) - 1, NAME_WIDTH))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("target", overflow="fold", min_width=14)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        indent = "  " if row.level == "layer" else ""
        name = indent + f"\n{indent}".join(folded(short(clean(row.name), NAME_WIDTH), width - len(indent)))
        if row.level == "model" and number:
            table.add_section()
        style = "bold" if row.level == "model" else ""
        table.add_row(*(Text(cell, style=style) for cell in (name, *cells[number])))
    console.print(table)
