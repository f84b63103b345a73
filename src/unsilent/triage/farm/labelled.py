"""Incidents with graded queries, and the file that holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TypeVar

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import parse_json, read_lines, replace_file
from unsilent.basics.strictjson import as_json_values
from unsilent.events.event_files import check_range, parse_fields
from unsilent.triage.farm.planned import FAMILIES, PlannedIncident
from unsilent.triage.findings import Blanks, FindingKind, Outcome, Query

E = TypeVar("E", bound=Enum)

LABELS_FILE = "labels.jsonl"
"""File in the folder of a collection: one line for each incident."""
MOST_BYTES, MOST_LINE = 2**28, 2**20
"""Most bytes of the file of labels, and of one line."""
RIGHT = 3
"""The grade of a query whose finding names the place and the kind of the cause."""


@dataclass(frozen=True)
class GradedQuery:
    """The result of a query on an incident, with its grade.

    Attributes:
        grade: 3: the finding names the place of the cause (rank, tensor or step) and its kind; 2: only its place; 1: neither,
            but the finding differs from that of the run without the cause; 0: otherwise.
        outcome, kind: Outcome and kind of the finding.
        is_same: Whether the run without the cause gives the same finding.
        seconds: Seconds that the query took.
    """

    query: Query
    grade: int
    outcome: Outcome
    kind: FindingKind | None
    is_same: bool
    seconds: float


@dataclass(frozen=True)
class LabelledIncident:
    """An incident with its graded queries.

    Attributes:
        folder: Folder of the incident.
        group: Group of incidents whose report and telemetry are nearly the same.
        graded: Grades in the order of `possible_queries`.
    """

    planned: PlannedIncident
    folder: Path
    group: str
    graded: tuple[GradedQuery, ...]

    @property
    def is_masked(self) -> bool:
        """Whether every query has the same finding with and without the cause."""
        return all(graded.is_same for graded in self.graded)


def write_labels(path: Path, incidents: Iterable[LabelledIncident]) -> None:
    """Write the graded incidents of a collection to a file, which is replaced at once.

    Raises ``OSError`` if it cannot be written.
    """
    replace_file(path, "".join(label_line(incident, path.parent) for incident in incidents).encode())


def label_line(incident: LabelledIncident, collection: Path) -> str:
    """The line of an incident in the file of labels.

    Its folder is written relative to the collection.
    """
    graded = [
        {"template": query_grade.query.template, "blanks": query_grade.query.blanks.given, "grade": query_grade.grade,
         "outcome": query_grade.outcome.name, "kind": query_grade.kind and query_grade.kind.name,
         "is_same": query_grade.is_same, "seconds": query_grade.seconds}
        for query_grade in incident.graded
    ]  # fmt: skip
    folder = incident.folder.relative_to(collection).as_posix()
    values = {"planned": incident.planned, "folder": folder, "group": incident.group, "graded": graded}
    return json.dumps(as_json_values(values), allow_nan=False) + "\n"


def read_labels(path: Path) -> list[LabelledIncident]:
    """The graded incidents of a collection.

    Raises ``UsageError`` if the file cannot be read.
    """
    result: list[LabelledIncident] = []
    numbers: set[int] = set()
    for place, content in enumerate(read_lines(path, MOST_BYTES, MOST_LINE), 1):
        try:
            incident = _incident_of_line(content, path.parent)
            if incident.planned.number in numbers:
                raise ValueError(f"number {incident.planned.number} is in an earlier line as well")
        except (ValueError, UsageError) as error:
            raise UsageError(
                f"line {place} of {path} is no graded incident: {first_line(error)[:200]}; remove the line, and grade the "
                "collection again"
            ) from None
        numbers.add(incident.planned.number)
        result.append(incident)
    return result


@dataclass(frozen=True)
class _Grade:
    template: str
    blanks: Blanks
    grade: int
    outcome: str
    kind: str | None
    is_same: bool
    seconds: float


@dataclass(frozen=True)
class _Line:
    planned: PlannedIncident
    folder: str
    group: str
    graded: tuple[_Grade, ...]


def _incident_of_line(content: bytes, collection: Path) -> LabelledIncident:
    """The incident of one line in the file of labels.

    Raises ``ValueError``, or ``UsageError`` for invalid blanks.
    """
    values = parse_json(content)
    if not isinstance(values, dict):
        raise ValueError("expected an object")
    line = parse_fields(_Line, values)
    folder = PurePosixPath(line.folder)
    if folder.is_absolute() or ".." in folder.parts or not folder.parts:
        raise ValueError(f"folder is {line.folder[:40]!r}; expected one below that of the collection")
    return LabelledIncident(
        _checked_incident(line.planned),
        collection / folder,
        line.group,
        tuple(map(_graded_query_of_values, line.graded)),
    )


def _checked_incident(planned: PlannedIncident) -> PlannedIncident:
    if planned.family in FAMILIES and planned.kind not in FAMILIES[planned.family]:
        raise ValueError(f"kind is {planned.kind[:40]!r}, which {planned.family} does not have")
    check_range("world_size", planned.world_size, 1, 2**20)
    check_range("rank", planned.rank, -1, planned.world_size - 1)
    return planned


def _graded_query_of_values(values: _Grade) -> GradedQuery:
    check_range("grade", values.grade, 0, RIGHT)
    if not math.isfinite(values.seconds) or values.seconds < 0:
        raise ValueError(f"seconds is {values.seconds}; expected a number from 0")
    if values.blanks.steps and len(values.blanks.steps) != 2:
        raise ValueError(f"steps has {len(values.blanks.steps)} numbers; expected 2")
    kind = _member(FindingKind, "kind", values.kind) if values.kind is not None else None
    query = Query(values.template, values.blanks)
    return GradedQuery(
        query, values.grade, _member(Outcome, "outcome", values.outcome), kind, values.is_same, values.seconds
    )


def _member(kind: type[E], name: str, value: str) -> E:
    if value not in kind.__members__:
        raise ValueError(f"{name} is {value[:40]!r}; expected one of {', '.join(kind.__members__)[:120]}")
    return kind[value]
