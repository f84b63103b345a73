"""Two campaigns compared: against published numbers, slow oracles and simulation, and through stores that share faults."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import unsilent
from unsilent.basics.errors import UsageError
from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.spec import campaign_hash
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tallies import PvfEstimator, StratifiedTrials, StratumTally, Tally
from unsilent.studies.pvf.comparison import (
    RowTrials,
    compare_campaigns,
    compared_rows,
    difference_by_confidence,
    same_faults,
)
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.records import PvfRow

UNITS = 20
QUESTION = PvfEstimator(unit="sample")


def tally(wrong, units=UNITS):
    """Trials of ``units`` samples, of which so many are silently wrong."""
    classes = np.zeros((len(wrong), len(Outcome)), np.int64)
    classes[:, Outcome.SDC] = wrong
    classes[:, Outcome.MASKED] = units - np.asarray(wrong)
    return Tally(classes)


def side(*strata, shared="", units=UNITS, look=None):
    """Strata of (share, wrong samples a trial); with the same ``shared`` text trials have the same faults."""
    weighed = tuple(StratumTally(share, tally(wrong, units)) for share, wrong in strata)
    name = shared or str(id(weighed))
    trials = tuple(tuple(f"{name}{h}/{k}".encode() for k in range(len(w))) for h, (_, w) in enumerate(strata))
    return RowTrials(StratifiedTrials(weighed, look), trials)


def row(target="a", level="component", flips=1, n=100):
    counts = dict.fromkeys(("units", "masked", "benign", "sdc", "due", "elements", "bits"), 1)
    return PvfRow(
        target=target, level=level, parent="", flips=flips, estimate=0.1, low=0.0, high=1.0, confidence=0.95, n=n,
        unit="sample", due_kinds={}, method="", silent_share=None, **counts,
    )  # fmt: skip


def compared(a, b, question=None):
    """One row, B against A."""
    (found,) = compared_rows([(row(), row(), a, b)], question or QUESTION)
    return found


def binary(events, n):
    return side((1.0, [1] * events + [0] * (n - events)), units=1)


# -- against others ----------------------------------------------------------------------------------------------


def bisected(f, low, high):
    """Where ``f``, below 0 at ``low`` and above at ``high``, is 0."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return (low + high) / 2


def exact_limits(x, n, confidence):
    """Clopper and Pearson by exact binomial sums."""
    tail = (1 - confidence) / 2

    def at_most(k, p):
        return math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    low = 0.0 if x == 0 else bisected(lambda p: (1 - at_most(x - 1, p)) - tail, 0.0, 1.0)
    high = 1.0 if x == n else bisected(lambda p: tail - at_most(x, p), 0.0, 1.0)
    return low, high


TABLES = [((3, 40), (9, 50)), ((0, 40), (5, 50)), ((5, 50), (0, 40)), ((12, 60), (12, 60)), ((20, 20), (3, 30))]


@pytest.mark.parametrize(("a", "b"), TABLES)
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_limits_against_an_oracle(a, b, confidence):
    """Zou and Donner's limits: those of ``p - r q`` for r = 1, and the r at which 0 is on their edge."""
    found = compared(binary(*a), binary(*b), PvfEstimator(unit="sample", confidence=confidence))
    (p, q), ((pl, ph), (ql, qh)) = (
        (b[0] / b[1], a[0] / a[1]),
        (exact_limits(*b, confidence), exact_limits(*a, confidence)),
    )

    def lower(r):
        return p - r * q - math.hypot(p - pl, r * (qh - q))

    def upper(r):
        return p - r * q + math.hypot(ph - p, r * (q - ql))

    assert found.difference.low == pytest.approx(lower(1), abs=1e-7)
    assert found.difference.high == pytest.approx(upper(1), abs=1e-7)
    assert found.ratio.low == pytest.approx(bisected(lambda r: -lower(r), 0.0, 1e6), rel=1e-5, abs=1e-8)
    if q == 0:
        assert found.ratio.estimate is None
        assert math.isinf(found.ratio.high)
    else:
        assert found.ratio.high == pytest.approx(bisected(lambda r: -upper(r), 0.0, 1e6), rel=1e-5)


def test_the_p_value_is_where_the_interval_leaves_zero():
    a, b = binary(3, 60), binary(14, 60)
    p = compared(a, b).p
    assert 0.001 < p < 0.1
    for level, excluded in ((p * 1.01, True), (p * 0.99, False)):
        found = compared(a, b, PvfEstimator(unit="sample", confidence=1 - level)).difference
        assert (found.low > 0) == excluded
    assert compared(b, a).p == pytest.approx(p, rel=1e-4)


