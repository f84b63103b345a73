"""Every single bit flip through the product, against loops over the model; and campaigns that stop when they are precise."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pytest
import torch

import unsilent
from conftest import in_process
from studies.pvf.test_truth import row, sizes, truth, workload  # noqa: F401 - fixtures
from unsilent.basics.errors import UsageError
from unsilent.campaigns.driver import ROUND
from unsilent.outcomes.base import Outcome
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.pilots import first_pilot
from unsilent.studies.pvf.wanted_precision import Precision

pytestmark = pytest.mark.slow


def test_all_flips_are_the_truth(workload, truth, sizes, tmp_path):  # noqa: F811
    from oracles.pvf_oracle import pvf_by_module

    result = unsilent.pvf(workload, trials="all", store=tmp_path / "all.sqlite")
    for name, value in pvf_by_module(truth).items():
        got = row(result, name)
        assert got.estimate == got.low == got.high == pytest.approx(value, abs=1e-12)
        assert got.method == "exhaustive"
    assert result.trials_done == result.trials_planned == len(truth)
    assert f"faults tried: {len(truth):,}" in repr(result)
    with PvfStore(tmp_path / "all.sqlite") as store:
        corrupted = {
            (f["site"], f["elements"][0], f["operands"][0]) for r in store.rows() for f in json.loads(r.faults)
        }
    assert len(corrupted) == len(truth)


def test_part_of_all_flips_is_a_sample_of_them(workload, truth, tmp_path):  # noqa: F811
    """What was killed on its way has seen all parts alike."""
    path = tmp_path / "part.sqlite"
    whole = unsilent.pvf(workload, trials="all", store=path)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM trial WHERE k >= 300")
    with PvfStore(path) as store:
        from unsilent.outcomes.tallies import PvfEstimator
        from unsilent.studies.pvf.analysis import analyse

        part = analyse(store, PvfEstimator())
    for name in ("first", "norm", "last"):
        exact, got = row(whole, name), row(part, name)
        assert got.low <= exact.estimate <= got.high
        assert got.method != "exhaustive" or got.n == exact.n


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fault": "zero"}, "tries single bit flips"),
        ({"flips": 2}, "tries single bit flips"),
        ({"law": "per-tensor"}, "gives all elements equal weight"),
    ],
)
def test_what_cannot_be_exhausted_is_refused(workload, more, words):  # noqa: F811
    with pytest.raises(UsageError, match=words):
        unsilent.pvf(workload, trials="all", **more)


def test_every_row_becomes_as_precise_as_asked(workload, truth, sizes, tmp_path):  # noqa: F811
    from oracles.pvf_oracle import pvf_by_module

    result = unsilent.pvf(workload, rel="20%", ci="0.5%", store=tmp_path / "s.sqlite")
    exact = pvf_by_module(truth)
    for name in ("first", "norm", "last"):
        got = row(result, name)
        assert (got.high - got.low) / 2 <= max(0.2 * got.estimate, 0.005)
        assert abs(got.estimate - exact[name]) < 2.5 * (got.high - got.low) / 2
        assert "look" in got.method
    assert result.imprecise_rows == ()
    assert "--rel" not in result.command
    assert "rel='0.2'" in result.command or "rel=" in result.command
    even = 3 * Precision(0.0, 0.2).target_half_width(1.0) ** -2 * 3.84 * (1 / min(exact.values()) - 1)
    assert result.trials_done < even


def test_more_precision_goes_on_and_less_runs_nothing(workload, tmp_path):  # noqa: F811
    path = tmp_path / "s.sqlite"
    first = unsilent.pvf(workload, ci="4%", store=path)
    again = unsilent.pvf(workload, ci="6%", store=path)
    assert again.trials_done == first.trials_done
    assert again.rows == first.rows
    finer = unsilent.pvf(workload, ci="1.5%", store=path)
    assert finer.trials_done > 1.5 * first.trials_done
    assert all((r.high - r.low) / 2 <= 0.015 for r in finer.rows if r.level in ("model", "component"))
    with PvfStore(path) as store:
        rounds = store.records(ROUND)
    strata = {cell.group: list(cell.pilot_trials) for cell in rounds[0]}
    assert {cell.group: cell.pilot_trials for cell in rounds[0]} == first_pilot(strata)
    planned = [all(cell.first_look_trials for cell in cells) for cells in rounds]
    assert not planned[0]
    assert planned == sorted(planned), "pilots go on before look 0, not after it"


@pytest.mark.parametrize(
    ("trials", "said"),
    [(20, "need a pilot of [0-9]+ trials in '[a-z]+' to plan"), (10**6, r"needs about [0-9,]{15,} trials")],
)
def test_what_no_budget_reaches_is_one_line(workload, trials, said):  # noqa: F811
    with pytest.raises(UsageError, match=said):
        unsilent.pvf(workload, ci="0.0000000001%", trials=trials)


def test_a_pilot_that_saw_little_does_not_refuse_what_may_do(workload):  # noqa: F811
    """Without strata its few events say little: the budget is tried. Looks grow by a factor, so a part may be left."""
    result = unsilent.pvf(workload, rel="30%", strata="none", at="last.*", trials=3000, samples="all")
    wide = [
        r
        for r in result.rows
        if r.level in ("model", "component") and (r.high - r.low) / 2 > max(0.3 * r.estimate, 0.0002)
    ]
    assert bool(wide) == bool(result.imprecise_rows)
    assert result.trials_done > 1500, "more than a pilot"


def test_what_the_budget_cannot_reach_is_said_before_it_is_spent(workload, tmp_path):  # noqa: F811
    path = tmp_path / "s.sqlite"
    with pytest.raises(
        UsageError, match=r"needs about [0-9,]+ trials, but trials= allows 600, which reach about ±"
    ) as error:
        unsilent.pvf(workload, ci="0.1%", trials=600, store=path)
    assert "\n" not in str(error.value)
    with PvfStore(path) as store:
        assert len(store.stored_trial_ids()) <= 600 * 3
    reached = float(str(error.value).split("reach about ±")[1].split()[0])
    result = unsilent.pvf(workload, ci=f"{1.3 * reached}%", trials=900, store=path)
    assert result.rows


@pytest.mark.parametrize("text", ["0", "x", "200%", "-1%", "1e-400"])
def test_nonsense_precision_is_refused(text):
    with pytest.raises(UsageError, match="expected a share between 0 and 1"):
        Precision.parse(text, None)


def test_strata_need_single_flips(workload):  # noqa: F811
    with pytest.raises(UsageError, match="needs one flip of any bit"):
        unsilent.pvf(workload, trials=10, strata="bits", flips=8)


@pytest.mark.claim
def test_adaptive_rows_do_not_depend_on_jobs_or_kills(tiny, tmp_path):
    exports = []
    for name, more in (("serial", []), ("two", ["--jobs", "2"]), ("plain", ["--engine", "plain"])):
        store = tmp_path / f"{name}.sqlite"
        words = ("--ci", "3%")
        done = in_process("pvf", f"{tiny}:make", *words, "--store", store, "--quiet", "--plain", *more)
        assert done.returncode == 0, done.stderr
        exports.append(in_process("export", store, "--canonical").stdout)
    cut = tmp_path / "serial.sqlite"
    with sqlite3.connect(cut) as db:
        db.execute("DELETE FROM trial WHERE rowid % 3 = 0")
        db.execute("DELETE FROM record WHERE rowid > 1")
    done = in_process("pvf", f"{tiny}:make", *words, "--store", cut, "--quiet", "--plain")
    assert done.returncode == 0, done.stderr
    exports.append(in_process("export", cut, "--canonical").stdout)
    assert len(set(exports)) == 1


@pytest.mark.parametrize("samples", [1, 3, 7])
def test_some_samples_a_trial_ask_the_same_question(workload, truth, samples):  # noqa: F811
    """Batch and samples are drawn with the fault, the others are not evaluated; estimates stay those of all samples."""
    from oracles.pvf_oracle import pvf_by_module

    result = unsilent.pvf(workload, trials=1500, samples=samples, seed=2)
    for name, value in pvf_by_module(truth).items():
        got = row(result, name)
        assert got.n == 1500
        assert got.units == 1500 * samples  # of two batches of seven
        assert abs(got.estimate - value) < 4 * (got.high - got.low) / 3.92
    assert f"samples={samples}" in result.command


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"at": "op:*"}, "acts in all samples of one batch"),
        ({"trials": "all"}, "trials= all evaluates all samples"),
        ({"samples": 0.5}, "expected a number of samples of 1 or more, or all"),
        ({"unit": "batch"}, "unit= batch judges whole batches"),
        ({"samples": 8}, "the largest batch has 7; give at most 7, or all .14 samples in 2 batches"),
    ],
)
def test_samples_that_a_trial_cannot_have(workload, more, message):  # noqa: F811
    with pytest.raises(UsageError, match=message):
        unsilent.pvf(workload, **{"trials": 5, "samples": 2, **more})


def test_all_samples_are_the_default(workload):  # noqa: F811
    codes = [unsilent.pvf(workload, trials=20, samples=samples, seed=3).campaign for samples in (None, "all", 7)]
    assert codes[0] == codes[1] != codes[2]


def test_fixed_trials_do_not_go_on_where_looks_say_what_counts(workload, tmp_path):  # noqa: F811
    path = tmp_path / "s.sqlite"
    unsilent.pvf(workload, ci="4%", samples="all", store=path)
    with pytest.raises(UsageError, match="was planned with ci= or rel="):
        unsilent.pvf(workload, strata="bits", trials=300, store=path)


def test_every_sample_of_unequal_batches_is_as_likely(tmp_path):
    from unsilent import Workload

    batches = [torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) for n in (1, 1, 9)]
    uneven = Workload(torch.nn.Linear(6, 3), batches)
    for samples in (1, 2, 9):
        path = tmp_path / f"{samples}.sqlite"
        assert unsilent.pvf(uneven, trials=2200, samples=samples, store=path).rows
        with PvfStore(path) as store:
            codes = np.array([np.frombuffer(r.outcome_codes, np.uint8) for r in store.rows()])
        shares = (codes != Outcome.SPARED) / (codes != Outcome.SPARED).sum(1, keepdims=True)
        assert abs(shares.mean(0) - 1 / 11).max() < 4.5 * (1 / 11 / 2200) ** 0.5  # what the mean of a sample weighs
    with PvfStore(path) as store, pytest.raises(UsageError, match="needs trials that evaluate whole batches"):
        store.analyse(unit="batch")


@pytest.mark.claim
def test_any_shard_of_all_faults_is_a_fair_sample_of_them(workload, tiny):  # noqa: F811
    """A part that saw some bits alone would miss the truth by far."""
    whole = unsilent.pvf(workload, trials="all")
    for part in ("1/4", "2/4", "3/4", "4/4"):
        words = [
            "pvf",
            f"{tiny}:make",
            "--trials",
            "all",
            "--shard",
            part,
            "--store",
            part.replace("/", ""),
            "--json",
            "--quiet",
        ]
        done = in_process(*words)
        assert done.returncode == 0, done.stderr
        for got in json.loads(done.stdout)["results"]:
            if got["level"] == "component":
                spread = (got["high"] - got["low"]) / 3.92
                assert abs(got["estimate"] - row(whole, got["target"]).estimate) < 4.5 * spread


def test_layers_are_unbiased_where_strata_hold_some_tensors_of_a_component(workload, truth):  # noqa: F811
    """Tables are not split by sign, and some tensors have values of one sign: strata of a component hold different tensors."""
    from oracles.pvf_oracle import pvf_by_module

    found = [unsilent.pvf(workload, trials=60, strata="bits", seed=seed) for seed in range(12)]
    for name, value in pvf_by_module(truth).items():
        estimates = np.array([r.estimate for one in found for r in one.rows if (r.level, r.target) == ("layer", name)])
        assert abs(estimates.mean() - value) < 4.5 * estimates.std(ddof=1) / len(estimates) ** 0.5
