"""A result in the terminal: what was asked, a table of components, the most vulnerable layers, the notes.

Plain mode writes one table of columns separated by two or more spaces, without blanks inside a column,
colour or boxes, and every other line behind ``# ``: fit for pipes. There ``sdc`` and ``due`` are counts and
``deciding`` is the number of faults that made an output wrong, for which a star stands elsewhere. Names come
from outside and are never read as rich markup (everything is built from `rich.text.Text`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsilent.report.fit import NEEDS, applies, check_rate, fit_of
from unsilent.report.headline import sentence
from unsilent.report.info import few, itself, name_of, pooled, rank, rows_of
from unsilent.report.text import clean, counted, folded, listed, part, seconds, share, short, shown
from unsilent.studies.records import PvfResult, PvfRow

if TYPE_CHECKING:
    from rich.console import Console

TOP = 20
"""Rows of layers (and tensors) shown; the rest is counted."""
NAME_WIDTH, NAME_LEAST = 48, 14
FEW_TEXT = "fewer than ten faults decide this row: its interval may cover less than it says"

POOLED_TEXT = (
    "rows over several targets: sdc, due and deciding are plain sums, "
    "{measure}% and silent are weighted by the law's shares"
)
"""Where counts stand beside shares; ``measure`` is the name of the column of estimates."""


def render(result: PvfResult, console: Console, plain: bool, *, fit_per_bit: float | None = None) -> None:
    """Write the result to the console; ``fit_per_bit`` adds a column of FIT for single flips."""
    lost = fit_per_bit is not None and not applies(result)
    fit_per_bit = None if fit_per_bit is None or lost else check_rate(fit_per_bit)
    main = [*rows_of(result, "component"), *rows_of(result, "model")]
    layers, more = top_layers(result, repeats=plain)
    columns = ("flips", f"{result.measure} %", *COLUMNS)
    _lines(console, header(result), plain, "bold")
    if plain:
        _plain(console, [*main, *layers], fit_per_bit, result.measure.lower())
    else:
        _rich(console, main, columns, _cells)
        if layers:
            title = f"The {TOP} most vulnerable layers" if len(layers) == TOP else "Layers"
            own = itself(result)
            _rich(console, layers, columns, _cells, title, lambda row: name_of(row, own))
        if fit_per_bit is not None:
            rate, single = fit_per_bit, [row for row in main if row.flips == 1]
            title = f"Failures per 1e9 hours at {rate:g} per bit (FIT)"
            _rich(console, single, FIT_COLUMNS, lambda row: _fit_cells(row, rate), title)
    lines = [f"note: no FIT: {NEEDS}"] if lost else _no_fit(main, fit_per_bit)
    if any(few(row) for row in [*main, *layers]):
        lines.append(f"{'deciding below 10' if plain else '*'}: {FEW_TEXT}")
    if plain and pooled(result):
        lines.append(POOLED_TEXT.format(measure=result.measure.lower()))
    _lines(console, [*lines, *footer(result, more)], plain)


def header(result: PvfResult) -> list[str]:
    """What was asked, and the finding in one sentence."""
    accuracy = accuracy_text(result.info)
    trials = f"{result.trials_done:,} trials"
    if result.trials_done < result.trials_planned:
        trials += f" of {result.trials_planned:,} planned"
    return [
        f"{clean(result.workload)}: {meaning(result)}, {clean(result.fault)} at {clean(result.at)}",
        f"{trials} on {counted(result.samples, 'sample')} in {counted(result.batches, 'batch')}{accuracy and ', '}{accuracy}; "
        f"unit {clean(result.unit)}, judge {clean(result.judge)}, law {clean(result.law)}, seed {result.seed}",
        sentence(result),
    ]


def meaning(result: PvfResult) -> str:
    """What the estimates are, spelled out."""
    if result.transient:
        return f"probability of an incorrect output given a fault, {result.measure}"
    return "parameter vulnerability factor (PVF)"


def footer(result: PvfResult, more: int) -> list[str]:
    """What is not shown, what limits the numbers, and what they cost."""
    rest = f"… and {counted(more, 'more row')} of layers and bits: --json and the HTML report have every row."
    lines = [rest] if more else []
    lines += [f"note: {clean(note)}" for note in result.notes]
    lines.append(
        f"{100 * result.confidence:g} % intervals, n counts faults, differences rest on joint intervals; "
        f"{seconds(result.seconds)} ({seconds(result.cpu_seconds)} CPU) "
        f"on {clean(result.device)}, {dtype_text(result)}"
    )
    return lines


def dtype_text(result: PvfResult) -> str:
    """The dtype of the model's numbers, or what was struck among the values of a run."""
    return clean(result.dtype) + (" struck" if result.transient else "")