# -- by simulation -----------------------------------------------------------------------------------------------


def drawn(rng, n, rate):
    """Wrong samples a trial: most faults do nothing, the others spoil some or all of the samples."""
    hit = rng.random(n) < rate
    return np.where(hit, rng.choice([1, 5, 20], n, p=[0.3, 0.4, 0.3]), 0)


MEAN = 0.3 * 1 / UNITS + 0.4 * 5 / UNITS + 0.3
"""Of a fault that does something."""


def most(n, p):
    """What a binomial count does not exceed but for a chance of 1e-4."""
    return n * p + 3.8 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize(
    ("rates", "sizes"), [((0.1, 0.25), (60, 60)), ((0.05, 0.05), (80, 40)), ((0.5, 0.02), (30, 90))]
)
@pytest.mark.slow
def test_the_difference_is_covered(rates, sizes):
    rng = np.random.default_rng(5)
    truth, missed, repeats = (rates[1] - rates[0]) * MEAN, 0, 200
    for _ in range(repeats):
        sides = [
            side((0.7, drawn(rng, n, rate)), (0.3, drawn(rng, n // 2, rate)))
            for n, rate in zip(sizes, rates, strict=True)
        ]
        found = difference_by_confidence(*sides, QUESTION)(0.95)
        missed += not found.low <= truth <= found.high
    assert missed <= most(repeats, 0.05)


@pytest.mark.slow
def test_paired_differences_are_covered():
    """B keeps half of the faults of A that do something, and adds a few."""
    rng = np.random.default_rng(6)
    missed, repeats, rate = 0, 200, 0.2
    for _ in range(repeats):
        strata = [(share, drawn(rng, n, rate)) for share, n in ((0.7, 60), (0.3, 30))]
        after = [
            (share, np.where(rng.random(len(w)) < 0.5, w, np.where(rng.random(len(w)) < 0.04, UNITS, 0)))
            for share, w in strata
        ]
        sides = side(*strata, shared="f"), side(*after, shared="f")
        assert same_faults(*sides)
        found = difference_by_confidence(*sides, QUESTION)(0.95)
        truth = 0.5 * 0.04 - 0.5 * rate * MEAN  # whatever the fault did is gone in half of the trials
        missed += not found.low <= truth <= found.high
    assert missed <= most(repeats, 0.05)


@pytest.mark.slow
def test_holm_keeps_the_error_of_all_rows_together():
    """200 comparisons of six rows without any difference: some row is called different in at most 5 % of them."""
    rng = np.random.default_rng(7)
    wrong, uncorrected, repeats = 0, 0, 200
    names, rates = [f"part{i}" for i in range(6)], (0.02, 0.1, 0.3, 0.3, 0.5, 0.8)
    for _ in range(repeats):
        rows = []
        for name, rate in zip(names, rates, strict=True):
            a, b = ([int(x) for x in rng.random(80) < rate] for _ in range(2))
            rows.append((row(name), row(name), side((1.0, a), units=1), side((1.0, b), units=1)))
        found = compared_rows(rows, QUESTION)
        wrong += any(r.differs for r in found)
        uncorrected += any(r.p < 0.05 for r in found)
    assert wrong <= most(repeats, 0.05)
    assert uncorrected > most(repeats, 0.05), "the test could not tell a correction from none"


@pytest.mark.slow
def test_differences_that_are_there_are_found():
    rng = np.random.default_rng(8)
    found = 0
    for _ in range(20):
        rows = [
            (row(f"p{i}"), row(f"p{i}"), side((1.0, drawn(rng, 150, 0.3))), side((1.0, drawn(rng, 150, rate))))
            for i, rate in enumerate((0.3, 0.02, 0.3))
        ]
        results = compared_rows(rows, QUESTION)
        found += results[1].differs and results[1].difference.estimate < 0
        assert all(r.adjusted_p >= r.p for r in results)
    assert found >= 17


def test_each_level_has_its_own_correction():
    """Two levels of three alike rows: within a level p is at most tripled, not multiplied by six."""
    a, b = binary(3, 60), binary(14, 60)
    rows = [(row(f"{lv}{i}", lv), row(f"{lv}{i}", lv), a, b) for lv in ("component", "layer") for i in range(3)]
    for found in compared_rows(rows, QUESTION):
        assert found.adjusted_p == pytest.approx(3 * found.p, rel=1e-9)


def test_rows_without_an_estimate_are_neither_called_different_nor_counted():
    a, b = binary(3, 60), binary(20, 60)
    none = side((1.0, []), units=1)
    one, other = compared_rows([(row(), row(), a, b), (row("c"), row("c"), a, none)], QUESTION)
    assert one.adjusted_p == one.p
    assert (other.difference.estimate, other.p, other.adjusted_p, other.differs) == (None, None, None, False)
    assert other.difference.low < 0 < other.difference.high


# -- shared faults -----------------------------------------------------------------------------------------------


def test_pairing_is_narrower_and_asks_for_every_fault_to_be_the_same():
    rng = np.random.default_rng(9)
    before = [(0.6, drawn(rng, 200, 0.4)), (0.4, drawn(rng, 100, 0.4))]
    after = [(share, np.where(rng.random(len(w)) < 0.2, 0, w)) for share, w in before]
    mean = sum(share * (v.mean() - w.mean()) / UNITS for (share, w), (_, v) in zip(before, after, strict=True))
    a, b = side(*before, shared="f"), side(*after, shared="f")
    paired, apart = compared(a, b), compared(a, replace(b, trials=(b.trials[0], (b"other", *b.trials[1][1:]))))
    assert (paired.is_paired, apart.is_paired) == (True, False)
    for found in (paired, apart):
        assert found.difference.estimate == pytest.approx(mean)
        assert found.difference.low <= mean <= found.difference.high
    assert paired.difference.high - paired.difference.low < 0.7 * (apart.difference.high - apart.difference.low)
    assert paired.p < apart.p
    assert paired.ratio == apart.ratio
    moved = replace(b, sample=replace(b.sample, strata=tuple(replace(s, share=0.5) for s in b.sample.strata)))
    assert not compared(a, moved).is_paired, "other weights"
    fewer = RowTrials(StratifiedTrials(b.sample.strata[:1]), b.trials[:1])
    assert not compared(a, fewer).is_paired


def test_looks_widen_a_paired_difference_as_well():
    a, b = side((1.0, [0, 20] * 40), shared="f"), side((1.0, [0, 15] * 40), shared="f")
    late = [replace(s, sample=replace(s.sample, look_number=3)) for s in (a, b)]
    once, looked = compared(a, b).difference, compared(*late).difference
    assert looked.low < once.low < once.estimate == looked.estimate < once.high < looked.high


def test_exhausted_rows_are_compared_exactly():
    a, b = (
        replace(s, sample=replace(s.sample, exhaustive_of="whole list"))
        for s in (side((1.0, [0, 20, 0]), shared="f"), side((1.0, [0, 15, 0]), shared="f"))
    )
    found = compared(a, b)
    assert found.difference.low == found.difference.estimate == found.difference.high == pytest.approx(-5 / 60)
    assert found.differs
    assert found.method == "whole list"
    assert found.is_paired
    assert not compared(a, replace(b, trials=((b"other", *b.trials[0][1:]),))).is_paired
    assert not compared(a, a).differs


def test_limits_of_lists_that_were_run_in_part_add_up():
    """Whatever the rest of either list does, the difference and the ratio are within."""
    done = {"a": [1] * 5 + [0] * 15, "b": [1] * 12 + [0] * 4}
    left = {"a": 2, "b": 3}
    a, b = (
        replace(s, sample=replace(s.sample, not_run_counts=(left[name],)))
        for name, s in ((name, side((1.0, wrong), units=1, shared="f")) for name, wrong in done.items())
    )
    found = compared(a, b)
    worker_settings = {
        name: [(sum(wrong) + more) / (len(wrong) + left[name]) for more in range(left[name] + 1)]
        for name, wrong in done.items()
    }
    assert not found.is_paired
    assert found.difference.low == pytest.approx(min(worker_settings["b"]) - max(worker_settings["a"]))
    assert found.difference.high == pytest.approx(max(worker_settings["b"]) - min(worker_settings["a"]))
    assert found.ratio.low == pytest.approx(min(worker_settings["b"]) / max(worker_settings["a"]))
    assert found.ratio.high == pytest.approx(max(worker_settings["b"]) / min(worker_settings["a"]))
    assert found.difference.estimate == pytest.approx(12 / 16 - 5 / 20)
    assert found.differs


# -- stores ------------------------------------------------------------------------------------------------------


def make(seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    inputs = [torch.randn(9, 5, generator=generator) for _ in range(2)]
    return unsilent.Workload(model, inputs, **{"name": "small", "judge": "top1", **more})


def stored(path, workload=None, **more):
    unsilent.pvf(workload or make(), store=path, **{"trials": 60, "flips": [1, 3], "device": "cpu", **more})
    return path


def twin(source, path, alter):
    """Another campaign, as of the same model behind some protection, whose trials have the same faults and other ends."""
    with PvfStore(source) as old, PvfStore(path, write=True) as new:
        print_ = {**old.baseline.fingerprint, "code": "another"}
        campaign = campaign_hash(old.spec, print_)
        new.bind_campaign(old.spec, replace(old.baseline, campaign=campaign, fingerprint=print_))
        rows = [replace(r, outcome_codes=alter(r)) for r in old.rows()]
        new.record_budget(*old.largest_budget())
        new.add_rows(rows)
    return path


def protected(row):
    """Every third trial is masked."""
    return bytes(len(row.outcome_codes)) if row.trial.k % 3 == 0 else row.outcome_codes


def together(one, other, question=None):
    with PvfStore(one) as a, PvfStore(other) as b:
        return compare_campaigns(a, b, question or PvfEstimator())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("plain") / "a.sqlite")


@pytest.mark.slow
def test_shared_faults_are_compared_trial_by_trial(plain, tmp_path):
    found = together(plain, twin(plain, tmp_path / "b.sqlite", protected))
    assert all(r.is_paired for r in found.rows)
    with closing(sqlite3.connect(plain)) as db:
        trials = db.execute("SELECT target, flips, k FROM trial").fetchall()
    assert len(trials) == 60 * 2 * 2
    with PvfStore(plain) as store:
        wrong = {r.trial[:3]: sum(2 <= c <= 6 for c in r.outcome_codes) / len(r.outcome_codes) for r in store.rows()}
        shares = {t.name: t.share for t in store.baseline.targets}
    for r in found.rows:
        if r.level == "layer":  # here a component is a layer
            assert (
                r.difference
                == next(c for c in found.rows if (c.target, c.level, c.flips) == (r.target, "component", 1)).difference
            )
            continue
        names = shares if r.level == "model" else {r.target: 1.0}
        mean = sum(
            share * -sum(wrong[name, r.flips, k] for k in range(0, 60, 3)) / 60 for name, share in names.items()
        ) / sum(names.values())
        assert r.difference.estimate == pytest.approx(mean, abs=1e-12)
        assert r.difference.low <= mean <= r.difference.high
        assert r.b.estimate - r.a.estimate == pytest.approx(mean, abs=1e-12)
    assert [c.what for c in found.changes] == ["code"]
    assert not found.identical


def test_one_fault_that_differs_unpairs_only_the_rows_it_counts_in(plain, tmp_path):
    other = twin(plain, tmp_path / "b.sqlite", protected)
    with closing(sqlite3.connect(other)) as db, db:
        db.execute(
            "UPDATE trial SET faults = replace(faults, '\"operands\"', ' \"operands\"') WHERE target='0' AND flips=3 AND k=7"
        )
    apart = {(r.level, r.target, r.flips) for r in together(plain, other).rows if not r.is_paired}
    assert apart == {("component", "0", 3), ("model", "model", 3)}


def test_a_store_and_itself_do_not_differ(plain):
    found = together(plain, plain)
    assert found.identical
    assert {r.difference.estimate for r in found.rows} == {0.0}
    assert not any(r.differs for r in found.rows)
    assert {r.p for r in found.rows} == {1.0}
    assert found.notes == (), "nothing is left to chance"


@pytest.mark.slow
def test_independent_campaigns_are_not_paired(plain, tmp_path):
    found = together(plain, stored(tmp_path / "b.sqlite", make(seed=1)))
    assert not any(r.is_paired for r in found.rows)
    assert not found.identical
    assert {"weights", "inputs", "golden"} <= {c.what for c in found.changes}
    for r in found.rows:
        if r.difference.estimate is not None:
            assert r.difference.estimate == pytest.approx(r.b.estimate - r.a.estimate)


@pytest.mark.slow
def test_more_trials_of_the_same_campaign_are_no_pairs(plain, tmp_path):
    found = together(plain, stored(tmp_path / "b.sqlite", trials=90))
    assert not found.identical
    assert not any(r.is_paired for r in found.rows if r.level == "component")
    assert any("the same campaign" in note for note in found.notes)


@pytest.mark.slow
def test_precise_campaigns_are_compared_by_the_trials_that_count(tmp_path):
    a = stored(tmp_path / "a.sqlite", ci="4%", flips=None, trials=None)
    found = together(a, a)
    assert all(r.is_paired for r in found.rows)
    assert all("look" in r.a.method for r in found.rows if r.level != "layer")
    with PvfStore(a) as store:
        plans = {plan.cell: plan for plans in store.records(ROUND) for plan in plans}
        pilots = sum(plan.pilot_size for plan in plans.values())
    assert sum(r.a.n for r in found.rows if r.level == "component") == found.a.trials_done - pilots
    other = together(a, twin(a, tmp_path / "b.sqlite", protected))
    assert not any(r.is_paired for r in other.rows), "without its rounds the twin counts its pilots"


def test_exhaustive_campaigns_give_exact_differences(tmp_path):
    small = make()
    a = stored(tmp_path / "a.sqlite", small, trials="all", flips=None, at="2.bias")
    b = stored(tmp_path / "b.sqlite", make(seed=1), trials="all", flips=None, at="2.bias")
    for r in together(a, b).rows:
        assert r.difference.low == r.difference.estimate == r.difference.high


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"judge": "topk:k=2"}, "judge is top1 in A and topk:k=2 in B"),
        ({"law": "per-tensor"}, "law is per-element in A and per-tensor in B"),
        ({"per": "layer"}, "per is component in A and layer in B"),
        ({"fault": "burst:length=2", "flips": None}, "fault model is bitflip in A and burst in B"),
        ({"flips": 1}, "flips is 1,3 in A and 1 in B"),
        ({"at": "op:*"}, "unit is sample in A and batch in B"),
    ],
)
@pytest.mark.slow
def test_other_questions_are_refused(plain, tmp_path, more, said):
    workload = make(judge=more["judge"]) if "judge" in more else make()
    other = stored(tmp_path / "b.sqlite", workload, **{"trials": 4, **{k: v for k, v in more.items() if k != "judge"}})
    with pytest.raises(UsageError) as refused:
        together(plain, other)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "expected two campaigns in which these are the same" in str(refused.value)


