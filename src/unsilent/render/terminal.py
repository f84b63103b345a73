"""A result in the terminal: what was asked, a table of components, the most vulnerable layers, the notes.

Plain mode writes one table of columns separated by two or more spaces, without blanks inside a column,
colour or boxes, and every other line behind ``# ``: fit for pipes. There ``sdc`` and ``due`` are counts and
``deciding`` is the number of faults that made an output wrong, for which a star stands elsewhere. Names come
from outside and are never read as rich markup (everything is built from `rich.text.Text`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsilent.render.console import print_columns, print_lines, print_table
from unsilent.render.fit import NEEDS, applies, check_rate, fit_of
from unsilent.render.headline import sentence
from unsilent.render.info import is_drawn, itself, limits_text, name_of, pooled, rank, rows_of
from unsilent.report.text import clean, counted, listed, part, seconds, share, shown
from unsilent.studies.pvf.records import PvfResult, PvfRow

if TYPE_CHECKING:
    from rich.console import Console

TOP = 20
"""Rows of layers (and tensors) shown; the rest is counted."""

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
    print_lines(console, header(result), plain, "bold")
    if plain:
        _plain(console, [*main, *layers], fit_per_bit, result.measure.lower())
    else:
        print_table(console, main, columns, _cells)
        if layers:
            title = f"The {TOP} most vulnerable layers" if len(layers) == TOP else "Layers"
            own = itself(result)
            print_table(console, layers, columns, _cells, title, lambda row: name_of(row, own))
        if fit_per_bit is not None:
            rate, single = fit_per_bit, [row for row in main if row.flips == 1]
            title = f"Failures per 1e9 hours at {rate:g} per bit (FIT)"
            print_table(console, single, FIT_COLUMNS, lambda row: _fit_cells(row, rate), title)
    lines = [f"note: no FIT: {NEEDS}"] if lost else _no_fit(main, fit_per_bit)
    if plain and pooled(result):
        lines.append(POOLED_TEXT.format(measure=result.measure.lower()))
    print_lines(console, [*lines, *footer(result, more)], plain)


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
    joint = ", differences rest on joint intervals" if is_drawn(result.rows) else ""
    lines.append(
        f"{limits_text(result.rows, result.confidence)}, n counts faults{joint}; "
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


COLUMNS = ("interval %", "n", "silent", "due %")
"""Behind the number of flips and the estimate."""
FIT_COLUMNS = ("bits", "FIT", "interval")


def _cells(row: PvfRow) -> list[str]:
    text = shown(row.estimate, row.low, row.high)
    flips = "–" if row.flips is None else str(row.flips)
    value = text.estimate
    return [flips, value, text.limits, f"{row.n:,}", share(row.silent_share), due_text(row)]


def _fit_cells(row: PvfRow, fit_per_bit: float) -> list[str]:
    found = fit_of(row, fit_per_bit)
    return [f"{row.bits:,}", found.text.estimate, found.limits]


def due_text(row: PvfRow) -> str:
    """PVF by detectable errors alone, in percent, weighted like the PVF; ``–`` where nothing was incorrect."""
    if row.estimate is None or row.silent_share is None:
        return "–"
    return part(1 - row.silent_share, row.estimate, row.low, row.high)


def _plain(console: Console, rows: Sequence[PvfRow], fit_per_bit: float | None, measure: str) -> None:
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
    print_columns(console, names, [_plain_cells(row, fit_per_bit) for row in rows])


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
