"""Report on a collection of incidents: the number in each family, and how many raised an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unsilent.report.model import Column, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text
from unsilent.triage.farm.collection import MadeIncident

COLUMNS = (
    Column.text("family"), Column.count("kinds"), Column.count("incidents"), Column.count("with an alarm"),
    Column.count("with an alarm without the cause"),
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class FarmResult(Shown):
    """The incidents of a collection."""

    folder: Path
    incidents: tuple[MadeIncident, ...]

    def report(self) -> Report:
        """Report with a row for each family of causes."""
        families: dict[str, list[MadeIncident]] = {}
        for incident in self.incidents:
            families.setdefault(incident.planned.family, []).append(incident)
        rows = [
            {
                "family": family, "kinds": len({incident.planned.kind for incident in of_family}), "incidents": len(of_family),
                "with an alarm": sum(incident.alarms > 0 for incident in of_family),
                "with an alarm without the cause": sum(incident.twin_alarms > 0 for incident in of_family),
            }
            for family, of_family in families.items()
        ]  # fmt: skip
        table = Table.of(rows, COLUMNS)
        healthy = sum(incident.planned.is_healthy for incident in self.incidents)
        headline = (
            f"{count_text(len(self.incidents), 'incident')} in {self.folder}, {healthy:,} of them without a fault"
        )
        return Report(
            "unsilent/triage-farm/1", "triage farm", "Collection of incidents", headline, table,
            sections=(Section("Incidents", "By the family of their cause.", (table,)),),
            notes=("Times of steps are drawn and not measured, but for those of real processes.",),
            further_json={"folder": str(self.folder), "results": rows},
        )  # fmt: skip