def accuracy_text(info: Mapping[str, Any]) -> str:
    """``accuracy 0.95``, where the workload states it as a number or as ``{"name": …, "value": …}``."""
    found = info.get("accuracy")
    name, value = "accuracy", found
    if isinstance(found, Mapping):
        name, value = str(found.get("name", name)), found.get("value")
    if value is None:
        return ""
    return clean(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")


def top_layers(result: PvfResult, repeats: bool = False) -> tuple[list[PvfRow], int]:
    """The `TOP` most vulnerable layer and tensor rows, grouped by component, and how many rows (bits too) are left.

    A component that is one layer of the same name and numbers is said already, unless ``repeats``.
    """
    said = set() if repeats else {_numbers(row) for row in rows_of(result, "component")}
    rows = [*rows_of(result, "layer"), *rows_of(result, "tensor")]
    rows = [row for row in rows if row.target != row.parent or _numbers(row) not in said]
    kept = sorted((row for row in rows if row.estimate is not None), key=rank, reverse=True)[:TOP]
    groups = list(dict.fromkeys(row.parent for row in kept))
    return sorted(kept, key=lambda row: groups.index(row.parent)), len(rows) - len(kept) + len(rows_of(result, "bit"))


def _numbers(row: PvfRow) -> tuple[object, ...]:
    return row.target, row.flips, row.estimate, row.low, row.high, row.n, row.elements


def _no_fit(rows: Sequence[PvfRow], fit_per_bit: float | None) -> list[str]:
    """Why some rows have no FIT."""
    if fit_per_bit is None:
        return []
    found = [(fit_of(row, fit_per_bit), row) for row in rows if row.flips == 1]
    names = [clean(row.target) for fit, row in found if fit.reason]
    reasons = dict.fromkeys(fit.reason for fit, _ in found if fit.reason)
    return [f"note: no FIT for {listed(names)}: {', '.join(reasons)}"] if names else []


def _lines(console: Console, lines: Sequence[str], plain: bool, first: str = "") -> None:
    from rich.text import Text

    for number, line in enumerate(lines):
        style = first if number == 0 and not plain else ""
        console.print(Text(f"# {line}" if plain else line, style=style), soft_wrap=plain)


def _rich(
    console: Console,
    rows: Sequence[PvfRow],
    columns: Sequence[str],
    cells_of: Callable[[PvfRow], list[str]],
    title: str = "",
    name_of: Callable[[PvfRow], str] = lambda row: row.target,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    gap = 1 if console.width >= 100 else 0  # beside the one that the box has
    cells = [cells_of(row) for row in rows]
    wide = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    room = console.width - sum(wide) - (2 * gap + 1) * (len(columns) + 1) - 1
    width = max(NAME_LEAST, min(room, NAME_WIDTH))
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


COLUMNS = ("interval %", "n", "silent", "due %")
"""Behind the number of flips and the estimate."""
FIT_COLUMNS = ("bits", "FIT", "interval")


def _cells(row: PvfRow) -> list[str]:
    text = shown(row.estimate, row.low, row.high)
    flips = "–" if row.flips is None else str(row.flips)
    value = text.estimate + ("*" if few(row) else "")
    return [flips, value, text.limits, f"{row.n:,}", share(row.silent_share), due_text(row)]


def _fit_cells(row: PvfRow, fit_per_bit: float) -> list[str]:
    found = fit_of(row, fit_per_bit)
    return [f"{row.bits:,}", found.text.estimate + ("*" if few(row) and not found.reason else ""), found.limits]


def due_text(row: PvfRow) -> str:
    """PVF by detectable errors alone, in percent, weighted like the PVF; ``–`` where nothing was incorrect."""
    if row.estimate is None or row.silent_share is None:
        return "–"
    return part(1 - row.silent_share, row.estimate, row.low, row.high)


def _plain(console: Console, rows: Sequence[PvfRow], fit_per_bit: float | None, measure: str) -> None:
    from rich.text import Text

    names = [
        "level",
        "target",
        "parent",
        "flips",
        f"{measure}%",
        "low%",
        "high%",
        "n",
        "sdc",
        "due",
        "silent",
        "deciding",
    ]
    if fit_per_bit is not None:
        names += ["fit", "fit_low", "fit_high"]
    table = [names, *([_joined(cell) for cell in _plain_cells(row, fit_per_bit)] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    for line in table:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        console.print(Text(text), soft_wrap=True)


def _plain_cells(row: PvfRow, fit_per_bit: float | None) -> list[str]:
    text = shown(row.estimate, row.low, row.high)
    flips = "–" if row.flips is None else str(row.flips)
    cells = [row.level, clean(row.target), clean(row.parent), flips, text.estimate, text.low, text.high]
    cells += [str(row.n), str(row.sdc), str(row.due), share(row.silent_share), str(row.incorrect_trials)]
    if fit_per_bit is None:
        return cells
    if row.flips != 1:
        return [*cells, "", "", ""]
    fit = fit_of(row, fit_per_bit).text
    return [*cells, *(cell.replace(",", "") for cell in (fit.estimate, fit.low, fit.high))]


def _joined(cell: str) -> str:
    """One word: blanks become ``_``, ``-`` for nothing, so that columns can be split at blanks."""
    return "_".join(cell.replace("< ", "<").replace(" %", "%").split()) or "-"
