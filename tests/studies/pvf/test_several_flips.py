"""Campaigns with several numbers of flips: trials with one flip have strata of bits, as where no other number is asked."""

from __future__ import annotations

import sqlite3
from itertools import combinations

import numpy as np
import pytest
import torch

import unsilent
from oracles.pvf_oracle import incorrect, pvf_by_module
from studies.pvf.test_truth import truth, workload  # noqa: F401 - fixtures
from unsilent.basics.errors import StoreError
from unsilent.campaigns.driver import ROUND
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.studies.pvf.analysis import analyse
from unsilent.studies.pvf.kind import PvfStore

pytestmark = pytest.mark.slow


def of_flips(result, flips):
    return {(r.level, r.target): r for r in result.rows if r.flips == flips}


def strata(path, flips):
    with PvfStore(path) as store:
        return {t.target for t in store.stored_trial_ids() if t.flips == flips}


def test_one_flip_needs_as_many_trials_as_alone_and_is_as_near_the_truth(workload, truth, tmp_path):  # noqa: F811
    exact, counts = pvf_by_module(truth), {"alone": 0, "mixed": 0, "unstratified": 0}
    for seed in range(3):
        for name, more in (
            ("alone", {}),
            ("mixed", {"flips": (1, 8)}),
            ("unstratified", {"strata": "none"}),
        ):
            path = tmp_path / f"{name}{seed}.sqlite"
            rows = of_flips(unsilent.pvf(workload, rel="40%", ci="1%", seed=seed, store=path, **more), 1)
            with PvfStore(path) as store:
                counts[name] += sum(t.flips == 1 for t in store.stored_trial_ids())
            for module, value in exact.items():
                got = rows["component", module]
                assert (got.high - got.low) / 2 <= max(0.4 * got.estimate, 0.01)
                assert got.low <= value <= got.high, (name, seed, module)
    print(counts)
    assert counts["alone"] / 1.4 < counts["mixed"] < 1.4 * counts["alone"]
    assert counts["mixed"] < 0.7 * counts["unstratified"]
    assert strata(tmp_path / "mixed0.sqlite", 1) == strata(tmp_path / "alone0.sqlite", 1)
    assert strata(tmp_path / "mixed0.sqlite", 8) == {"first", "norm", "last"}


def every_pair(model, batches, name):
    """Mean share of incorrect samples over all pairs of bits of a tensor."""
    words = model.state_dict()[name].numpy().reshape(-1).view(np.uint32)
    slots = [(element, np.uint32(1 << bit)) for element in range(words.size) for bit in range(32)]
    with torch.no_grad():
        golden = [model(b).numpy() for b in batches]
        shares = []
        for pair in combinations(slots, 2):
            for element, mask in pair:
                words[element] ^= mask
            wrong = [incorrect(g, model(b).numpy()) for g, b in zip(golden, batches, strict=True)]
            shares.append(np.concatenate(wrong).mean())
            for element, mask in pair:
                words[element] ^= mask
    return float(np.mean(shares))


def test_one_and_two_flips_of_a_tensor_are_near_all_single_ones_and_all_pairs(workload, truth, tmp_path):  # noqa: F811
    single = np.mean([share for (name, _, _), share in truth.items() if name == "last.bias"])
    pairs = every_pair(workload.model(), workload.batches(), "last.bias")
    result = unsilent.pvf(workload, at="last.bias", flips=(2, 1), ci="3%", store=tmp_path / "s.sqlite")
    for flips, value in ((1, single), (2, pairs)):
        got = of_flips(result, flips)["component", "last"]
        assert (got.high - got.low) / 2 <= 0.03
        assert got.low <= value <= got.high
        assert got.bits == 3 * 32
        assert got.elements == 3
    layer = of_flips(result, 1)["layer", "last"]
    assert layer.low <= single <= layer.high


def test_a_number_of_trials_may_have_such_strata_too(workload, truth, tmp_path):  # noqa: F811
    result = unsilent.pvf(workload, trials=50, flips=(1, 8), strata="bits", store=tmp_path / "s.sqlite")
    exact = pvf_by_module(truth)
    for module, value in exact.items():
        got = of_flips(result, 1)["component", module]
        assert got.low <= value <= got.high
    names = strata(tmp_path / "s.sqlite", 1)
    assert result.trials_planned == result.trials_done == 50 * (len(names) + 3)


def test_a_store_with_a_trial_of_a_stratum_that_is_not_for_its_flips_is_damaged(workload, tmp_path):  # noqa: F811
    path = tmp_path / "s.sqlite"
    unsilent.pvf(workload, trials=2, flips=(1, 8), strata="bits", store=path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE trial SET flips = 1 WHERE target = 'norm' AND k = 0")
    with PvfStore(path) as store, pytest.raises(StoreError, match="no trial of 'norm' has 1 flips"):
        analyse(store, PvfEstimator())


def test_a_round_whose_strata_are_not_for_its_flips_is_damaged(workload, tmp_path):  # noqa: F811
    path = tmp_path / "s.sqlite"
    unsilent.pvf(workload, ci="20%", flips=(1, 8), store=path)
    with sqlite3.connect(path) as db:
        assert db.execute("UPDATE record SET value = replace(value, '\"flips\": 8', '\"flips\": 1')").rowcount
    with PvfStore(path) as store, pytest.raises(StoreError):
        store.records(ROUND)
