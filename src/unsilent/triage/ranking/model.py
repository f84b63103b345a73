"""The learned order of queries, which combines boosted trees with the published equations.

The equations rank known kinds of causes best, but mislead for incidents unlike the training set. The trees use the runbook's
scores and lose little there. So the scores of both are averaged only if an incident is about as near to a training incident as
those are to each other. A verdict recorded by the monitor is read first, as its steps were executed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unsilent.detectors.series import Floats
from unsilent.triage.farm.labelled import LabelledIncident
from unsilent.triage.findings import Finding, Query
from unsilent.triage.investigation import RUNBOOK
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.ranking.equations import EquationsOrder, fit_equations
from unsilent.triage.ranking.examples import examples_of, without_verdicts
from unsilent.triage.ranking.features import incident_features
from unsilent.triage.ranking.trees_order import TreesOrder, fit_trees_order
from unsilent.triage.ranking.words import fit_words
from unsilent.triage.runbook import READ_VERDICT, RULES, ScoredQuery, Signals, has_fault_verdict

LEAST_GAIN = 0.01
"""Least probability that a query is informative; below it, the query is not executed."""
NEAR_SHARE = 0.95
"""Share of the training incidents that are nearer to another one than the distance up to which an incident counts as
similar."""
LEAST_DEVIATION, LARGEST_GAP = 1e-2, 5.0
"""Least deviation in which a feature is measured, and most deviations that count, so that one feature alone does not decide."""


@dataclass(frozen=True, eq=False)
class KnownIncidents:
    """Features of the incidents that a model was trained on.

    Attributes:
        rows: float64[n, features], in deviations from the mean.
        mean, deviation: float64[features].
        limit: float64[1], the distance up to which an incident counts as similar.
    """

    rows: Floats
    mean: Floats
    deviation: Floats
    limit: Floats

    def is_like(self, features: Floats) -> bool:
        """Whether the features of an incident are close to those of a known one."""
        return bool(_distances((features - self.mean) / self.deviation, self.rows).min() <= self.limit[0])


def known_incidents(features: Floats) -> KnownIncidents:
    """Features of known incidents, with the distance below which a new one counts as similar.

    ``features`` is float64[n, features].
    """
    mean, deviation = features.mean(0), np.maximum(features.std(0), LEAST_DEVIATION)
    rows = (features - mean) / deviation
    nearest = [_distances(row, np.delete(rows, place, 0)).min(initial=LARGEST_GAP) for place, row in enumerate(rows)]
    return KnownIncidents(rows, mean, deviation, np.array([np.quantile(nearest, NEAR_SHARE)]))


def _distances(row: Floats, rows: Floats) -> Floats:
    """Root mean square differences between the features in a row and those in each of ``rows``."""
    gaps = np.minimum(np.abs(rows - row), LARGEST_GAP)
    result: Floats = np.sqrt((gaps**2).mean(1))
    return result


@dataclass(frozen=True, eq=False)
class Model:
    """The trained order of queries."""

    trees: TreesOrder
    equations: EquationsOrder
    known: KnownIncidents
    least_gain = LEAST_GAIN

    def scored_queries(self, signals: Signals) -> list[ScoredQuery]:
        """Every possible query with its score, the most probable one first."""
        scored = self.trees.scored_queries(signals)
        if self.known.is_like(np.array([*incident_features(signals).values()])):
            # The equations assume that a query is right.
            any_right = min(1.0, sum(query.score for query in scored))
            others = {query.query: any_right * query.score for query in self.equations.scored_queries(signals)}
            scored = [replace(query, score=(query.score + others[query.query]) / 2) for query in scored]
        if has_fault_verdict(signals.bundle):
            first = ScoredQuery(Query(READ_VERDICT), 1.0, RULES[0].signal)
            scored = [first, *(query for query in scored if query.query.template != READ_VERDICT)]
        return sorted(scored, key=lambda query: (-query.score, TEMPLATES[query.query.template].seconds))

    def belief(self, signals: Signals, query: Query, finding: Finding) -> float:
        """Probability that a finding names the place of the cause.

        A recorded verdict is judged by the runbook, any other finding by the trees.
        """
        return (RUNBOOK if query.template == READ_VERDICT else self.trees).belief(signals, query, finding)


def train(incidents: Sequence[LabelledIncident], seed: int) -> Model:
    """Train a model on all incidents except masked ones; equal seeds give equal models.

    Raises ``UsageError`` if the incidents cannot be learned from.

    Incidents in which the monitor recorded a verdict are learned from a second time, without it.
    """
    examples = examples_of(incidents)
    examples += without_verdicts(examples)
    words = fit_words([example.report for example in examples])
    features = np.array([[*incident_features(example.signals).values()] for example in examples])
    return Model(
        fit_trees_order(examples, words, seed), fit_equations(examples, words, seed), known_incidents(features)
    )
