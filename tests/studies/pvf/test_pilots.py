"""How many samples a trial evaluates, and how short pilots are read: against figures that can be worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.campaigns.rounds import trial_ids_of_plans
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tallies import PvfEstimator, Tally
from unsilent.studies.pvf.pilots import (
    PILOT_OF_TARGET,
    TrialCost,
    choose_samples,
    first_pilot,
    first_wide_pilot,
    forecasts,
    variance_left,
)
from unsilent.studies.pvf.precision import PrecisionPlanner
from unsilent.studies.pvf.row_scopes import StoredTrials, target_groups
from unsilent.studies.pvf.spec import TargetInfo
from unsilent.studies.pvf.wanted_precision import Precision

CLASSES = ("sign", "exponent-top", "mantissa-low")
WEIGHTS = {"sign": 1 / 32, "exponent-top": 30 / 32, "mantissa-low": 1 / 32}


def within(n):
    """Trials where all variance lies within faults."""
    return round(10_000 / (n or 64))


@pytest.mark.parametrize(
    ("per_trial", "per_sample", "trials", "best"),
    [
        (1.0, 100.0, within, 1),
        (1.0, 0.0, within, 64),
        (100.0, 1.0, lambda n: 1000, 1),  # samples of a fault are all alike
        (0.0, 1.0, within, 1),  # as many samples in all whatever is chosen
        (16.0, 1.0, lambda n: round(10_000 * (0.5 + 0.5 / n)), 4),  # sqrt(16 * 0.5 / (1 * 0.5))
    ],
)
def test_the_cheapest_number_of_samples(per_trial, per_sample, trials, best):
    assert choose_samples(trials, TrialCost(per_trial, per_sample), [64]) == best


def test_all_samples_of_all_batches_are_chosen_where_they_are_cheapest():
    def trials(n):
        return round(10_000 / n) if n else 10

    assert choose_samples(trials, TrialCost(1.0, 0.0), [8] * 4) == 0
    assert choose_samples(trials, TrialCost(1.0, 0.0), [8]) == 8
    assert TrialCost(2.0, 3.0).seconds(0, [8, 4]) == 2 * 2 + 12 * 3
    assert TrialCost(2.0, 3.0).seconds(6, [4, 5]) == 2 + 5 * 3


@pytest.mark.parametrize("samples", [1, 2, 5, 10])
def test_variance_that_is_left_in_a_mean_of_some_samples(samples):
    """Of 10 of which 3 are wrong, without replacement."""
    rng = np.random.default_rng(1)
    drawn = rng.permuted(np.tile([1.0] * 3 + [0.0] * 7, (20_000, 1)), axis=1)[:, :samples].mean(1)
    assert drawn.var() == pytest.approx(0.21 * variance_left(samples, [10]), abs=0.004)
    assert variance_left(0, [5, 5]) == 0


def tally(*trials):
    """Of trials of (samples, incorrect ones)."""
    counts = np.zeros((len(trials), len(Outcome)), np.int64)
    for row, (n, wrong) in zip(counts, trials, strict=True):
        row[Outcome.SDC], row[Outcome.MASKED] = wrong, n - wrong
    return Tally(counts)


def test_means_are_pulled_towards_their_class():
    known = {("a/top", 1): tally(*[(1, 1)] * 4), ("b/top", 1): tally(*[(1, 0)] * 4), ("a/low", 1): tally(*[(1, 0)] * 4)}
    found = forecasts(known, lambda n: 1 / n)
    assert found["a/top", 1].mean == pytest.approx((4 + 4 * 0.5) / 8)
    assert found["b/top", 1].mean == pytest.approx((0 + 4 * 0.5) / 8)
    assert found["a/low", 1].mean == 0
    assert 0 < found["a/low", 1].likely < 0.1, "what was not seen may happen"


@pytest.mark.parametrize("alike", [True, False])
def test_the_variance_within_faults_is_seen_in_trials_of_many_samples(alike):
    """Faults that spoil all samples or none, and faults that spoil half of them each."""
    wide = [(16, 16), (16, 0)] * 20 if alike else [(16, 8)] * 40
    found = forecasts({("a/top", 1): tally(*wide, *[(1, 1), (1, 0)] * 20)}, lambda n: variance_left(n, [1000]))
    assert found["a/top", 1].within == pytest.approx(0.0 if alike else 1.0, abs=0.1)
    stratum = found["a/top", 1].stratum(1.0, variance_left(16, [1000]))
    assert stratum.mean == pytest.approx(0.5, abs=0.01)
    assert stratum.variance == pytest.approx(0.25 if alike else 0.25 / 16, rel=0.5)


def test_first_pilots():
    targets = {t: [f"{t}/{c}" for c in CLASSES] for t in "abcde"}
    assert all(sum(p.values()) >= PILOT_OF_TARGET for p in first_pilot(targets).values())
    assert first_pilot({"a": ["a"]}) == {"a": {"a": PILOT_OF_TARGET}}
    wide = first_wide_pilot(name for names in targets.values() for name in names)
    for c in CLASSES:
        assert sum(n for name, n in wide.items() if name.endswith(c)) == 2
    assert len({name[0] for name, n in wide.items() if n}) > 2, "spread over targets"


class Stored(StoredTrials):
    """Trials that are made up: those of exponent-top are wrong in ``share`` of their samples."""

    def __init__(self, samples, cost, share=0.5, sizes=(64,)):
        strata = [
            TargetInfo(f"{t}/{c}", "component", t, "", WEIGHTS[c] / 2, 10, ((32, 320),), group=t)
            for t in "ab"
            for c in CLASSES
        ]
        self.spec = SimpleNamespace(samples=samples, flips=(1,), is_transient=False, is_enumerated=False)
        self.description = SimpleNamespace(
            targets=tuple(strata), samples=sizes, trial_seconds=cost[0], sample_seconds=cost[1],
            targets_at=lambda flips: tuple(strata),
        )  # fmt: skip
        self.unit, self.plans, self._share = "sample", {}, share

    def _tally(self, stratum, flips, which):
        trials = []
        for samples, numbers in which or ():
            n = samples or self.spec.samples or sum(self.description.samples)
            rng = np.random.default_rng([samples, *stratum.encode()])
            p = self._share if stratum.endswith("exponent-top") else 0.0
            trials += [(n, int(k)) for k in rng.binomial(n, p, numbers.stop)[numbers.start :]]
        return tally(*trials)


def rounds(stored, rel=0.1, rows=()):
    planner, found = PrecisionPlanner(Precision(0.0002, rel, rows), PvfEstimator(unit="sample"), 10**6), []
    while decided := planner.round_after(stored):
        found.append(decided)
        stored.plans |= {plan.cell: plan for plan in decided}
    return found


@pytest.mark.parametrize(
    ("cost", "least", "most"), [((1.0, 1000.0), 1, 1), ((1000.0, 1.0), 16, 64), ((1.0, 0.0), 32, 64)]
)
def test_planned_trials_have_the_samples_that_are_cheapest(cost, least, most):
    """All variance lies within faults."""
    stored = Stored(None, cost)
    found = rounds(stored)
    assert {p.pilot_samples for p in found[0]} == {1}
    assert {p.wide_samples for p in found[0]} == {16}
    assert all(least <= plan.samples <= most for plan in stored.plans.values())
    for plan in stored.plans.values():
        counted = {t.sample_count for t in trial_ids_of_plans([plan]) if plan.is_counted(t)}
        assert counted == {plan.samples}


def test_what_was_chosen_stays_when_a_campaign_goes_on_with_other_costs():
    stored = Stored(None, (1000.0, 1.0))
    rounds(stored)
    chosen = {cell: plan.samples for cell, plan in stored.plans.items()}
    assert min(chosen.values()) > 1
    stored.description.trial_seconds, stored.description.sample_seconds = 1.0, 1000.0
    again = rounds(stored, rel=0.02)
    assert again, "more was asked for"
    assert {cell: plan.samples for cell, plan in stored.plans.items()} == chosen
    ids = list(trial_ids_of_plans(stored.plans.values()))
    assert len(ids) == len(set(ids))


def test_trials_go_where_the_chosen_rows_need_them():
    def campaign(*rows):
        stored = Stored(1, (1.0, 1.0))
        rounds(stored, rows=rows)
        plans = {plan.group: plan for plan in stored.plans.values()}
        groups = {group.name: group for group in target_groups(stored, 1)}
        question = PvfEstimator(unit="sample")
        precise = {
            name for name, group in groups.items() if Precision(0.0002, 0.1).is_reached_by(question.estimate(group.sample))
        }  # fmt: skip
        return {name: plan.total_trials for name, plan in plans.items()}, precise, plans

    every, precise, _ = campaign()
    assert precise == {"a", "b", "model"}
    model, precise, _ = campaign("model")
    assert "model" in precise
    assert sum(model.values()) < 0.75 * sum(every.values())
    one, precise, plans = campaign("a*")
    assert "a" in precise
    assert one["a"] <= 1.1 * every["a"]
    assert dict(plans["b"].first_look_trials) == dict(plans["b"].pilot_trials)


def test_a_name_that_no_row_has_is_refused_before_any_trial():
    with pytest.raises(UsageError, match=r"--ci or --rel is for 'c', which is no row; the rows are model, a, b"):
        rounds(Stored(1, (1.0, 1.0)), rows=("model", "c"))


@pytest.mark.parametrize("samples", [0, 4])
def test_nothing_is_chosen_where_samples_are_given(samples):
    stored = Stored(samples, (1000.0, 1.0))
    rounds(stored)
    assert {t.sample_count for t in trial_ids_of_plans(stored.plans.values())} == {0}


def test_batches_of_one_sample_leave_nothing_to_choose():
    stored = Stored(None, (1000.0, 1.0), sizes=(1,) * 64)
    rounds(stored)
    assert {t.sample_count for t in trial_ids_of_plans(stored.plans.values())} == {1}
