"""Exports of campaigns that are planned in rounds: they say which trials count, so that estimates follow from them alone."""

from __future__ import annotations

import csv
import json
from contextlib import closing
from dataclasses import replace
from sqlite3 import connect

import numpy as np
import pytest

from conftest import TINY, in_process
from unsilent.basics.errors import StoreError
from unsilent.campaigns.export import canonical_lines
from unsilent.campaigns.rounds import MOST_LOOKS, NO_LOOK, CellPlan, trial_ids_of_plans
from unsilent.campaigns.spec import TrialId
from unsilent.studies.pvf.kind import PvfStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("rounds")
    (found / "tiny.py").write_text(TINY)
    for seed in range(2, 12):  # whose draws let some targets come to later looks than others
        store = f"{seed}.sqlite"
        words = (
            "tiny.py:make",
            "--at",
            "first.weight",
            "--at",
            "last.bias",
            "--seed",
            seed,
            "--samples",
            "all",
            "--quiet",
            "--store",
            store,
        )
        for precision in ("14%", "11%", "9%"):
            done = in_process("pvf", *words, "--ci", precision, cwd=found)
            assert done.returncode == 0, done.stderr
        assert in_process("export", store, "-o", f"{seed}.json", cwd=found).returncode == 0
        exported = json.loads((found / f"{seed}.json").read_text())
        plans = {p["group"]: p for decided in exported["rounds"] for p in decided}
        looks = {plan["look"] for plan in plans.values()}
        if len(looks) > 1 and max(looks) > 1:
            break
    (found / store).rename(found / "s.sqlite")
    for ending in ("json", "csv"):
        assert in_process("export", "s.sqlite", "-o", f"s.{ending}", cwd=found).returncode == 0
    return found


def recomputed(campaign, strata):
    """Estimate and number of trials of some strata, from what the export says and nothing else."""
    plans = {plan["group"]: plan for decided in campaign["rounds"] for plan in decided}
    look = min(plans[stratum["group"]]["look"] for stratum in strata)
    means, n = [], 0
    for stratum in strata:
        own = [t for t in campaign["trials"] if t["target"] == stratum["name"] and 0 <= t["look"] <= look]
        codes = np.array([[int(digit) for digit in t["outcome_codes"]] for t in own])
        means.append((np.isin(codes, [2, 3, 4, 5, 6]).sum(1) / (codes != 7).sum(1)).mean())
        n += len(own)
    return np.average(means, weights=[stratum["share"] for stratum in strata]), n


@pytest.mark.slow
def test_estimates_follow_from_the_json_alone(folder):
    campaign = json.loads((folder / "s.json").read_text())
    report = json.loads(in_process("report", "s.sqlite", "--json", cwd=folder).stdout)
    targets, looks = campaign["description"]["targets"], {trial["look"] for trial in campaign["trials"]}
    assert {NO_LOOK, 0, 1, 2} <= looks, "a pilot, look 0 and a later one"
    rows = {row["target"]: row for row in report["results"] if row["level"] in ("component", "model")}
    assert len(rows) == 3
    for name, row in rows.items():
        strata = [target for target in targets if name in ("model", target["group"])]
        assert recomputed(campaign, strata) == (pytest.approx(row["estimate"], rel=1e-12), row["n"])
    assert rows["model"]["n"] < sum(trial["look"] >= 0 for trial in campaign["trials"]), (
        "the least advanced look counts"
    )


def test_tables_say_it_as_well(folder):
    with open(folder / "s.csv", newline="") as file:
        looks = [row["look"] for row in csv.DictReader(file)]
    assert looks == [str(trial["look"]) for trial in json.loads((folder / "s.json").read_text())["trials"]]


def test_equal_rows_with_other_rounds_are_not_equal(folder, tmp_path):
    path = tmp_path / "other.sqlite"
    path.write_bytes((folder / "s.sqlite").read_bytes())
    with closing(connect(path)) as db, db:
        db.execute("DELETE FROM record WHERE rowid = (SELECT max(rowid) FROM record)")
    with PvfStore(folder / "s.sqlite") as one, PvfStore(path) as other:
        assert [row.reproducible_values() for row in one.rows()] == [row.reproducible_values() for row in other.rows()]
        mine, theirs = list(canonical_lines(one)), list(canonical_lines(other))
    assert mine[0] != theirs[0]
    assert mine[1:] == theirs[1:]


def test_a_look_that_no_campaign_comes_to_is_refused(folder, tmp_path):
    path = tmp_path / "far.sqlite"
    path.write_bytes((folder / "s.sqlite").read_bytes())
    with closing(connect(path)) as db, db:
        text = db.execute("SELECT value FROM record ORDER BY rowid DESC").fetchone()[0]
        plans = [plan | {"look": 10 * MOST_LOOKS} for plan in json.loads(text)]
        db.execute("INSERT INTO record VALUES ('round', ?)", (json.dumps(plans),))
    with PvfStore(path) as store, pytest.raises(StoreError, match="impossible numbers"):
        list(store.records("round"))


def test_looks_of_a_plan():
    pilot = CellPlan("a", 1, "", {"a/x": 3}, {}, {})
    assert [pilot.look_of_trial(TrialId("a/x", 1, k)) for k in range(5)] == [0, 0, 0, NO_LOOK, NO_LOOK]
    plan = replace(pilot, first_look_trials={"a/x": 2}, pilot_means={"a/x": 0.5}, look=1)
    assert [plan.look_of_trial(TrialId("a/x", 1, k)) for k in range(8)] == [*[NO_LOOK] * 3, 0, 0, 1, NO_LOOK, NO_LOOK]
    assert plan.look_of_trial(TrialId("a/x", 1, 3, 4)) == NO_LOOK, "of other samples"
    assert plan.total_trials == 6


def test_looks_of_a_plan_whose_trials_evaluate_other_samples_than_its_pilot():
    """They are other trials, so they start at 0; where a part of the pilot evaluates as many, they come after it."""
    plan = CellPlan("a", 1, "", {"a/x": 3}, {"a/x": 2}, {"a/x": 0.5}, 1, 1, {"a/x": 1}, 16, 4)

    def looks(samples):
        return [plan.look_of_trial(TrialId("a/x", 1, k, samples)) for k in range(4)]

    assert (looks(4), looks(1), looks(16)) == ([0, 0, 1, NO_LOOK], [NO_LOOK] * 4, [NO_LOOK] * 4)
    assert plan.total_trials == 3 + 1 + 3
    wide = replace(plan, samples=16)
    assert [wide.look_of_trial(TrialId("a/x", 1, k, 16)) for k in range(5)] == [NO_LOOK, 0, 0, 1, NO_LOOK]
    ids = list(trial_ids_of_plans([wide]))
    assert len(ids) == len(set(ids)) == wide.total_trials == 3 + 1 + 3
