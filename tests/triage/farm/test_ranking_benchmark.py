"""Splits and figures of the benchmark of orders, on cases that can be computed by hand."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from unsilent.triage.farm.labelled import GradedQuery, LabelledIncident
from unsilent.triage.farm.naming import HEALTHY
from unsilent.triage.farm.planned import FAMILIES, planned_incidents
from unsilent.triage.findings import FindingKind, Outcome, Query

ROOT = Path(__file__).parents[3]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT))
    metrics = importlib.import_module("benchmarks.triage_metrics")
    orders = importlib.import_module("benchmarks.triage_orders")
RIGHT = GradedQuery(Query("find-onset"), 3, Outcome.DIFFERS, FindingKind.ONSET, False, 0.1)
NAMES = ["find-onset", "verify-checkpoints", "replay-step", "inspect-batch"]


def labelled(count=400):
    return [
        LabelledIncident(
            one,
            Path(f"{one.number}/incident"),
            f"{one.number % 37}-{one.number % 5}",
            () if one.is_healthy else (RIGHT,),
        )
        for one in planned_incidents(count, seed=3)
    ]


def row(number, first, family="data", gain=0.5):
    return metrics.Ranked(number, family, first, gain, 1, 2.0, 1)


def test_gain_is_that_of_a_hand_computed_case():
    assert metrics.ndcg([0, 3, 1]) == pytest.approx((7 / math.log2(3) + 1 / 2) / (7 + 1 / math.log2(3)))
    assert metrics.ndcg([3, 1, 0]) == 1
    assert metrics.ndcg([0, 0, 0, 0, 0, 3]) == 0
    assert metrics.ndcg([0, 0]) == 0


def test_costs_are_those_until_the_first_right_query():
    one = metrics.ranked(labelled(1)[0], [2, 0, 3, 3], [(0, 0.5), (2, 30.0), (3, 1.0), (3, 2.0)])
    assert (one.first, one.right, one.seconds, one.queries) == (3, 2, 31.5, 3)


def test_queries_are_executed_by_score_per_second_where_the_folder_answers():
    scores = [0.2, 0.9, 1.0, 0.3]
    assert orders.order_of(scores, NAMES) == [2, 1, 3, 0]
    assert orders.cost_order(scores, NAMES) == [3, 0, 1]  # 0.9 in 30 s is the least, and a replay needs code
    assert orders.order_of([0.0] * 4, NAMES)[0] == 0  # of equal ones the cheapest


def test_means_are_of_incidents_or_of_families():
    rows = [row(0, 1), row(0, 5), row(1, 1), row(2, 9, "disk")]
    assert metrics.interval(rows, "mean rank", by_family=False)[0] == pytest.approx((3 + 1 + 9) / 3)
    assert metrics.interval(rows, "mean rank", by_family=True)[0] == pytest.approx((2 + 9) / 2)
    mean, low, high = metrics.interval([row(n, 1 + n % 2) for n in range(100)], "top-1", by_family=False)
    assert mean == 0.5
    assert 0.35 < low < 0.45 < 0.55 < high < 0.65
    assert metrics.interval([row(n, 1) for n in range(12)], "top-3", by_family=False) == pytest.approx(
        (1, 0.025 ** (1 / 12), 1)
    )


def test_orders_are_compared_by_incident_and_ties_left_out():
    ours = [row(n, 1) for n in range(8)] + [row(n, 1) for n in range(8)]
    assert metrics.sign_test(ours, [row(n, 2) for n in range(7)] + [row(7, 1)]) == metrics.Paired(
        7, 0, pytest.approx(2 / 2**7)
    )
    assert metrics.sign_test(ours, ours).p == 1


def test_what_is_held_out_is_not_learned_from():
    folds = [*metrics.folds_of(labelled())]
    assert [one.split for one in folds] == ["S0", "S1", "S2", "S2", "S2", *["S3"] * (len(FAMILIES) - 1), "S4", "S0"]
    for fold in folds:
        assert fold.train
        assert fold.test
        learned = int(fold is folds[-1])
        assert all(one.planned.number % 2 == learned for one in fold.train)
        assert all(one.planned.number % 2 != learned and not one.planned.is_healthy for one in fold.test)
        train, test = ([one.planned for one in part if not one.planned.is_healthy] for part in (fold.train, fold.test))
        kinds = [{(one.family, one.kind) for one in part} for part in (train, test)]
        if fold.split in ("S0", "S1"):
            assert not {one.group for one in fold.train} & {one.group for one in fold.test}
        if fold.split == "S1":
            assert all(map(metrics.is_new_place, test))
            assert not any(map(metrics.is_new_place, train))
        if fold.split in ("S2", "S3"):
            assert not kinds[0] & kinds[1]
        if fold.split == "S2":
            assert {family for family, _ in kinds[1]} <= {family for family, _ in kinds[0]}
        if fold.split == "S3":
            assert {family for family, _ in kinds[1]} == {fold.name}
            assert fold.name not in {family for family, _ in kinds[0]}
        if fold.split == "S4":
            assert not any(one.workload == "transformer" or one.world_size == 8 for one in train)
            assert all(one.workload == "transformer" or one.world_size == 8 for one in test)
    tested = [(one.planned.family, one.planned.kind) for fold in folds if fold.split == "S2" for one in fold.test]
    assert len(tested) == sum(len(FAMILIES[one.planned.family]) > 1 for one in labelled() if one in folds[0].test)
    assert HEALTHY not in {family for family, _ in tested}


def test_incidents_without_a_right_query_are_not_measured():
    measured = {one.planned.number for fold in metrics.folds_of(labelled()) for one in fold.test}
    without = [LabelledIncident(one.planned, one.folder, one.group, ()) for one in labelled()]
    assert measured
    assert not {one.planned.number for fold in metrics.folds_of(without) for one in fold.test}
