"""The option ``--accelerator`` of ``unsilent faults``, which shows the description of an accelerator."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from unsilent.cli.tables import show_lines, show_table

if TYPE_CHECKING:
    from unsilent.faults.hardware.accelerator import Accelerator
    from unsilent.faults.hardware.description import DescriptionTable


def show_accelerator(name_or_file: str, as_json: bool, plain: bool) -> int:
    """Print the description of an accelerator, given by name or file; raises ``UsageError``."""
    from unsilent.faults.hardware.description_file import load_accelerator

    result = load_accelerator(name_or_file)
    if as_json:
        rows = [asdict(row) for row in result.table()]
        values = {"accelerator": result.description.model_dump(exclude_none=True), "rows": rows}
        print(json.dumps({**values, "fit": result.fit_rate, "no_fit": result.why_no_fit_rate}, indent=2))
        return 0
    about = result.description
    sources = [*(f"  source: {source}" for source in about.sources), *([f"  {about.remark}"] if about.remark else [])]
    show_lines(f"{about.name}: {about.description}", *sources, plain=plain)
    if about.groups:
        _flip_flops(result, plain)
    if about.memories:
        _memories(result, plain)
    return 0


def _flip_flops(result: Accelerator, plain: bool) -> None:
    """Print the groups of flip-flops, their fault models and their failure rates."""
    about = result.description
    facts = (("array", about.array), ("dtypes", about.dtypes), ("flip-flops", about))
    show_lines(*(f"{title}: {_facts(table)}" for title, table in facts if table is not None), plain=plain)
    _groups(result, plain)
    show_table(
        [(r.group, r.name, r.operand, r.pattern, r.values, r.reach, r.held, f"{r.weight:.4f}") for r in result.table()],
        ("flip-flops", "fault model", "operand", "pattern", "values", "affected outputs", "dtype", "weight"),
        optional=("values", "dtype", "affected outputs", "operand"),
        plain=plain,
    )
    splits = {row.group: row.weight_split_reason for row in result.table() if row.weight_split_reason}
    why = [f"Shares that the fault models of {group} have in its weight: {split}." for group, split in splits.items()]
    fit = f"not available, because {result.why_no_fit_rate}." if result.fit_rate is None else f"{result.fit_rate:.2f}"
    show_lines("", *why, f"FIT: {fit}", plain=plain)


def _memories(result: Accelerator, plain: bool) -> None:
    """Print the memories, and the outcome of each error pattern under their protection, in float32."""
    from unsilent.faults import Region, fault_model
    from unsilent.faults.hardware.event_shares import DRAWS, outcome_shares
    from unsilent.faults.hardware.memories import OUTCOMES

    memories = result.description.memories
    show_table(
        [
            (name, memory.size, f"{memory.fit_per_mbit:g}", memory.bandwidth,
             "one use" if memory.reload is None else f"{memory.reload:g} s",
             "none" if memory.code is None else f"{memory.protection}, {memory.code_word} bits",
             " ".join(memory.holds), memory.evidence_summary, memory.remark)
            for name, memory in memories.items()
        ],
        ("memory", "size", "FIT per Mbit", "bandwidth", "faults stay", "protection", "holds", "evidence", "remark"),
        ("remark", "evidence", "bandwidth"),
        plain=plain,
    )  # fmt: skip
    show_lines("", plain=plain)
    tensor = [Region("param:any", "float32", (2**16,))]
    rows, drawn = [], list[str]()
    for name, memory in memories.items():
        for pattern, described in memory.patterns.items():
            shares, draws = outcome_shares(fault_model(described.model), tensor, memory.code)
            outcomes = (f"{100 * shares.get(outcome, 0):.3g}" for outcome in OUTCOMES)
            drawn += [f"{name}/{pattern}"] if draws else []
            rows.append((name, pattern, described.model, f"{described.share:g}", *outcomes, described.evidence_summary))
    heads = ("memory", "pattern", "fault model", "share", *(f"{outcome} %" for outcome in OUTCOMES), "evidence")
    show_table(rows, heads, ("evidence",), plain=plain)
    counted = f"; those of {', '.join(drawn)} are counted from {DRAWS:,} drawn events" if drawn else ""
    show_lines(
        "",
        f"Outcomes are shares of all events in a tensor of {tensor[0].numel:,} float32 values{counted}.",
        plain=plain,
    )


def _groups(result: Accelerator, plain: bool) -> None:
    rows = []
    for name, group in result.description.groups.items():
        unmasked = "" if group.unmasked is None else f"{group.unmasked:g}"
        weight = sum(preset.weight for preset in result.weighted_presets if preset.group == name)
        fit = "" if (rate := result.fit_rate_of(name)) is None else f"{rate:.3f}"
        numbers = (f"{group.share:g}", f"{group.activeness:g}", unmasked, f"{weight:.4f}", fit)
        rows.append((name, *numbers, group.evidence_summary, group.remark))
    heads = ("flip-flops", "share", "active", "unmasked", "weight", "FIT", "evidence", "remark")
    show_table(rows, heads, ("remark", "evidence"), plain=plain)


def _facts(table: DescriptionTable) -> str:
    """The facts in a table of a description, each with the grade of its evidence."""
    known = {fact: value for fact in table.facts if (value := getattr(table, fact)) is not None}
    return ", ".join(f"{fact} {str(value).lower()} ({table.evidence_grade(fact)})" for fact, value in known.items())
