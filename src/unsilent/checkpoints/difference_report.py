"""Report on the differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unsilent.checkpoints.comparing import ADDED, DIFFERS, MISSING, OTHER_TYPE, SAME, UNREAD, TensorDifference
from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.text import count_text


def difference_report(first: Path, second: Path, differences: Sequence[TensorDifference]) -> Report:
    """The report of the differences that `unsilent.checkpoints.comparing.compare` found."""
    changed = [d for d in differences if d.status != SAME]
    values = [d for d in differences if d.kind != "file"]
    elements, bits = (sum(getattr(d, field) or 0 for d in values) for field in ("elements", "bits"))
    # Tensors that only one checkpoint has are named in the findings; the table has the compared ones.
    unequal = [d for d in changed if d.status not in (MISSING, ADDED)]
    findings = []
    for path, status in ((first, MISSING), (second, ADDED)):
        only = [d for d in changed if d.status == status]
        if names := [d.name for d in only if d.kind != "file"]:
            findings.append(f"{len(names):,} tensors and numbers are only in {path}: {_names(names)}")
        if names := [d.name for d in only if d.kind == "file"]:
            findings.append(f"{count_text(len(names), 'file')} not read, only in {path}: {_names(names)}")
    unread = [d.name for d in changed if d.status == UNREAD]
    if unread:
        findings.append(f"{len(unread):,} could not be compared: {_names(unread)}")
    files = [d for d in differences if d.kind == "file" and d.status in (SAME, DIFFERS)]
    for status, description in ((DIFFERS, "with other bytes"), (SAME, "with the same bytes")):
        some = [d.name for d in files if d.status == status]
        if some:
            findings.append(f"{count_text(len(some), 'file')} not read, {description}: {_names(some)}")
    heads = (
        Column.text("tensor", "name"), Column.text("what", "status"), Column.count("elements"), Column.count("bits"),
        Column("largest relative change", "number", digits=".3g"), Column.count("first index", "first", priority=2),
        Column.text("remark", lambda d: d.remark or None, 1),
    )  # fmt: skip
    fields = ("name", "status", "elements", "bits", "largest_relative_change", "first", "remark")
    machine = Table.of(changed, map(Column, fields))
    table = Table.of(unequal, heads, "Differences", sortable=True)
    sections = (Section("Differences", "", (table,)),) if unequal else ()
    return Report(
        "unsilent/checkpoint-diff/1", "checkpoints", f"{first.name} and {second.name}",
        _headline(values, elements, bits), machine,
        findings=tuple(findings), sections=sections,
        facts=(("first", str(first)), ("second", str(second))),
        further_json={"command": "checkpoint diff", "identical": not changed, "compared": len(differences),
                      "elements": elements, "bits": bits},
    )  # fmt: skip


def _headline(values: Sequence[TensorDifference], elements: int, bits: int) -> str:
    both = [d for d in values if d.status not in (MISSING, ADDED)]
    differ = [d for d in both if d.status in (DIFFERS, OTHER_TYPE)]
    unread, other_type = (sum(d.status == status for d in both) for status in (UNREAD, OTHER_TYPE))
    noun = "tensors, numbers and objects" if any(d.kind == "object" for d in both) else "tensors and numbers"
    rest = f"; {unread:,} could not be compared" if unread else ""
    if not both:
        return "No tensor or number is in both checkpoints."
    if differ:
        kinds = f"; {other_type:,} have another dtype or shape" if other_type else ""
        verb = "differs" if len(differ) == 1 else "differ"
        return (
            f"Of {len(both):,} {noun} in both checkpoints, {len(differ):,} {verb}: in {count_text(elements, 'element')}, "
            f"{count_text(bits, 'bit')}{kinds}{rest}."
        )
    if unread == len(both):
        return f"None of the {len(both):,} {noun} in both checkpoints could be compared."
    if unread:
        return f"{len(both) - unread:,} of {len(both):,} {noun} in both checkpoints are identical{rest}."
    return f"All {len(both):,} {noun} in both checkpoints are identical."


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:5]) + (", …" if len(names) > 5 else "")
