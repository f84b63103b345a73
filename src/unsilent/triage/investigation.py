"""Executes queries one after another, until a finding is trusted or the others promise little."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.findings import Finding, FindingKind, Outcome, Query
from unsilent.triage.queries.table import TEMPLATES, execute
from unsilent.triage.runbook import ScoredQuery, Signals, scored_queries, signals_of

LEAST_SECONDS = 1.0
"""Lower costs in seconds count as this, as reading the result takes longer."""
POINTED = 1.5
"""Factor of the gain of a query about a rank that a finding has named."""
REPEATED = 0.5
"""Factor of the gain of a query for each executed query of the same template, which was not conclusive."""
BELIEVED, DOUBTED = 0.5, 0.2
"""A finding with at least the first belief ends the search. If none reaches the second one, an incident looks healthy."""
EXPLAINING = ("inspect-batch", "inspect-state")
"""Queries for the causes of `SYMPTOMS`, which are executed before a search ends with one of these."""
SYMPTOMS = frozenset({FindingKind.GRADIENT, FindingKind.NONFINITE, FindingKind.ONSET})
"""Kinds of findings that give the place of a problem, but not its cause."""
FEWEST = 3
"""Least number of answered queries before a search ends because the remaining ones would gain little."""


class Order(Protocol):
    """An order of queries, which also judges how far a finding can be trusted.

    Attributes:
        least_gain: Queries with a smaller gain are not executed.
    """

    least_gain: float

    def scored_queries(self, signals: Signals) -> list[ScoredQuery]:
        """Every possible query, the most informative one first."""
        ...

    def belief(self, signals: Signals, query: Query, finding: Finding) -> float:
        """Probability that a finding names the place of the cause."""
        ...


class Runbook:
    """The order of the hand-written rules, which trusts localised findings and executes all queries."""

    least_gain = 0.0
    by_outcome = {Outcome.LOCALISED: 1.0, Outcome.DIFFERS: (BELIEVED + DOUBTED) / 2}  # noqa: RUF012 - never changed

    def scored_queries(self, signals: Signals) -> list[ScoredQuery]:
        return scored_queries(signals)

    def belief(self, signals: Signals, query: Query, finding: Finding) -> float:
        return self.by_outcome.get(finding.outcome, 0.0)


@dataclass(frozen=True)
class Executed:
    """An executed query with its finding, its time in seconds, and the belief in the finding from 0 to 1."""

    query: ScoredQuery
    finding: Finding
    seconds: float
    belief: float = 0.0


class Conclusion(Enum):
    """The result of a search."""

    LOCALISED = "localised"
    HEALTHY = "looks healthy"
    NOT_LOCALISED = "not localised"
    UNANSWERED = "not answered"


@dataclass(frozen=True)
class Investigation:
    """The executed queries on an incident, and the ranking of all queries.

    Attributes:
        bundle: The incident.
        ranked: All queries, the most informative one first.
        executed: Queries that were executed, in order.
        is_run: Whether execution of queries was requested.
    """

    bundle: Bundle
    ranked: tuple[ScoredQuery, ...]
    executed: tuple[Executed, ...] = ()
    is_run: bool = False

    @property
    def localised(self) -> Finding | None:
        """The trusted finding, or None.

        A finding that names the fault is preferred to one that names only its place.
        """
        believed = [executed.finding for executed in self.executed if executed.belief >= BELIEVED]
        return next((finding for finding in believed if finding.kind not in SYMPTOMS), next(iter(believed), None))

    @property
    def answered(self) -> list[Executed]:
        """Executed queries whose data could be read."""
        return [executed for executed in self.executed if executed.finding.outcome is not Outcome.UNANSWERED]

    @property
    def conclusion(self) -> Conclusion:
        """The result of the search; "looks healthy" refers to the answered queries alone."""
        if self.localised is not None:
            return Conclusion.LOCALISED
        if not self.answered:
            return Conclusion.UNANSWERED
        is_doubted = all(executed.belief < DOUBTED for executed in self.executed)
        return Conclusion.HEALTHY if is_doubted else Conclusion.NOT_LOCALISED

    @property
    def left(self) -> list[ScoredQuery]:
        """Queries that were not executed, in the order in which they would be executed."""
        done = {executed.query.query for executed in self.executed}
        return in_order([query for query in self.ranked if query.query not in done], self.executed)


RUNBOOK = Runbook()


def investigate(path: Path, is_run: bool = False, order: Order = RUNBOOK, adaptive: bool = True) -> Investigation:
    """Rank the queries of an incident, and execute them with ``is_run``.

    Raises ``UsageError`` if the incident cannot be read.

    With ``adaptive``, after each finding the other queries are ranked anew by `gain` per second, and those whose answer is
    implied are left out. Otherwise the first order is kept. The search ends with a finding that is believed, or if no remaining
    query has the least gain of the order. After a believed finding of `SYMPTOMS`, batch and state are examined for the cause.
    """
    bundle = Bundle(path)
    signals = signals_of(bundle, candidates_of(bundle))
    ranked = tuple(order.scored_queries(signals))
    state = Investigation(bundle, ranked, is_run=is_run)
    while is_run and (state.localised is None or state.localised.kind in SYMPTOMS):
        known = state.executed if adaptive else ()
        done = {executed.query.query for executed in state.executed}
        left = [query for query in executable(ranked, known) if query.query not in done]
        if state.localised is not None:
            left = [query for query in left if query.query.template in EXPLAINING and not query.query.blanks.given]
        is_enough = len(state.answered) >= FEWEST
        if not left or (
            state.localised is None and is_enough and max(gain(query, known) for query in left) < order.least_gain
        ):
            break
        chosen = in_order(left, known)[0]
        begun = time.perf_counter()
        finding = execute(bundle, chosen.query)
        seconds = time.perf_counter() - begun
        belief = order.belief(signals, chosen.query, finding)
        state = replace(state, executed=(*state.executed, Executed(chosen, finding, seconds, belief)))
    return state


def executable(queries: Sequence[ScoredQuery], executed: Sequence[Executed]) -> list[ScoredQuery]:
    """Queries that the folder can answer, without executed ones and those with an implied answer."""
    done = {earlier.query.query for earlier in executed}
    return [
        query
        for query in queries
        if query.query not in done
        and not TEMPLATES[query.query.template].command
        and not is_implied(query.query, executed)
    ]


def in_order(queries: Sequence[ScoredQuery], executed: Sequence[Executed]) -> list[ScoredQuery]:
    """Queries by expected gain per second after the executed ones; those with an implied answer come last."""

    def key(query: ScoredQuery) -> tuple[bool, float]:
        seconds = max(LEAST_SECONDS, TEMPLATES[query.query.template].seconds)
        return not is_implied(query.query, executed), gain(query, executed) / seconds

    return sorted(queries, key=key, reverse=True)


def gain(query: ScoredQuery, executed: Sequence[Executed]) -> float:
    """The expected gain of a query, given the executed ones.

    The gain is the query's score, changed by `POINTED` and `REPEATED`.
    """
    is_pointed = any(query.query.blanks.rank in earlier.finding.ranks for earlier in executed)
    repeated = sum(earlier.query.query.template == query.query.template for earlier in executed)
    return (POINTED if is_pointed else 1.0) * REPEATED**repeated * query.score


def is_implied(query: Query, executed: Sequence[Executed]) -> bool:
    """Whether an executed query of the same template already implies the answer of a query."""
    return any(
        earlier.query.query.template == query.template
        and earlier.query.query.blanks.covers(query.blanks)
        and (earlier.finding.outcome in (Outcome.NOTHING, Outcome.UNANSWERED) or query.blanks.contain(earlier.finding))
        for earlier in executed
    )
