"""Incidents whose queries were executed and graded, as a file has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unsilent.triage.farm.planned import PlannedIncident
from unsilent.triage.findings import FindingKind, Outcome, Query

LABELS_FILE = "labels.jsonl"
"""In the folder of a collection: one line for each incident."""
RIGHT = 3
"""The grade of a query whose finding names the place and the kind of the cause."""


@dataclass(frozen=True)
class GradedQuery:
    """What a query came to on an incident.

    Attributes:
        grade: 3: the finding names the place of the cause (rank, tensor or step) and its kind; 2: its place; 1: it differs from
            that of the run without the cause; 0: neither.
        outcome, kind: Of the finding.
        is_same: Whether the run without the cause gives the same finding.
        seconds: That the query took.
    """

    query: Query
    grade: int
    outcome: Outcome
    kind: FindingKind | None
    is_same: bool
    seconds: float


@dataclass(frozen=True)
class LabelledIncident:
    """An incident with its grades.

    Attributes:
        folder: Of the incident.
        group: The same for incidents whose report and telemetry are nearly the same.
        graded: In the order of `possible_queries`.
    """

    planned: PlannedIncident
    folder: Path
    group: str
    graded: tuple[GradedQuery, ...]

    @property
    def is_masked(self) -> bool:
        """Whether no query tells it from the run without the cause."""
        return all(one.is_same for one in self.graded)


def write_labels(path: Path, incidents: Iterable[LabelledIncident]) -> None:
    """Write the file of a collection."""
    raise NotImplementedError


def read_labels(path: Path) -> list[LabelledIncident]:
    """The incidents of a collection. Raises ``UsageError``."""
    raise NotImplementedError
