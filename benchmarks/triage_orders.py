"""Orders of queries that are compared on the same queries: baselines, the learned model, and what is left of it without a part.

An order is a function of an incident that gives each of its possible queries a score. It is learned from incidents and a seed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from unittest import mock

import numpy as np

from unsilent.detectors.series import GRADIENT, LOSS
from unsilent.events.event_kinds import FINGERPRINT, REPLICAS
from unsilent.triage.bundle import Bundle
from unsilent.triage.farm.labelled import RIGHT, LabelledIncident
from unsilent.triage.findings import Blanks
from unsilent.triage.history import past_end, past_scores, window
from unsilent.triage.possible_queries import PossibleQuery
from unsilent.triage.queries.table import TEMPLATES
from unsilent.triage.ranking import equations, model, trees_order
from unsilent.triage.ranking.examples import Example, examples_of
from unsilent.triage.ranking.features import Numbers, candidate_features, incident_features, is_mentioned
from unsilent.triage.ranking.trees import fit_trees
from unsilent.triage.ranking.trees_order import template_rows
from unsilent.triage.ranking.words import fit_words
from unsilent.triage.runbook import ScoredQuery, Signals, scored_queries


class Ranks(Protocol):
    """An order, or a part of one."""

    def scored_queries(self, signals: Signals) -> list[ScoredQuery]:
        """Every possible query."""
        ...


Scores = Callable[[Example], list[float]]
Trainer = Callable[["Collection", Sequence[LabelledIncident], int], Scores]
NEIGHBOURS = 10
MENTIONED = 0.5


class Collection:
    """Incidents as models see them, each read once.

    Attributes:
        examples: By the folder of the incident; without those that are masked.
        models: The last one that was trained, by what it was trained with.
    """

    def __init__(self, incidents: Sequence[LabelledIncident]) -> None:
        self.examples: dict[Path, Example] = {one.signals.bundle.folder: one for one in examples_of(incidents)}
        self._features: dict[Path, Numbers] = {}
        self.models: dict[object, model.Model] = {}

    def of(self, incidents: Sequence[LabelledIncident]) -> list[Example]:
        """Those of incidents that are not masked."""
        return [self.examples[one.folder] for one in incidents if one.folder in self.examples]

    def features(self, signals: Signals) -> Numbers:
        """Of an incident."""
        folder = signals.bundle.folder
        if folder not in self._features:
            self._features[folder] = incident_features(signals)
        return self._features[folder]


def slot(one: PossibleQuery) -> tuple[str, str, int]:
    """A query by template and the place of its candidate, which other incidents have as well."""
    return one.query.template, one.blank, one.place


def at_random(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
    """The same for the same incident and seed."""
    return lambda one: (
        np.random.default_rng([seed, *one.signals.bundle.incident.run.encode()]).random(len(one.graded)).tolist()
    )


def popularity(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
    """In what share of incidents a query of the kind was right."""
    right, asked = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
    for example in collection.of(train):
        for possible, graded in example.graded:
            asked[slot(possible)] += 1
            right[slot(possible)] += graded.grade == RIGHT
    return lambda one: [right[slot(own)] / max(1, asked[slot(own)]) for own, _ in one.graded]


def runbook(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
    """The rules, which nothing was learned for."""
    return lambda one: _in_place(one, {own.query: own.score for own in scored_queries(one.signals)})


def keywords(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
    """How many words of the report are in the name or the help of the template."""
    helps = {name: _words(f"{name} {one.help}") for name, one in TEMPLATES.items()}

    def scores(one: Example) -> list[float]:
        told = _words(one.report)
        return [
            len(told & helps[own.query.template]) + MENTIONED * is_mentioned(own.query, one.report)
            for own, _ in one.graded
        ]

    return scores


def _words(text: str) -> set[str]:
    return {word.removesuffix("s") for word in re.findall(r"[a-z]{3,}", text.lower())}


BY_FEATURE = {
    "nonfinite": ("scan-nonfinite", "inspect-batch", "inspect-state", "compare-gradients"),
    FINGERPRINT: ("compare-parameters", "inspect-state"),
    REPLICAS: ("compare-parameters", "inspect-state", "compare-gradients"),
    GRADIENT: ("compare-gradients", "inspect-batch", "inspect-state", "find-onset"),
    LOSS: ("inspect-batch", "find-onset", "inspect-state", "compare-checkpoints"),
    "": ("find-straggler", "read-flight-record", "read-log", "verify-checkpoints"),
}
"""Templates by the feature of the most unusual series; empty: none is unusual."""


def most_deviations(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
    """By the series that is the most deviations from its past; candidates by how unusual they are."""

    def scores(one: Example) -> list[float]:
        first = BY_FEATURE.get(_most_unusual(one.signals), BY_FEATURE[""])
        return [
            (len(first) - first.index(own.query.template) if own.query.template in first else 0.5) * 0.9**own.place
            for own, _ in one.graded
        ]

    return scores


def _most_unusual(signals: Signals) -> str:
    if signals.nonfinite:
        return "nonfinite"
    for name in (FINGERPRINT, REPLICAS):
        if name in signals.features:
            return name
    best = (8.0, "")
    (first, last), before = window(signals.bundle, Blanks()), past_end(signals.bundle, Blanks())
    for one in signals.bundle.series()[0].values():
        largest = np.nan_to_num(past_scores(one, before)[(one.steps >= first) & (one.steps <= last)]).max(
            0, initial=0.0
        )
        best = max(best, *((float(score), name[0]) for score, name in zip(largest, one.names, strict=True)), best)
    return best[1]


def neighbours(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
    """What was right on the incidents whose features and report are the nearest."""
    examples = collection.of(train)
    words = fit_words([one.report for one in examples])

    def row(one: Example) -> list[float]:
        return [*collection.features(one.signals).values(), *words.vectors([one.report])[0]]

    rows = np.array([row(one) for one in examples])
    mean, deviation = rows.mean(0), np.maximum(rows.std(0), 1e-6)
    known = (rows - mean) / deviation
    right = [{slot(own) for own, graded in one.graded if graded.grade == RIGHT} for one in examples]

    def scores(one: Example) -> list[float]:
        distances = np.linalg.norm(known - (np.array(row(one)) - mean) / deviation, axis=1)
        near = np.argsort(distances, kind="stable")[:NEIGHBOURS]
        return [sum((slot(own) in right[n]) / (1 + distances[n]) for n in near.tolist()) for own, _ in one.graded]

    return scores


def learned(
    incident: Callable[[Numbers], Numbers] = dict,
    candidate: Callable[[Numbers], Numbers] = dict,
    has_report: bool = True,
    part: Callable[[model.Model], Ranks] = lambda fitted: fitted,
) -> Trainer:
    """The model of the product, whose features may be changed, or a part of it."""

    def train_it(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
        key = (incident, candidate, has_report, seed, *(one.folder for one in train))
        if key not in collection.models:  # parts of one model are measured one after the other
            with changed(collection, incident, candidate, has_report):
                collection.models = {key: model.train(train, seed)}
        fitted = part(collection.models[key])

        def scores(one: Example) -> list[float]:
            with changed(collection, incident, candidate, has_report):
                return _in_place(one, {own.query: own.score for own in fitted.scored_queries(one.signals)})

        return scores

    return train_it


@contextmanager
def changed(
    collection: Collection,
    incident: Callable[[Numbers], Numbers],
    candidate: Callable[[Numbers], Numbers],
    has_report: bool,
) -> Iterator[None]:
    """While it lasts, the model reads no folder a second time, and sees features that are changed."""

    def examples(incidents: Sequence[LabelledIncident]) -> list[Example]:
        return [one if has_report else replace(one, report="") for one in collection.of(incidents)]

    def rows(signals: Signals, row: Sequence[float]) -> dict[str, list[float]]:
        known = template_rows(signals if has_report else replace(signals, symptoms=frozenset()), row)
        if incident not in (report_alone, logs_alone):
            return known
        left = trees_order.OF_RUNBOOK
        return {name: [*[0.0] * left, *one[left:]] for name, one in known.items()}

    def of_incident(signals: Signals) -> Numbers:
        return incident(collection.features(signals))

    def of_candidate(query: PossibleQuery, signals: Signals, report: str) -> Numbers:
        return candidate(candidate_features(query, signals, report))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(trees_order, "template_rows", rows))
        stack.enter_context(mock.patch.object(model, "examples_of", examples))
        for module in (model, trees_order, equations):
            stack.enter_context(mock.patch.object(module, "incident_features", of_incident))
        for module in (trees_order, equations):
            stack.enter_context(mock.patch.object(module, "candidate_features", of_candidate))
        if not has_report:
            stack.enter_context(mock.patch.object(Bundle, "report", return_value=(None, ())))
        yield


def without_report(features: Numbers) -> Numbers:
    """Without what the report says."""
    return {name: 0.0 if "report" in name else value for name, value in features.items()}


def report_alone(features: Numbers) -> Numbers:
    """What the report says, and of a candidate which blank it fills."""
    return {name: value if name.startswith("a ") or "report" in name else 0.0 for name, value in features.items()}


def logs_alone(features: Numbers) -> Numbers:
    """What logs have, and of a candidate which blank it fills."""
    return {name: value if name.startswith("a ") or "log" in name.split() or "logged" in name or "errors" in name else 0.0
            for name, value in features.items()}  # fmt: skip


def without_place(features: Numbers) -> Numbers:
    """Of a candidate, without its place among the others."""
    return features | {"place": 0.0, "position": 0.0}


def monolithic(collection: Collection, train: Sequence[LabelledIncident], seed: int) -> Scores:
    """The same features and trees, but one question for each query instead of template and candidate."""
    examples = collection.of(train)
    words = fit_words([one.report for one in examples])

    def rows(one: Example) -> list[list[float]]:
        own = [*collection.features(one.signals).values(), *words.vectors([one.report])[0]]
        return [[*trees_order.candidate_row(possible, one.signals, one.report), *own] for possible, _ in one.graded]

    answers = [graded.grade == RIGHT for one in examples for _, graded in one.graded]
    trees = fit_trees(np.array([row for one in examples for row in rows(one)]), np.array(answers, np.bool_), seed)
    return lambda one: trees.probabilities(np.array(rows(one))).tolist()


def _in_place(one: Example, scores: Mapping[object, float]) -> list[float]:
    return [scores[own.query] for own, _ in one.graded]


ORDERS: dict[str, Trainer] = {
    "random": at_random, "popularity": popularity, "runbook": runbook, "keyword search": keywords,
    "most deviations": most_deviations, "nearest incidents": neighbours, "learned": learned(),
    "learned, trees alone": learned(part=lambda fitted: fitted.trees),
    "learned, equations alone": learned(part=lambda fitted: fitted.equations),
    "learned, no report": learned(without_report, without_report, has_report=False),
    "learned, report alone": learned(report_alone, report_alone),
    "learned, logs alone": learned(logs_alone, logs_alone, has_report=False),
    "learned, no place": learned(candidate=without_place), "learned, in one piece": monolithic,
}  # fmt: skip
LEARNED, RUNBOOK = "learned", "runbook"
SEEDLESS = frozenset({"popularity", "runbook", "keyword search", "most deviations", "nearest incidents"})
"""Orders that are the same for every seed."""
ABLATIONS = frozenset({
    "learned, no report", "learned, report alone", "learned, logs alone", "learned, no place", "learned, in one piece",
})  # fmt: skip
"""Orders that are measured with one seed."""


def order_of(scores: Sequence[float], names: Sequence[str]) -> list[int]:
    """Places of queries, the highest score first; of equal ones the cheaper template, then as they are possible."""
    return sorted(range(len(scores)), key=lambda n: (-scores[n], TEMPLATES[names[n]].seconds, n))


def cost_order(scores: Sequence[float], names: Sequence[str]) -> list[int]:
    """Places of queries that the folder answers, by score per second, where a second is the least."""
    seconds = [TEMPLATES[name].seconds for name in names]
    able = [n for n in range(len(scores)) if TEMPLATES[names[n]].answer is not None]
    return sorted(able, key=lambda n: (-scores[n] / max(1.0, seconds[n]), seconds[n], n))
