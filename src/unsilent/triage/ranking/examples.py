"""Training examples for the order of queries, made of labelled incidents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unsilent.basics.errors import UsageError
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.farm.labelled import RIGHT, GradedQuery, LabelledIncident
from unsilent.triage.findings import Outcome
from unsilent.triage.possible_queries import PossibleQuery, possible_queries
from unsilent.triage.runbook import READ_VERDICT, Signals, has_fault_verdict, signals_of

Graded = tuple[PossibleQuery, GradedQuery]


@dataclass(frozen=True, eq=False)
class Example:
    """A labelled incident as a training example.

    Attributes:
        graded: Possible queries with their grades.
    """

    signals: Signals
    report: str
    graded: tuple[Graded, ...]
    is_healthy: bool

    def by_template(self) -> Iterator[tuple[str, list[Graded], bool]]:
        """Each template with its graded queries, and whether one of them is right."""
        templates: dict[str, list[Graded]] = {}
        for pair in self.graded:
            templates.setdefault(pair[0].query.template, []).append(pair)
        for name, of_template in templates.items():
            yield name, of_template, any(graded.grade == RIGHT for _, graded in of_template)


def without_verdicts(examples: Sequence[Example]) -> list[Example]:
    """Copies of the examples that have a recorded verdict, without that verdict.

    Many incidents have no verdict, and a model has to rank their queries too.

    Incidents that no other query distinguishes from the run without the cause are left out, except healthy ones.
    """
    result = []
    for example in examples:
        if not has_fault_verdict(example.signals.bundle):
            continue
        bundle = Bundle(example.signals.bundle.folder)
        bundle.incident = replace(bundle.incident, fault_verdict=None)
        graded = tuple((possible, _as_unanswered(graded_query)) for possible, graded_query in example.graded)
        if example.is_healthy or not all(graded_query.is_same for _, graded_query in graded):
            result.append(replace(example, signals=replace(example.signals, bundle=bundle), graded=graded))
    return result


def _as_unanswered(graded: GradedQuery) -> GradedQuery:
    if graded.query.template != READ_VERDICT:
        return graded
    return replace(graded, grade=0, outcome=Outcome.UNANSWERED, kind=None, is_same=True)


def examples_of(incidents: Sequence[LabelledIncident]) -> list[Example]:
    """Training examples of all incidents, except masked ones that are not healthy.

    Raises ``UsageError`` if labels lack a query, or if no query is right.
    """
    result = []
    for incident in incidents:
        if incident.is_masked and not incident.planned.is_healthy:
            continue
        bundle = Bundle(incident.folder)
        candidates = candidates_of(bundle)
        possible = possible_queries(bundle, candidates)
        grades = {graded.query: graded for graded in incident.graded}
        if any(each.query not in grades for each in possible):
            raise UsageError(
                f"the labels of {incident.folder} lack a query that can be asked now; label the collection again"
            )
        graded = tuple((each, grades[each.query]) for each in possible)
        result.append(
            Example(signals_of(bundle, candidates), bundle.report()[0] or "", graded, incident.planned.is_healthy)
        )
    if not any(graded.grade == RIGHT for example in result for _, graded in example.graded):
        raise UsageError("no query is right on any of these incidents, so there is nothing to learn; make more of them")
    return result
