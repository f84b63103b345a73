"""Splits of a collection of graded incidents, and figures of how an order ranks their queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from unsilent.statistics.intervals import clopper_pearson
from unsilent.triage.farm.labelled import RIGHT, LabelledIncident
from unsilent.triage.farm.naming import HEALTHY
from unsilent.triage.farm.planned import FAMILIES, PlannedIncident

RESAMPLES = 2000
NEW_RANKS, NEW_LAYERS, NEW_STEPS = frozenset({1, 3, 6}), 0.75, (52, 55)
"""Of S1: ranks, the last quarter of the layers, and steps that no incident of its training part has its cause in."""
NEW_WORKLOAD, NEW_SIZE = "transformer", 8
"""Of S4."""


@dataclass(frozen=True)
class Fold:
    """What is learned from, and what is measured."""

    split: str
    name: str
    train: list[LabelledIncident]
    test: list[LabelledIncident]


def is_counted(one: LabelledIncident) -> bool:
    """Whether an incident is measured: it has a fault, and a right query."""
    return not one.planned.is_healthy and right_queries(one) > 0


def right_queries(one: LabelledIncident) -> int:
    """How many of the queries of an incident are right."""
    return sum(own.grade == RIGHT for own in one.graded)


def is_new_place(planned: PlannedIncident) -> bool:
    """Whether the cause is where S1 has none in its training part."""
    return planned.rank in NEW_RANKS or planned.draws[0] >= NEW_LAYERS or NEW_STEPS[0] <= planned.step <= NEW_STEPS[1]


def folds_of(incidents: Sequence[LabelledIncident]) -> Iterator[Fold]:
    """All folds. Reports of even numbers share no word with those of odd ones.

    Even ones are learned from, and odd ones measured; in S0 also the other way round, for enough incidents.
    """
    yield from _folds_of(incidents, 0)
    yield from (one for one in _folds_of(incidents, 1) if one.split == "S0")


def _folds_of(incidents: Sequence[LabelledIncident], learned: int) -> Iterator[Fold]:
    """Those that learn from numbers with this remainder by 2."""
    even = [one for one in incidents if one.planned.number % 2 == learned]
    odd = [one for one in incidents if one.planned.number % 2 != learned and is_counted(one)]
    healthy = [one for one in even if one.planned.is_healthy]
    faults = [one for one in even if not one.planned.is_healthy]

    def fold(split: str, name: str, held_out: Callable[[PlannedIncident], bool], by_group: bool) -> Fold:
        test = [one for one in odd if held_out(one.planned)]
        groups = {one.group for one in test} if by_group else set()
        train = [one for one in faults if split == "S0" or not held_out(one.planned)]
        return Fold(split, name, [one for one in train + healthy if one.group not in groups], test)

    yield fold("S0", ("other seeds", "other seeds, exchanged")[learned], lambda _: True, by_group=True)
    yield fold("S1", "new location", is_new_place, by_group=True)
    several = {family: kinds for family, kinds in FAMILIES.items() if len(kinds) > 1 and family != HEALTHY}
    for place in range(max(map(len, several.values()))):
        kinds = {(family, kinds[place]) for family, kinds in several.items() if place < len(kinds)}
        yield fold(
            "S2", f"kinds, part {place + 1}", lambda one, kinds=kinds: (one.family, one.kind) in kinds, by_group=False
        )
    for family in FAMILIES:
        if family != HEALTHY:
            yield fold("S3", family, lambda one, family=family: one.family == family, by_group=False)
    yield fold("S4", f"{NEW_WORKLOAD}, {NEW_SIZE} ranks",
               lambda one: one.workload == NEW_WORKLOAD or one.world_size == NEW_SIZE, by_group=False)  # fmt: skip


@dataclass(frozen=True)
class Ranked:
    """How an order ranked the queries of an incident.

    Attributes:
        number, family: Of the incident.
        first: Place of the first right query, from 1.
        gain: nDCG of the first five, with 2 to the power of the grade, less 1.
        right: How many queries are right.
        seconds, queries: Until the first right one, where the folder answers them and they go by score per second.
    """

    number: int
    family: str
    first: float
    gain: float
    right: int
    seconds: float
    queries: float


def ranked(one: LabelledIncident, grades: Sequence[int], costs: Sequence[tuple[int, float]]) -> Ranked:
    """Of grades in the order of the scores, and of grades and seconds in that in which queries are executed."""
    last = next(place for place, (grade, _) in enumerate(costs) if grade == RIGHT)
    return Ranked(
        one.planned.number, one.planned.family, first=1 + list(grades).index(RIGHT), gain=ndcg(grades), right=grades.count(RIGHT),
        seconds=sum(seconds for _, seconds in costs[: last + 1]), queries=last + 1,
    )  # fmt: skip


def ndcg(grades: Sequence[int], most: int = 5) -> float:
    """Discounted gain of the first queries over the largest one that any order of them has; 0 where all grades are 0."""

    def gain(values: Sequence[int]) -> float:
        return sum((2**grade - 1) / math.log2(place + 2) for place, grade in enumerate(values[:most]))

    best = gain(sorted(grades, reverse=True))
    return gain(grades) / best if best else 0.0


FIGURES: dict[str, Callable[[Ranked], float]] = {
    "top-1": lambda one: one.first <= 1, "top-3": lambda one: one.first <= 3, "top-5": lambda one: one.first <= 5,
    "mean rank": lambda one: one.first, "nDCG@5": lambda one: one.gain, "right queries": lambda one: one.right,
    "seconds": lambda one: one.seconds, "queries": lambda one: one.queries,
}  # fmt: skip
SHARES = ("top-1", "top-3", "top-5")


def interval(rows: Sequence[Ranked], figure: str, by_family: bool, seed: int = 0) -> tuple[float, float, float]:
    """Mean and 95 % bootstrap interval: over incidents, each the mean of its seeds, or over families, each of its incidents."""
    of = FIGURES[figure]
    by_number: dict[tuple[str, int], list[float]] = {}
    for one in rows:
        by_number.setdefault((one.family, one.number), []).append(float(of(one)))
    means = {key: float(np.mean(values)) for key, values in by_number.items()}
    if by_family:
        families: dict[str, list[float]] = {}
        for (family, _), value in means.items():
            families.setdefault(family, []).append(value)
        values = np.array([np.mean(own) for own in families.values()])
    else:
        values = np.array([*means.values()])
    if figure in SHARES and values.min() == values.max():  # resamples of what is alike say nothing
        own = clopper_pearson(values.sum(), len(values))
        return float(values[0]), own.low, own.high
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


@dataclass(frozen=True)
class Paired:
    """How often the first right query comes earlier in one order than in the other, and the two-sided p-value of a sign test."""

    earlier: int
    later: int
    p: float


def sign_test(ours: Sequence[Ranked], others: Sequence[Ranked]) -> Paired:
    """By incident, each with the mean place over its seeds; ties are left out."""
    places = [_mean_places(rows) for rows in (ours, others)]
    gaps = [places[0][number] - places[1][number] for number in places[0]]
    earlier, later = sum(gap < 0 for gap in gaps), sum(gap > 0 for gap in gaps)
    return Paired(earlier, later, float(binomtest(earlier, earlier + later).pvalue) if earlier + later else 1.0)


def _mean_places(rows: Sequence[Ranked]) -> dict[int, float]:
    result: dict[int, list[float]] = {}
    for one in rows:
        result.setdefault(one.number, []).append(one.first)
    return {number: float(np.mean(values)) for number, values in result.items()}
