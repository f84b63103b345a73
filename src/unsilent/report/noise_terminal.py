"""Run-to-run variation in the terminal: a table of variants, of groups, of switches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from unsilent.report.console import print_columns, print_lines
from unsilent.report.noise_info import (
    MEASURES,
    cells,
    effect_how,
    effect_text,
    findings,
    group_cell,
    headline,
    how,
    spreading,
)
from unsilent.report.noise_json import rows
from unsilent.report.text import clean, counted
from unsilent.studies.noise_records import NoiseResult

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = ("variant", "measure", "of", "estimate", "low", "high", "n")
GROUPS = 24
"""Groups in the table; the JSON and the page have all."""


def render_noise(result: NoiseResult, console: Console, plain: bool) -> None:
    """Write a result to the console; plain mode has one line for each estimate."""
    print_lines(console, [headline(result), *findings(result)], plain, "bold")
    if plain:
        lines = [
            [_text(row[key]) for key in ("variant", "measure", "target", "estimate", "low", "high", "n")]
            for row in plain_rows(result)
        ]
        print_columns(console, PLAIN, lines)
        print_lines(
            console, [f"switch {e.switch}: {effect_text(e.changes)}: {effect_how(e)}" for e in result.effects], plain
        )
    else:
        _tables(result, console)
    print_lines(console, how(result), plain)


def plain_rows(result: NoiseResult) -> Iterator[dict[str, Any]]:
    """One row for each estimate, as JSON has them, and before those of a variant what else its table tells, without limits."""
    estimates = list(rows(result))
    for one in result.variants:
        told: list[tuple[str, str, float | int]] = [("distinct_states", "all", one.distinct)]
        told.append(("accuracy_mean", "all", one.accuracy.mean))
        if one.loss is not None:
            told.append(("loss_mean", "all", one.loss.mean))
        told += [("churn_twin_least", "all", min(one.twin_churn)), ("churn_twin_most", "all", max(one.twin_churn))]
        for g in one.groups:
            told += [("group_samples", g.name, g.n), ("group_by_size", g.name, g.by_size)]
            told.append(("group_p_corrected", g.name, g.corrected))
        empty: dict[str, Any] = {"low": None, "high": None, "n": one.n, "variant": one.name}
        yield from (empty | {"measure": measure, "target": target, "estimate": x} for measure, target, x in told)
        yield from (row for row in estimates if row["variant"] == one.name)


def _tables(result: NoiseResult, console: Console) -> None:
    columns = [cells(found) for found in result.variants]
    body = [[name, *(column[i] for column in columns)] for i, name in enumerate(MEASURES)]
    _table(console, ["", *(clean(found.name) for found in result.variants)], body)
    noisy = [found for found in spreading(result) if found.groups]
    if noisy:
        names = [group.name for group in noisy[0].groups]
        body = [
            [f"{clean(name)} ({noisy[0].groups[i].n})", *(group_cell(found.groups[i]) for found in noisy)]
            for i, name in enumerate(names[:GROUPS])
        ]
        title = "sd of a group's error in points, of what a random group of its size has; * beyond it (5 %, Holm)"
        _table(console, ["group (samples)", *(clean(found.name) for found in noisy)], body, title)
        if len(names) > GROUPS:
            print_lines(console, [f"and {counted(len(names) - GROUPS, 'group')} more in the report"], False)
    if result.effects:
        lines = [[e.switch, e.kind, effect_text(e.changes), effect_how(e)] for e in result.effects]
        _table(console, ["switch", "kind", "changes bits", ""], lines, "each switch alone", left=True)


def _table(
    console: Console, heads: Sequence[str], body: Sequence[Sequence[str]], title: str = "", left: bool = False
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", padding=(0, 1))
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if left or not number else "right", overflow="fold")
    for line in body:
        table.add_row(*map(Text, line))
    console.print(table)


def _text(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else clean(value)
