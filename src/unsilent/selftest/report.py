"""The report on a self-test: executed operations, wrong elements, and how rare a failure the test would detect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.text import count_text, duration_text, listed

if TYPE_CHECKING:
    from unsilent.selftest.running import SelfTest


def selftest_report(result: SelfTest) -> Report:
    """The report on a self-test, with a table row for each operation and dtype."""
    columns = (
        Column.text("operation"), Column.text("dtype"), Column.count("executions"), Column.count("wrong"),
        Column.count("detects 1 failure in", "seen_from"),
    )  # fmt: skip
    table = Table.of(result.counts, columns, is_emphasised=lambda row: bool(row.wrong))
    rows = [
        {"operation": row.operation, "dtype": row.dtype, "executions": row.executions, "wrong": row.wrong,
         "seen_from_one_in": row.seen_from, "first_wrong_execution": row.first_wrong,
         "mismatch": None if row.mismatch is None else vars(row.mismatch)}
        for row in result.counts
    ]  # fmt: skip
    wrong = [(row.mismatch, row.first_wrong) for row in result.mismatches if row.mismatch]
    findings = [f"{mismatch.sentence()} (execution {first_wrong:,})" for mismatch, first_wrong in wrong]
    findings += [
        f"The recorded step was wrong in each of {count_text(row.executions, 'execution')}: a step whose code or settings have "
        "changed since it was recorded looks the same"
        for row in result.mismatches
        if row.dtype == "as recorded" and row.wrong == row.executions
    ]  # fmt: skip
    if result.missing:
        findings.append(f"Not implemented by torch on this device, so not tested: {listed(result.missing)}")
    return Report(
        "unsilent/selftest/1", "selftest", f"Self-test of {result.device}", _headline(result), table,
        findings=tuple(findings),
        sections=(Section("Operations", "Each answer was compared with the known one, element by element.", (table,)),),
        facts=(("Device", result.model), ("Time", duration_text(result.seconds))),
        notes=(
            "detects 1 failure in N: a device that gives a wrong answer in one of N executions of this row, each independently "
            "of the others, would have been detected with a probability of 95 %",
        ),
        further_json={"device": result.device, "executions": result.executions, "mismatches": len(result.mismatches),
                      "results": rows},
    )  # fmt: skip


def _headline(result: SelfTest) -> str:
    executions = count_text(result.executions, "execution")
    if result.mismatches:
        first, wrong = result.mismatches[0], sum(row.wrong for row in result.mismatches)
        assert first.mismatch is not None
        return f"{wrong:,} of {executions} on {result.device} had a wrong answer. {first.mismatch.sentence()}"
    least = min((row.seen_from or 0 for row in result.counts), default=0)
    bound = "too few to say how rare a failure would have been found; give more --minutes"
    if least:
        bound = (
            f"if any row of the table gave a wrong answer in 1 of {least:,} of its executions, this would have been detected "
            "with a probability of 95 %"
        )
    return f"No mismatch in {executions} on {result.device}: {bound}"
