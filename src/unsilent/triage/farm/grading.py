"""Grades queries by executing each on an incident and on its twin, the same run without the cause.

The cause comes from the plan, which queries do not read. A query that needs the user's code or device is not executed: it
counts as unanswered, and its grade is 0.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.farm.labelled import (
    LABELS_FILE,
    RIGHT,
    GradedQuery,
    LabelledIncident,
    label_line,
    read_labels,
)
from unsilent.triage.farm.naming import NAMING, NAMING_REAL, WITHOUT_STEP, WORDS_OF_SETTINGS
from unsilent.triage.farm.near_duplicates import group_of
from unsilent.triage.farm.planned import INCIDENT_FOLDER, PLANNED_FILE, TWIN_FOLDER, PlannedIncident, read_planned
from unsilent.triage.farm.reports import REPORT_FAMILIES, report_of
from unsilent.triage.findings import Finding, FindingKind, Outcome, Query
from unsilent.triage.parts import REPORT_FILE
from unsilent.triage.possible_queries import possible_queries
from unsilent.triage.queries.table import execute

NEAR = 2
"""Most steps between the cause and a finding that still names its step."""


def naming(planned: PlannedIncident) -> frozenset[FindingKind]:
    """Kinds of findings that name the cause of an incident.

    Raises ``UsageError`` for an unknown cause.
    """
    kinds = NAMING.get((planned.family, planned.kind), NAMING_REAL.get(planned.family))
    if kinds is None:
        raise UsageError(
            f"the cause of incident {planned.number} is {planned.family}, {planned.kind}; expected one of farm.planned.FAMILIES, "
            "or of a real job; make the collection again"
        )
    # With one rank, the state that all ranks share is the state of that rank.
    return kinds | {FindingKind.STATE} if planned.world_size == 1 and FindingKind.COMMON_STATE in kinds else kinds


def grade(planned: PlannedIncident, finding: Finding, twin: Finding) -> int:
    """Grade from 0 to 3 of how precisely a finding names the cause.

    3: its place and its kind; 2: only its place; 1: neither, but the run without the cause has another finding; 0: otherwise.
    """
    kinds = naming(planned)
    if not kinds or finding.outcome not in (Outcome.LOCALISED, Outcome.DIFFERS) or is_same(finding, twin):
        return 0
    if not _names_place(planned, finding):
        return 1
    return RIGHT if finding.kind in kinds else 2


def _names_place(planned: PlannedIncident, finding: Finding) -> bool:
    """Whether a finding names the place of the cause: its rank, its step or the changed setting."""
    if planned.rank >= 0 and planned.world_size > 1:
        return finding.ranks == (planned.rank,)
    if finding.kind is FindingKind.SETTINGS and planned.kind in WORDS_OF_SETTINGS:
        return any(word in finding.tensor.lower() for word in WORDS_OF_SETTINGS[planned.kind])
    if finding.kind in WITHOUT_STEP and finding.kind in naming(planned):
        return bool(finding.tensor) or finding.kind is FindingKind.LOGGED_ERROR
    return finding.step is not None and abs(finding.step - planned.step) <= NEAR


def is_same(finding: Finding, twin: Finding) -> bool:
    """Whether two findings are the same: both nothing, or equal in kind and place."""
    return _named_place(finding) == _named_place(twin)


def _named_place(finding: Finding) -> tuple[object, ...]:
    if finding.outcome not in (Outcome.LOCALISED, Outcome.DIFFERS):
        return ()
    return finding.outcome, finding.kind, finding.ranks, finding.tensor, finding.step


def grade_incident(planned: PlannedIncident, incident: Path, twin: Path) -> tuple[GradedQuery, ...]:
    """Execute all possible queries on an incident and on its twin, and grade them."""
    bundle, twin_bundle = Bundle(incident), Bundle(twin)
    return tuple(
        _graded_query(planned, bundle, twin_bundle, possible.query)
        for possible in possible_queries(bundle, candidates_of(bundle))
    )


def _graded_query(planned: PlannedIncident, bundle: Bundle, twin: Bundle, query: Query) -> GradedQuery:
    begun = time.perf_counter()
    finding = _finding_of_query(bundle, query)
    seconds = time.perf_counter() - begun
    same = _finding_of_query(twin, query)
    query_grade = grade(planned, finding, same)
    return GradedQuery(query, query_grade, finding.outcome, finding.kind, is_same(finding, same), seconds)


def _finding_of_query(bundle: Bundle, query: Query) -> Finding:
    """The finding of a query, with paths relative to the folder of the incident."""
    finding = execute(bundle, query)
    return replace(finding, tensor=finding.tensor.replace(f"{bundle.folder}/", ""))


def label_collection(folder: Path, workers: int = 1) -> Path:
    """Write reports and grades of all incidents in a collection, and return the path of the grades.

    Continues an interrupted run.

    Raises ``UsageError`` if an incident or a line of the file cannot be read.
    """
    path = folder / LABELS_FILE
    done = {incident.planned.number for incident in read_labels(path)} if _complete_lines(path) else set()
    folders = [
        planned_file.parent
        for planned_file in sorted(folder.glob(f"*/{PLANNED_FILE}"))
        if planned_file.parent.name.isdecimal()
    ]
    left = [incident for incident in folders if int(incident.name) not in done]
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "a", encoding="utf-8"))
        context = multiprocessing.get_context("spawn")
        pool = stack.enter_context(context.Pool(workers, _use_one_thread)) if workers > 1 else None
        for line in pool.imap(_labelled_line, left) if pool else map(_labelled_line, left):
            file.write(line)
            file.flush()
    return path


def _complete_lines(path: Path) -> bool:
    """Remove an incomplete last line of a file, and return whether other lines remain."""
    if not path.exists():
        return False
    with open(path, "r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    return b"\n" in content


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _labelled_line(incident_folder: Path) -> str:
    planned = read_planned(incident_folder / PLANNED_FILE)
    incident, twin = incident_folder / INCIDENT_FOLDER, incident_folder / TWIN_FOLDER
    report = write_reports(planned, (incident, twin))
    group = group_of(report, Bundle(incident))
    return label_line(
        LabelledIncident(planned, incident, group, grade_incident(planned, incident, twin)), incident_folder.parent
    )


def write_reports(planned: PlannedIncident, folders: Sequence[Path]) -> str:
    """Write a report on the first folder's incident into each folder, and return its text.

    Incidents with odd numbers use the second family of words.
    """
    rng = np.random.default_rng([planned.seed, planned.number])
    text = report_of(Bundle(folders[0]), rng, REPORT_FAMILIES[planned.number % 2])
    for folder in folders:
        (folder / REPORT_FILE).write_text(text, encoding="utf-8")
    return text
