"""Struck trainings in the terminal: tables of classes, of groups, of what foretells harm, of the guard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from unsilent.render.console import print_columns, print_lines
from unsilent.render.training_cells import (
    caught_cells,
    class_cells,
    condition_cells,
    example,
    group_cells,
    ordered_groups,
    part_cells,
    thresholds,
    told,
    worst_first,
)
from unsilent.render.training_info import findings, headline, how
from unsilent.render.training_json import rows
from unsilent.report.text import clean, short
from unsilent.studies.trainings.records import TrainingResult

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = ("group", "of", "measure", "estimate", "low", "high", "n")
GROUPS = 16
"""Rows of a table; the JSON and the page have all."""
NAME = 36
"""Characters of a name."""
EXAMPLE = 28
HEADS = {
    "classes": ("class", "trials", "different", "share %", "interval", "example", "what it is"),
    "group": ("trials", "different %", "harmful %", "latent %", "not masked"),
    "conditions": (
        "largest of",
        "factor",
        "hit",
        "missed",
        "false",
        "clear",
        "loud",
        "not",
        "sensitivity %",
        "specificity %",
        "different %",
    ),
    "parts": ("target", "of it", "elements", "trials", "failed", "PVF %", "interval", "different %"),
    "guard": ("faults", "n", "caught", "share %", "interval", "golden's bits"),
}
CONDITIONS = (
    "what foretells latent harm: hit and missed are latent trials with and without a value above factor x golden's "
    "largest within two steps, false and clear harmless ones, loud and not those whose harm shows itself; different: "
    "sensitivity among trials that are latent harm by implementation noise alone"
)


def render_training(result: TrainingResult, console: Console, plain: bool) -> None:
    """Write a result to the console; plain mode has one line for each estimate."""
    print_lines(console, [headline(result), *findings(result)], plain, "bold")
    if plain:
        print_columns(console, PLAIN, [[_text(row[key]) for key in _KEYS] for row in plain_rows(result)])
    else:
        _tables(result, console)
    given = ", ".join(f"{name} {value}" for name, value, _, _ in thresholds(result))
    print_lines(console, [*how(result), f"thresholds: {given}; the page says what they are"], plain)


_KEYS = ("group", "target", "measure", "estimate", "low", "high", "n")


def plain_rows(result: TrainingResult) -> Iterator[dict[str, Any]]:
    """One row for each estimate, as JSON has them, then the counts and the cost, which have no limits."""
    yield from rows(result)
    empty: dict[str, Any] = {"low": None, "high": None}
    for kind, groups in (("all", (result.whole,)), *result.groups.items()):
        for group in groups:
            for name, count in group.counts.items():
                row = {
                    "group": kind,
                    "target": group.name,
                    "measure": f"{name}_trials",
                    "estimate": count,
                    "n": group.n,
                }
                yield row | empty
    for c in result.conditions:
        for name in ("hit", "missed", "false", "clear", "loud_with", "loud_without"):
            row = {"group": "condition", "target": f"{c.kind} above {c.factor:g}", "measure": f"{name}_trials"}
            yield row | empty | {"estimate": getattr(c, name), "n": c.hit + c.missed + c.false + c.clear}
    for name in ("steps", "bound", "seconds", "per_hour"):
        row = {"group": "cost", "target": "all", "measure": name, "estimate": getattr(result.cost, name)}
        yield row | empty | {"n": result.n}


def _tables(result: TrainingResult, console: Console) -> None:
    body = []
    for group in result.classes:
        where = short(example(result, group.name), EXAMPLE)
        body.append([*class_cells(group), where, told(group.name, result, brief=True)])
    _table(console, HEADS["classes"], body, left=(5, 6))
    for kind, groups in ordered_groups(result).items():
        if len(groups) < 2:
            continue
        kept = groups if len(groups) <= GROUPS else worst_first(groups)[:GROUPS]
        cells = [[short(clean(g.name), NAME), *group_cells(g)] for g in kept]
        _table(console, (clean(kind), *HEADS["group"]), cells, left=(5,))
        if len(groups) > len(kept):
            print_lines(
                console, [f"the {GROUPS} most harmful, and {len(groups) - len(kept):,} more in the report"], False
            )
    if result.conditions:
        _table(console, HEADS["conditions"], [condition_cells(c) for c in result.conditions], CONDITIONS)
    if result.parts:
        _parts(result, console)
    if result.guard is not None:
        found = result.guard
        caught = [caught_cells(one) for one in (found.different, found.all, found.largest, *found.sizes, *found.groups)]
        title = "under the guard; sizes (of harmful faults): largest value written, in multiples of what was usual in the tensor"
        _table(console, HEADS["guard"], caught, title)


def _parts(result: TrainingResult, console: Console) -> None:
    parts, left = result.parts, len(result.parts) - GROUPS
    if left > 0:
        parts = tuple(sorted(parts, key=lambda part: -(part.pvf.estimate or 0.0))[:GROUPS])
    _table(
        console,
        HEADS["parts"],
        [part_cells(part) for part in parts],
        "training PVF; different: the same by implementation noise alone",
        left=(1,),
    )
    if left > 0:
        print_lines(console, [f"the {GROUPS} most vulnerable, and {left:,} more in the report"], False)


def _table(
    console: Console,
    heads: Sequence[str],
    body: Sequence[Sequence[str]],
    title: str = "",
    left: Sequence[int] = (),
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", padding=(0, 1))
    for number, head in enumerate(heads):
        side = number == 0 or number in left
        table.add_column(Text(head), justify="left" if side else "right", overflow="fold", no_wrap=number == 0)
    for line in body:
        table.add_row(*map(Text, line))
    console.print(table)


def _text(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else clean(value)
