"""Report on the training of a model: the number of incidents, and on how many each query was right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text
from unsilent.triage.farm.labelled import RIGHT, LabelledIncident
from unsilent.triage.queries.table import TEMPLATES

COLUMNS = (Column.text("query"), Column.count("incidents"), Column.count("right"))


@dataclass(frozen=True, repr=False)
class Trained(Shown):
    """A trained model's file, and the incidents that it was trained on."""

    path: Path
    incidents: Sequence[LabelledIncident]

    def report(self) -> Report:
        """Report with a row for each query."""
        right_by_query = [{graded.query.template: False for graded in each.graded} for each in self.incidents]
        for names, each in zip(right_by_query, self.incidents, strict=True):
            names |= {graded.query.template: True for graded in each.graded if graded.grade == RIGHT}
        rows = []
        for name in TEMPLATES:
            of_query = [right[name] for right in right_by_query if name in right]
            rows.append({"query": name, "incidents": len(of_query), "right": sum(of_query)})
        masked = sum(incident.is_masked and not incident.planned.is_healthy for incident in self.incidents)
        learned = count_text(len(self.incidents) - masked, "incident")
        headline = f"Learned from {learned}; {masked:,} more are masked; the model is in {self.path}"
        table = Table.of(rows, COLUMNS)
        return Report(
            "unsilent/triage-train/1", "triage train", "Order of debugging queries", headline, table,
            sections=(Section("Queries", "On how many incidents each can be asked, and was right.", (table,)),),
            further_json={"model": str(self.path), "results": rows},
        )  # fmt: skip
