"""Queries in order, executed one after another until the fault is localised."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.findings import Finding, Outcome, Query
from unsilent.triage.queries.table import TEMPLATES, execute
from unsilent.triage.runbook import ScoredQuery, scored_queries, signals_of

LEAST_SECONDS = 1.0
"""Costs below it are not told apart: a reader takes longer."""
POINTED = 1.5
"""A query about a rank that a finding has named tells this many times as much as one about any rank."""


@dataclass(frozen=True)
class Executed:
    """A query, what came of it, and how long it took, in seconds."""

    query: ScoredQuery
    finding: Finding
    seconds: float


@dataclass(frozen=True)
class Investigation:
    """What was asked of an incident, and what is left to ask.

    Attributes:
        bundle: The incident.
        ranked: All queries, the most telling one first.
        executed: Those that were executed, in order.
        is_run: Whether any were to be.
    """

    bundle: Bundle
    ranked: tuple[ScoredQuery, ...]
    executed: tuple[Executed, ...] = ()
    is_run: bool = False

    @property
    def localised(self) -> Finding | None:
        """The finding that ended it."""
        return next((one.finding for one in self.executed if one.finding.outcome is Outcome.LOCALISED), None)

    @property
    def left(self) -> list[ScoredQuery]:
        """Queries that were not executed, in the order in which they would be."""
        done = {one.query.query for one in self.executed}
        return in_order([one for one in self.ranked if one.query not in done], self.executed)


def investigate(path: Path, is_run: bool = False) -> Investigation:
    """Rank the queries of an incident, and execute them. Raises ``UsageError`` where there is no incident."""
    bundle = Bundle(path)
    ranked = tuple(scored_queries(signals_of(bundle, candidates_of(bundle))))
    executed: list[Executed] = []
    while is_run and not any(one.finding.outcome is Outcome.LOCALISED for one in executed):
        if not (left := executable(ranked, executed)):
            break
        chosen = in_order(left, executed)[0]
        begun = time.perf_counter()
        finding = execute(bundle, chosen.query)
        executed.append(Executed(chosen, finding, time.perf_counter() - begun))
    return Investigation(bundle, ranked, tuple(executed), is_run)


def executable(queries: Sequence[ScoredQuery], executed: Sequence[Executed]) -> list[ScoredQuery]:
    """Queries that the folder answers, that were not executed, and whose answer is not implied."""
    done = {one.query.query for one in executed}
    return [
        one
        for one in queries
        if one.query not in done and not TEMPLATES[one.query.template].command and not is_implied(one.query, executed)
    ]


def in_order(queries: Sequence[ScoredQuery], executed: Sequence[Executed]) -> list[ScoredQuery]:
    """By expected gain per second, after what was found; queries whose answer is implied come last."""
    named = {rank for one in executed for rank in one.finding.ranks}

    def gain(one: ScoredQuery) -> tuple[bool, float]:
        factor = POINTED if one.query.blanks.rank in named else 1.0
        seconds = max(LEAST_SECONDS, TEMPLATES[one.query.template].seconds)
        return not is_implied(one.query, executed), factor * one.score / seconds

    return sorted(queries, key=gain, reverse=True)


def is_implied(query: Query, executed: Sequence[Executed]) -> bool:
    """Whether a query of the same template that looked at all of this found nothing, or what this one would find."""
    return any(
        one.query.query.template == query.template
        and one.query.query.blanks.covers(query.blanks)
        and (one.finding.outcome in (Outcome.NOTHING, Outcome.UNANSWERED) or query.blanks.contain(one.finding))
        for one in executed
    )
