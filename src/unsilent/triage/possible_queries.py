"""All queries that are possible on an incident: each template with its blanks filled by candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unsilent.report.text import count_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import Candidate, Candidates, Features
from unsilent.triage.findings import Blanks, Query
from unsilent.triage.history import FAR
from unsilent.triage.queries.table import TEMPLATES

MOST_RANKS, MOST_TENSORS = 3, 1
"""Most candidates that queries are filled with, besides the query that examines everything."""


@dataclass(frozen=True)
class PossibleQuery:
    """A query, and the candidate that fills its blank.

    Attributes:
        blank: Name of the blank that is filled with a candidate; empty if the query examines everything.
        features: Features of the candidate; ``None`` if there is no candidate.
        place: Place of the candidate among those of its kind, from 1; 0 if there is no candidate.
    """

    query: Query
    blank: str = ""
    features: Features | None = None
    place: int = 0

    @property
    def reason(self) -> str:
        """Text on why the candidate is unusual, or an empty text without a candidate."""
        return describe(self.features, self.blank) if self.features else ""


def possible_queries(bundle: Bundle, candidates: Candidates) -> list[PossibleQuery]:
    """All possible queries on an incident, by template.

    Templates that need more ranks than the job has are left out.
    """
    return [
        query
        for name, template in TEMPLATES.items()
        if bundle.incident.world_size >= template.least_ranks
        for query in _filled_queries(name, template.blanks, bundle, candidates)
    ]


def _filled_queries(
    template: str, blanks: Sequence[str], bundle: Bundle, candidates: Candidates
) -> Iterator[PossibleQuery]:
    """The query without a restriction, followed by a query for each candidate."""
    if "host" in blanks:
        incident = bundle.incident
        blank = Blanks(host=incident.host or None, rank=incident.suspect if incident.suspect >= 0 else None)
        yield PossibleQuery(Query(template, blank))
        return
    yield PossibleQuery(Query(template))
    ranks = candidates.ranks[:MOST_RANKS] if len(candidates.ranks) > 1 else ()
    kinds: dict[str, Sequence[Candidate[int] | Candidate[str] | Candidate[tuple[int, int]]]] = {
        "rank": ranks, "steps": candidates.windows, "tensor": candidates.tensors[:MOST_TENSORS],
    }  # fmt: skip
    for blank_name in (kind for kind in kinds if kind in blanks):
        for place, candidate in enumerate(kinds[blank_name], 1):
            filled = Blanks(**{blank_name: candidate.value})  # type: ignore[arg-type]
            yield PossibleQuery(Query(template, filled), blank_name, candidate.features, place)


def describe(features: Features, blank: str) -> str:
    """Text on why a candidate is unusual."""
    words = []
    if features.alarms:
        words.append(count_text(features.alarms, "alarm"))
    if features.nonfinite:
        words.append("values not finite")
    if features.peer_score >= FAR:
        words.append("far from other ranks")
    if features.onset is not None:
        words.append(f"left its past {_when(features.onset)}")
    return f"this {NOUNS[blank]}: {', '.join(words) or 'nothing unusual was seen'}"


NOUNS = {"rank": "rank", "tensor": "tensor", "steps": "window"}


def _when(onset: int) -> str:
    if not onset:
        return "in the step of the alarm"
    return f"{count_text(abs(onset), 'step')} {'before' if onset < 0 else 'after'} the alarm"
