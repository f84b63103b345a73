"""Report on an investigation: findings of executed queries, and the queries to run next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text, duration_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.collected import HOW_TO_RECORD
from unsilent.triage.findings import Finding, Outcome, Query
from unsilent.triage.investigation import BELIEVED, Conclusion, Executed, Investigation, executable
from unsilent.triage.queries.table import TEMPLATES, command_of
from unsilent.triage.runbook import ScoredQuery


@dataclass(frozen=True, repr=False)
class Triage(Shown):
    """An investigation, with the number of next queries to show."""

    investigation: Investigation
    top: int

    @property
    def exit_code(self) -> int:
        """Exit code: 1 if executed queries found something that is not doubted, else 0."""
        return int(self.investigation.conclusion in (Conclusion.LOCALISED, Conclusion.NOT_LOCALISED))

    def report(self) -> Report:
        """Report with a row for each executed query, followed by those to run next."""
        investigation, incident = self.investigation, self.investigation.bundle.incident
        rows = list(map(self._executed_query_row, investigation.executed))
        rows += [_query_fields(investigation.bundle, query) for query in investigation.left[: self.top]]
        headline = self._headline()
        columns = (
            Column.text("query"), Column.text("outcome"), Column.text("place"),
            Column("score", "number", digits=".2f"), Column("expected", "number", "s", digits=".3g"),
        )  # fmt: skip
        return Report(
            "unsilent/triage/1", "triage", f"Incident of step {incident.step:,}", headline, Table.of(rows, columns),
            findings=tuple(self._findings()), sections=tuple(self._sections()), facts=(("Incident", incident.since),),
            further_json={"folder": str(investigation.bundle.folder), "since": incident.since,
                "conclusion": investigation.conclusion.value if investigation.is_run else "", "results": rows,
            },
        )  # fmt: skip

    def _headline(self) -> str:
        investigation = self.investigation
        if (finding := investigation.localised) is not None:
            is_one = finding.outcome is Outcome.LOCALISED
            text = f"{finding.place}: {finding.kind.value if finding.kind else finding.text}"
            return f"Localised: {text}" if is_one else f"Found: {text}; {finding.text}"
        if not investigation.is_run and not investigation.bundle.has_telemetry():
            return "No query can be answered from this folder; what queries need, and how to record it, is listed below"
        if not investigation.is_run:
            first = investigation.left[0]
            return f"Run first: {first.query.name} ({first.reason})"
        if investigation.conclusion is Conclusion.UNANSWERED:
            return "No query could be answered from this folder; what is missing is listed below"
        findings = [executed.finding for executed in investigation.executed if _is_found(executed.finding)]
        if investigation.conclusion is Conclusion.NOT_LOCALISED:
            return f"Not localised: {max(investigation.executed, key=lambda executed: executed.belief).finding.text}"
        kinds = count_text(len({executed.query.query.template for executed in investigation.answered}), "kind")
        queries = f"{count_text(len(investigation.answered), 'query')} of {kinds}"
        left = len(executable(investigation.ranked, investigation.executed))
        not_run = f"; not run, as little was expected of them: {count_text(left, 'query')}" if left else ""
        if not findings:
            return f"Nothing was found by {queries}{not_run}"
        doubted = "which is doubted" if len(findings) == 1 else "all of which are doubted"
        found = f"{count_text(len(findings), 'finding')}, {doubted}"
        return f"Nothing that is likely a fault was found by {queries}; {found}{not_run}"

    def _findings(self) -> list[str]:
        findings = [executed.finding for executed in self.investigation.executed]
        texts = dict.fromkeys(finding.text for finding in findings if _is_found(finding))
        missing = dict.fromkeys(text for finding in findings for text in finding.missing)
        return [*texts, *list(missing)[:8], *([] if self.investigation.bundle.has_telemetry() else HOW_TO_RECORD)]

    def _sections(self) -> list[Section]:
        investigation, result = self.investigation, []
        if investigation.executed:
            columns = (
                Column.text("query", "query.query.name"), Column.text("outcome", "finding.outcome.value"),
                Column.text("found", "finding.text"), Column("belief", "number", digits=".2f", of="belief"),
                Column("took", "number", "s", digits=".2g", of="seconds"), Column.text("why", "query.reason", 1),
            )  # fmt: skip
            text = f"In the order of execution. A finding with a belief (0 to 1) of {BELIEVED} or more ends the search."
            result.append(Section("Executed", text, (Table.of(investigation.executed, columns),)))
        heads = (
            Column.text("query", "query.name"), Column.text("why", "reason"),
            Column.text("expected", lambda row: duration_text(TEMPLATES[row.query.template].seconds)),
            Column.text("command", lambda row: command_of(investigation.bundle, row.query)),
        )  # fmt: skip
        if left := investigation.left[: self.top]:
            text = "By expected gain per second. `step.py:make` and `train.py:loop` stand for your own code."
            result.append(Section("To run next", text, (Table.of(left, heads),)))
        return result

    def _executed_query_row(self, executed: Executed) -> dict[str, Any]:
        query = _query_fields(self.investigation.bundle, executed.query)
        return {**query, **finding_fields(executed.finding), "seconds": executed.seconds, "belief": executed.belief}


@dataclass(frozen=True, repr=False)
class QueryAnswer(Shown):
    """The finding of one query."""

    bundle: Bundle
    query: Query
    finding: Finding

    @property
    def exit_code(self) -> int:
        """Exit code: 1 if something was found, else 0."""
        return int(_is_found(self.finding))

    def report(self) -> Report:
        """Report on the finding and the numbers behind it."""
        finding = self.finding
        columns = (Column.text("name"), Column("value", "number"))
        table = Table.of([{"name": name, "value": value} for name, value in finding.numbers.items()], columns)
        where = f" ({finding.place})" if finding.place else ""
        headline = f"{finding.outcome.value.capitalize()}{where}: {finding.text}"
        sections = (Section("Numbers", "What the finding rests on.", (table,)),) if finding.numbers else ()
        return Report(
            "unsilent/triage-query/1", "triage query", self.query.name, headline, table, findings=finding.missing,
            sections=sections, facts=(("Looks at", TEMPLATES[self.query.template].help),),
            further_json={"query": self.query.template, "blanks": self.query.blanks.given, **finding_fields(finding)},
        )  # fmt: skip


def finding_fields(finding: Finding) -> dict[str, Any]:
    """The fields of a finding for JSON."""
    return {
        **vars(finding), "outcome": finding.outcome.value, "place": finding.place,
        "kind": finding.kind.value if finding.kind else "",
    }  # fmt: skip


def _query_fields(bundle: Bundle, query: ScoredQuery) -> dict[str, Any]:
    return {
        "query": query.query.name, "template": query.query.template, "blanks": query.query.blanks.given, "score": query.score,
        "reason": query.reason, "expected": TEMPLATES[query.query.template].seconds, "command": command_of(bundle, query.query),
    }  # fmt: skip


def _is_found(finding: Finding) -> bool:
    return finding.outcome in (Outcome.DIFFERS, Outcome.LOCALISED)
