"""Labelled incidents as models are trained on them, and the numbers that they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unsilent.errors import UsageError
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.farm.labelled import RIGHT, GradedQuery, LabelledIncident
from unsilent.triage.possible_queries import PossibleQuery, possible_queries
from unsilent.triage.runbook import Signals, signals_of

Graded = tuple[PossibleQuery, GradedQuery]


@dataclass(frozen=True, eq=False)
class Example:
    """A labelled incident as training sees it.

    Attributes:
        graded: Each possible query with its grade.
    """

    signals: Signals
    report: str
    graded: tuple[Graded, ...]

    def by_template(self) -> Iterator[tuple[str, list[Graded], bool]]:
        """Each template with its queries, and whether one of them is right."""
        templates: dict[str, list[Graded]] = {}
        for one in self.graded:
            templates.setdefault(one[0].query.template, []).append(one)
        for name, own in templates.items():
            yield name, own, any(graded.grade == RIGHT for _, graded in own)


def examples_of(incidents: Sequence[LabelledIncident]) -> list[Example]:
    """Those that are not masked, and the healthy ones. Raises ``UsageError`` where labels lack a query, or none is right."""
    result = []
    for one in incidents:
        if one.is_masked and not one.planned.is_healthy:
            continue
        bundle = Bundle(one.folder)
        candidates = candidates_of(bundle)
        possible = possible_queries(bundle, candidates)
        grades = {graded.query: graded for graded in one.graded}
        if any(each.query not in grades for each in possible):
            raise UsageError(
                f"the labels of {one.folder} lack a query that can be asked now; label the collection again"
            )
        graded = tuple((each, grades[each.query]) for each in possible)
        result.append(Example(signals_of(bundle, candidates), bundle.report()[0] or "", graded))
    if not any(graded.grade == RIGHT for one in result for _, graded in one.graded):
        raise UsageError("no query is right on any of these incidents, so there is nothing to learn; make more of them")
    return result
