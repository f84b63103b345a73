"""The order of queries by boosted trees, learned from executed and graded queries.

P(a query is right) = P(its template is right | the incident and its report) x P(it is right | its template is, its candidate).
A template is right if one of its queries has grade 3. The first probability is the mean of two: one from the template's own
trees, and one from trees that all templates share. The input of the shared trees is the incident and the runbook's score of the
template, but not the template itself, so they also apply to templates that were never right so far. The belief in a finding is
P(grade of at least 2 | its template, outcome and kind, the incident). Each probability comes from boosted trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.detectors.series import Floats
from unsilent.triage.farm.labelled import RIGHT
from unsilent.triage.findings import Finding, FindingKind, Outcome, Query
from unsilent.triage.possible_queries import PossibleQuery, possible_queries
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.ranking.examples import Example
from unsilent.triage.ranking.features import candidate_features, incident_features, one_hot
from unsilent.triage.ranking.trees import Trees, fit_trees
from unsilent.triage.ranking.words import Words
from unsilent.triage.runbook import RULES, Rule, ScoredQuery, Signals, scored_templates

OF_RUNBOOK = 2
"""Number of inputs of the shared trees from the runbook, before those from the incident."""
PLACED = 2
"""The least grade of a finding that names the place of the cause."""
MOST_REASONS = 2
WORDS_NAME = "the words of the report"
BLANKS, BELIEFS, SHARED = "blanks", "beliefs", "shared"
FOUND = (Outcome.DIFFERS, Outcome.LOCALISED)
OTHER_VERSION = (
    "the model was trained for other queries or features than there are now; train it again: unsilent triage train"
)


@dataclass(frozen=True, eq=False)
class TreesOrder:
    """The order of queries by trained trees.

    Attributes:
        incident, candidate: Names of features, in order.
        trees: Trees of each template by its name. `BLANKS` are trees for a candidate of a right template, `BELIEFS` for a
            finding, and `SHARED` for any template.
    """

    words: Words
    incident: tuple[str, ...]
    candidate: tuple[str, ...]
    trees: Mapping[str, Trees]

    def scored_queries(self, signals: Signals) -> list[ScoredQuery]:
        """Every possible query, ranked by the probability that it is the first right one of its template.

        Counting only the first right query keeps nearly equal queries from filling the first places together.
        """
        report = signals.bundle.report()[0] or ""
        row = self.incident_row(signals, report)
        queries = possible_queries(signals.bundle, signals.candidates)
        rows = np.array([candidate_row(query, signals, report) for query in queries]).reshape(len(queries), -1)
        fitting = self.trees[BLANKS].probabilities(rows)
        templates = {query.query.template for query in queries}
        shared = template_rows(signals, row[0])
        chances = {name: self._chance(name, row, np.array([shared[name]])) for name in templates}
        rules = {name: rule for name, (_, rule) in scored_templates(signals).items()}
        reasons = {name: self._reason(name, row, rules[name]) for name in templates}
        result = []
        for place in np.argsort(-fitting, kind="stable").tolist():
            query, name = queries[place], queries[place].query.template
            reason = "; ".join(filter(None, (reasons[name], query.reason)))
            result.append(ScoredQuery(query.query, chances[name] * float(fitting[place]), reason))
            chances[name] *= 1 - float(fitting[place])  # the remaining probability if this query is not right
        return sorted(result, key=lambda query: (-query.score, TEMPLATES[query.query.template].seconds))

    def _chance(self, name: str, row: Floats, shared: Floats) -> float:
        """Probability that a query of the template is right."""
        of_template, of_any = self.trees[name].probabilities(row)[0], self.trees[SHARED].probabilities(shared)[0]
        return float(of_template + of_any) / 2

    def belief(self, signals: Signals, query: Query, finding: Finding) -> float:
        """Probability that a finding names the place of the cause, or 0 if nothing was found."""
        if finding.outcome not in FOUND:
            return 0.0
        row = self.incident_row(signals, signals.bundle.report()[0] or "")[0]
        rows = np.array([[*finding_row(query, finding.outcome, finding.kind), *row]])
        return float(self.trees[BELIEFS].probabilities(rows)[0])

    def incident_row(self, signals: Signals, report: str) -> Floats:
        """Input row of an incident for the trees, float64[1, columns].

        Raises ``UsageError`` if the trees were trained on other features.
        """
        features = incident_features(signals)
        if tuple(features) != self.incident:
            raise UsageError(OTHER_VERSION)
        return np.array([[*features.values(), *self.words.vectors([report])[0]]])

    def _reason(self, name: str, row: Floats, rule: Rule) -> str:
        """Text that names the template's rule and the features that raised its odds most."""
        moved = self.trees[name].contributions(row)[0, :-1]
        count = len(self.incident)
        names = [*self.incident, WORDS_NAME]
        gains = [*moved[:count].tolist(), float(moved[count:].sum())]
        places = sorted(range(len(names)), key=lambda place: -gains[place])[:MOST_REASONS]
        counted = ", ".join(names[place] for place in places if gains[place] > 0)
        parts = [rule.signal] * (rule is not RULES[-1]) + [f"main reasons of the trained model: {counted}"] * bool(
            counted
        )
        return "; ".join(parts) or "nothing speaks for it in particular"


