"""``unsilent faults --accelerator``: the weighted fault models that follow from a description, and its failure rate."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from unsilent.cli.tables import show_table

if TYPE_CHECKING:
    from unsilent.faults.hardware.accelerator import Accelerator
    from unsilent.faults.hardware.description import Table


def show(which: str, as_json: bool) -> int:
    """Print an accelerator by its name or file; raises ``UsageError``."""
    from unsilent.faults.hardware.reading import accelerator

    result = accelerator(which)
    if as_json:
        rows = [asdict(row) for row in result.table()]
        whole = result.description.model_dump(exclude_none=True)
        print(json.dumps({"accelerator": whole, "rows": rows, "fit": result.fit, "no_fit": result.no_fit}, indent=2))
        return 0
    about = result.description
    print(f"{about.name}: {about.description}")
    for source in about.sources:
        print(f"  source: {source}")
    if about.remark:
        print(f"  {about.remark}")
    for title, table in (("array", about.array), ("dtypes", about.dtypes), ("flip-flops", about)):
        print(f"{title}: {_facts(table)}")
    print()
    _groups(result)
    print()
    show_table(
        [(r.group, r.name, r.operand, r.pattern, r.values, r.reach, r.held, f"{r.weight:.4f}") for r in result.table()],
        ("flip-flops", "fault model", "operand", "pattern", "values", "seen by", "held as", "weight"),
        whole=("flip-flops", "fault model", "weight"),
    )
    print()
    for group, split in {row.group: row.split for row in result.table() if row.split}.items():
        print(f"How {group} divides its weight among its fault models: {split}.")
    print(f"FIT: {result.fit:.2f}" if result.fit is not None else f"FIT: none, for {result.no_fit}.")
    return 0


def _groups(result: Accelerator) -> None:
    rows = []
    weights = {name: sum(e.weight for e in result.entries if e.group == name) for name in result.description.groups}
    for name, group in result.description.groups.items():
        unmasked, fit = group.unmasked, result.fit_of(name)
        rows.append(
            (
                name, f"{group.share:g}", f"{group.activeness:g}", "" if unmasked is None else f"{unmasked:g}",
                f"{weights[name]:.4f}", "" if fit is None else f"{fit:.3f}", group.graded, group.remark,
            )
        )  # fmt: skip
    show_table(
        rows, ("flip-flops", "share", "active", "unmasked", "weight", "FIT", "evidence", "remark"), ("flip-flops",)
    )


def _facts(table: Table) -> str:
    """The facts of a table with their grades."""
    given = {fact: getattr(table, fact) for fact in table.facts}
    return ", ".join(f"{k} {str(v).lower()} ({table.grade(k)})" for k, v in given.items() if v is not None)
