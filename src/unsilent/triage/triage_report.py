"""What is shown of an investigation: the queries to run next with their reasons, and what those that were run found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text, duration_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.collected import HOW_TO_RECORD
from unsilent.triage.findings import Finding, Outcome, Query
from unsilent.triage.investigation import BELIEVED, Conclusion, Executed, Investigation
from unsilent.triage.queries.table import TEMPLATES, command_of
from unsilent.triage.runbook import ScoredQuery


@dataclass(frozen=True, repr=False)
class Triage(Shown):
    """An investigation, of which the first queries are shown."""

    investigation: Investigation
    top: int

    @property
    def exit_code(self) -> int:
        """1 where executed queries found something that is not doubted."""
        return int(self.investigation.conclusion in (Conclusion.LOCALISED, Conclusion.NOT_LOCALISED))

    def report(self) -> Report:
        """A row for each query: first those that were run, then those to run next."""
        own, incident = self.investigation, self.investigation.bundle.incident
        shown = [*map(self._executed_row, own.executed), *map(self._next_row, own.left[: self.top])]
        headline = self._headline()
        columns = (
            Column.text("query"), Column.text("outcome"), Column.text("place"),
            Column("score", "number", digits=".2f"), Column("expected", "number", "s", digits=".3g"),
        )  # fmt: skip
        return Report(
            "unsilent/triage/1", "triage", f"Incident of step {incident.step:,}", headline, Table.of(shown, columns),
            findings=tuple(self._findings()), sections=tuple(self._sections()), facts=(("Incident", incident.since),),
            further_json={"folder": str(own.bundle.folder), "since": incident.since, "headline": headline,
                "conclusion": own.conclusion.value if own.is_run else "", "results": shown,
            },
        )  # fmt: skip

    def _headline(self) -> str:
        own = self.investigation
        if (finding := own.localised) is not None:
            is_one = finding.outcome is Outcome.LOCALISED
            text = f"{finding.place}: {finding.kind.value if finding.kind else finding.text}"
            return f"Localised: {text}" if is_one else f"Found: {text}; {finding.text}"
        if not own.is_run and not own.bundle.has_telemetry():
            return "No query can be answered from this folder; how to record and collect what they read stands below"
        if not own.is_run:
            first = own.left[0]
            return f"Run first: {first.query.name} ({first.reason})"
        if own.conclusion is Conclusion.UNANSWERED:
            return "No query could be answered from this folder; what is missing stands below"
        found = [one.finding for one in own.executed if _is_found(one.finding)]
        if own.conclusion is Conclusion.NOT_LOCALISED:
            return f"Not localised: {max(own.executed, key=lambda one: one.belief).finding.text}"
        kinds = count_text(len({one.query.query.template for one in own.answered}), "kind")
        asked = f"{count_text(len(own.answered), 'query').replace('querys', 'queries')} of {kinds}"
        if not found:
            return f"Nothing that was looked for was found, in {asked}"
        return f"Nothing that is likely a fault was found, in {asked}: {count_text(len(found), 'finding')}, all doubted"

    def _findings(self) -> list[str]:
        missing = dict.fromkeys(text for one in self.investigation.executed for text in one.finding.missing)
        found = dict.fromkeys(one.finding.text for one in self.investigation.executed if _is_found(one.finding))
        return [*found, *list(missing)[:8], *([] if self.investigation.bundle.has_telemetry() else HOW_TO_RECORD)]

    def _sections(self) -> list[Section]:
        own, result = self.investigation, []
        if own.executed:
            columns = (
                Column.text("query", "query.query.name"), Column.text("outcome", "finding.outcome.value"),
                Column.text("found", "finding.text"), Column("belief", "number", digits=".2f", of="belief"),
                Column("took", "number", "s", digits=".2g", of="seconds"), Column.text("why", "query.reason", 1),
            )  # fmt: skip
            text = f"In this order. A finding that is believed to {BELIEVED} or more ends it."
            result.append(Section("Executed", text, (Table.of(own.executed, columns),)))
        heads = (
            Column.text("query", "query.name"), Column.text("why", "reason"),
            Column.text("expected", lambda one: duration_text(TEMPLATES[one.query.template].seconds)),
            Column.text("command", lambda one: command_of(own.bundle, one.query)),
        )  # fmt: skip
        if left := own.left[: self.top]:
            text = "By expected gain per second. `step.py:make` and `train.py:loop` stand for code of yours."
            result.append(Section("To run next", text, (Table.of(left, heads),)))
        return result

    def _executed_row(self, one: Executed) -> dict[str, Any]:
        return {
            **_query_fields(self.investigation.bundle, one.query),
            **finding_fields(one.finding),
            "seconds": one.seconds,
            "belief": one.belief,
        }

    def _next_row(self, one: ScoredQuery) -> dict[str, Any]:
        return _query_fields(self.investigation.bundle, one)


@dataclass(frozen=True, repr=False)
class QueryAnswer(Shown):
    """What one query found."""

    bundle: Bundle
    query: Query
    finding: Finding

    @property
    def exit_code(self) -> int:
        """1 where something was found."""
        return int(_is_found(self.finding))

    def report(self) -> Report:
        """The finding, and the numbers that it rests on."""
        found = self.finding
        columns = (Column.text("name"), Column("value", "number"))
        table = Table.of([{"name": name, "value": value} for name, value in found.numbers.items()], columns)
        where = f" ({found.place})" if found.place else ""
        headline = f"{found.outcome.value.capitalize()}{where}: {found.text}"
        sections = (Section("Numbers", "What the finding rests on.", (table,)),) if found.numbers else ()
        return Report(
            "unsilent/triage-query/1", "triage query", self.query.name, headline, table, findings=found.missing,
            sections=sections, facts=(("Looks at", TEMPLATES[self.query.template].help),),
            further_json={"query": self.query.template, "blanks": self.query.blanks.given, **finding_fields(found)},
        )  # fmt: skip


def finding_fields(finding: Finding) -> dict[str, Any]:
    """A finding as JSON has it."""
    return {
        **vars(finding), "outcome": finding.outcome.value, "place": finding.place,
        "kind": finding.kind.value if finding.kind else "",
    }  # fmt: skip


def _query_fields(bundle: Bundle, one: ScoredQuery) -> dict[str, Any]:
    return {
        "query": one.query.name, "template": one.query.template, "blanks": one.query.blanks.given, "score": one.score,
        "reason": one.reason, "expected": TEMPLATES[one.query.template].seconds, "command": command_of(bundle, one.query),
    }  # fmt: skip


def _is_found(finding: Finding) -> bool:
    return finding.outcome in (Outcome.DIFFERS, Outcome.LOCALISED)