def candidate_row(query: PossibleQuery, signals: Signals, report: str) -> list[float]:
    """Input row of a query's candidate for the trees."""
    return [*candidate_features(query, signals, report).values(), *one_hot(query.query.template, [*TEMPLATES])]


def template_rows(signals: Signals, row: Sequence[float] | Floats) -> dict[str, list[float]]:
    """Input row of each template for the shared trees: score and place in the runbook, and the incident."""
    scores = {name: score for name, (score, _) in scored_templates(signals).items()}
    order = sorted(scores, key=lambda name: -scores[name])
    return {name: [score, float(order.index(name)), *row] for name, score in scores.items()}


def finding_row(query: Query, outcome: Outcome, kind: FindingKind | None) -> list[float]:
    """Input row of a finding for the trees, without the columns of the incident."""
    of_blanks = [float(name in query.blanks.given) for name in ("rank", "steps", "tensor")]
    outcome_columns = [*one_hot(kind, [*FindingKind]), float(outcome is Outcome.LOCALISED)]
    return [*one_hot(query.template, [*TEMPLATES]), *of_blanks, *outcome_columns]


def fit_trees_order(examples: Sequence[Example], words: Words, seed: int) -> TreesOrder:
    """Train the order of queries on examples; equal seeds give equal results."""
    reports = [example.report for example in examples]
    features = [incident_features(example.signals) for example in examples]
    rows = np.hstack([np.array([[*numbers.values()] for numbers in features]), words.vectors(reports)])
    answers: dict[str, list[tuple[Sequence[float], bool]]] = {
        name: [] for name in (*TEMPLATES, BLANKS, BELIEFS, SHARED)
    }
    for example, row in zip(examples, rows.tolist(), strict=True):
        shared = template_rows(example.signals, row)
        for name, queries, is_right in example.by_template():
            answers[name].append((row, is_right))
            answers[SHARED].append((shared[name], is_right))
            for possible, graded in queries:
                if is_right:
                    columns = candidate_row(possible, example.signals, example.report)
                    answers[BLANKS].append((columns, graded.grade == RIGHT))
                if graded.outcome in FOUND:
                    columns = finding_row(graded.query, graded.outcome, graded.kind)
                    answers[BELIEFS].append(([*columns, *row], graded.grade >= PLACED))
    trees = {
        name: fit_trees(
            np.array([row for row, _ in labelled]), np.array([answer for _, answer in labelled], np.bool_), seed
        )
        for name, labelled in answers.items()
    }
    first = examples[0]
    return TreesOrder(
        words, tuple(features[0]), tuple(candidate_features(first.graded[0][0], first.signals, "")), trees
    )