def test_parameters_and_values_of_a_run_are_refused_in_any_unit(plain, tmp_path):
    other = stored(tmp_path / "b.sqlite", trials=4, at="op:*")
    with pytest.raises(UsageError, match="what is corrupted is parameters in A and values of a run in B"):
        together(plain, other, PvfEstimator(unit="batch"))


@pytest.mark.slow
def test_dtypes_are_told_as_found_else_as_asked(plain, tmp_path):
    def told(other):
        return [(c.a, c.b) for c in together(plain, other).changes if c.what == "dtype"]

    assert told(stored(tmp_path / "b.sqlite", trials=2, dtype="bfloat16")) == [("float32", "bfloat16")]
    assert told(stored(tmp_path / "c.sqlite", trials=2, dtype="float32")) == [("as built", "float32")]
    assert told(plain) == []


def test_rows_that_only_one_has_and_other_populations_are_told(plain, tmp_path):
    found = together(plain, stored(tmp_path / "b.sqlite", at="2.*"))
    assert {(r.target, r.level) for r in found.only_a} == {("0", "component"), ("0", "layer")}
    assert found.only_b == ()
    assert any(
        "into param:* in A and into param:2.* in B" in note or "into param:* in A and into 2.* in B" in note
        for note in found.notes
    )


def test_batches_of_another_size_are_told(plain, tmp_path):
    workload = make()
    bigger = unsilent.Workload(workload.model(), [torch.cat(list(workload.batches()))], judge="top1", name="small")
    found = together(plain, stored(tmp_path / "b.sqlite", bigger, trials=10), PvfEstimator(unit="batch"))
    assert any("9 samples in A and 18 in B" in note for note in found.notes)


def test_unfinished_campaigns_are_told(plain, tmp_path):
    part = tmp_path / "b.sqlite"
    part.write_bytes(plain.read_bytes())
    with closing(sqlite3.connect(part)) as db, db:
        db.execute("DELETE FROM trial WHERE k >= 50")
    assert "B is not complete: 200 of 240 trials." in together(plain, part).notes


def test_the_command_asks_for_the_same_comparison(plain):
    found = together(plain, plain, PvfEstimator(unit="batch", confidence=0.9))
    assert found.command == f"unsilent diff {plain} {plain} --unit batch --confidence 0.9"
    assert found.confidence == 0.9
