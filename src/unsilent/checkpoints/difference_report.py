"""What differs between two checkpoints, as a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unsilent.checkpoints.comparing import ADDED, DIFFERS, MISSING, SAME, TensorDifference
from unsilent.report.model import Column, Report, Section, Table, TableRow
from unsilent.report.text import count_text


def difference_report(first: Path, second: Path, differences: Sequence[TensorDifference]) -> Report:
    """The report of `unsilent.checkpoints.comparing.compare`."""
    changed = [d for d in differences if d.status != SAME]
    elements, bits = (sum(getattr(d, field) or 0 for d in differences) for field in ("elements", "bits"))
    absent = [d for d in changed if d.status in (MISSING, ADDED)]
    both, unequal = len(differences) - len(absent), [d for d in changed if d not in absent]
    other = [d for d in unequal if d.status != DIFFERS]
    headline = f"All {both:,} tensors and numbers that both have are identical."
    if unequal:
        headline = (
            f"{len(unequal):,} of {both:,} tensors and numbers that both have differ: {count_text(elements, 'element')}, "
            f"{count_text(bits, 'bit')}" + (f"; {len(other):,} cannot be compared element by element" if other else "") + "."
        )  # fmt: skip
    findings = []
    for path, status in ((first, MISSING), (second, ADDED)):
        only = [d.name for d in absent if d.status == status]
        if only:
            shown = ", ".join(f"`{name}`" for name in only[:5]) + (", …" if len(only) > 5 else "")
            findings.append(f"{len(only):,} tensors and numbers are only in {path}: {shown}")
    heads = (
        Column("tensor", left_aligned=True), Column("what", left_aligned=True), Column("elements", "number"),
        Column("bits", "number"), Column("largest relative change", "number", digits=".3g"),
        Column("first", "number", priority=2), Column("remark", left_aligned=True, priority=1),
    )  # fmt: skip
    rows = tuple(
        TableRow((d.name, d.status, d.elements, d.bits, d.largest_relative_change, d.first, d.remark or None))
        for d in unequal
    )
    names = ("name", "status", "elements", "bits", "largest_relative_change", "first", "remark")
    machine = Table(
        tuple(Column(name, "text" if name in ("name", "status", "remark") else "number") for name in names),
        tuple(TableRow(tuple(getattr(d, name) for name in names)) for d in changed),
    )
    sections = (Section("Differences", "", (Table(heads, rows, title="Differences", sortable=True),)),) if rows else ()
    return Report(
        "unsilent/checkpoint-diff/1", "checkpoints", f"{first.name} and {second.name}", headline, machine,
        findings=tuple(findings), sections=sections,
        facts=(("first", str(first)), ("second", str(second))),
        further_json={"command": "checkpoint diff", "identical": not changed, "compared": len(differences),
                      "elements": elements, "bits": bits},
    )  # fmt: skip
