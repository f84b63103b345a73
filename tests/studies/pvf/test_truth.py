"""Estimates against exhaustive truth: every single-bit flip of a tiny model."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import unsilent
from oracles.pvf_oracle import every_flip, pvf_by_module

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    from conftest import TINY

    file = tmp_path_factory.mktemp("tiny") / "tiny.py"
    file.write_text(TINY)
    spec = importlib.util.spec_from_file_location("tiny_truth", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


@pytest.fixture(scope="module")
def truth(workload):
    return every_flip(workload.model(), workload.batches())


@pytest.fixture(scope="module")
def sizes(workload):
    model = workload.model()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        m: sum(t.numel() for n, t in named if n.startswith(m) and t.is_floating_point())
        for m in ("first", "norm", "last")
    }


def row(result, target, level="component"):
    (found,) = [r for r in result.rows if (r.target, r.level) == (target, level)]
    return found


def test_components_and_model_are_near_the_truth(workload, truth, sizes):
    result = unsilent.pvf(workload, trials=1500, seed=3)
    exact = pvf_by_module(truth)
    for name, value in exact.items():
        got = row(result, name)
        spread = (got.high - got.low) / 3.92
        assert abs(got.estimate - value) < 4 * spread, name
        assert got.n == 1500
        assert got.masked + got.benign + got.sdc + got.due == got.units == 1500 * 14
    whole = sum(exact[m] * sizes[m] for m in exact) / sum(sizes.values())
    got = row(result, "model", "model")
    assert abs(got.estimate - whole) < 4 * (got.high - got.low) / 3.92
    assert got.estimate == pytest.approx(sum(row(result, m).estimate * sizes[m] for m in exact) / sum(sizes.values()))


@pytest.mark.claim
def test_intervals_cover_the_truth_over_repeated_campaigns(workload, truth):
    exact = pvf_by_module(truth)
    covered = dict.fromkeys(exact, 0)
    repeats = 24
    for seed in range(repeats):
        result = unsilent.pvf(workload, trials=120, seed=seed)
        for name, value in exact.items():
            got = row(result, name)
            covered[name] += got.low <= value <= got.high
    # 95 % intervals: fewer than 18 of 24 has probability below 0.0002; claims/test_truth.py has 20,000.
    assert all(count >= 18 for count in covered.values()), covered


def test_bit_targets_are_near_the_truth_of_their_bit(workload, truth):
    result = unsilent.pvf(workload, trials=200, per="bit", at="last.*", seed=1)
    for bit in (31, 30, 29, 25, 22, 3):
        values = [v for (name, _, b), v in truth.items() if name.startswith("last.") and b == bit]
        got = row(result, f"last/bit{bit}", "bit")
        assert got.elements == got.bits == len(values) == 27
        assert abs(got.estimate - np.mean(values)) <= 4 * (got.high - got.low) / 3.92, bit
    whole = row(result, "last", "layer")
    values = [v for (name, _, _), v in truth.items() if name.startswith("last.")]
    assert abs(whole.estimate - np.mean(values)) < 4 * (whole.high - whole.low) / 3.92
    (heat,) = result.heat_maps
    assert heat.layers == ("last",)
    assert heat.n == ((200,) * 32,)
    assert heat.fields[31] == "sign"
    assert heat.fields[30] == "exponent"


def test_layers_of_a_component_campaign_come_from_the_hits(workload, truth):
    from unsilent import Workload

    grouped = Workload(workload.model(), workload.batches(), components={"all": "*"}, name="grouped")
    result = unsilent.pvf(grouped, trials=1500)
    exact = pvf_by_module(truth)
    assert sum(row(result, m, "layer").n for m in exact) == 1500
    for name, value in exact.items():
        got = row(result, name, "layer")
        assert got.parent == "all"
        assert abs(got.estimate - value) < 4 * (got.high - got.low) / 3.92


def test_per_tensor_law_weighs_tensors_alike(workload, truth):
    result = unsilent.pvf(workload, trials=1500, law="per-tensor", at=["last.*"])
    tensors = {n: np.mean([v for (name, _, _), v in truth.items() if name == n]) for n in ("last.weight", "last.bias")}
    got = row(result, "last")
    assert abs(got.estimate - np.mean(list(tensors.values()))) < 4 * (got.high - got.low) / 3.92


def test_batch_unit_counts_batches(workload, truth):
    result = unsilent.pvf(workload, trials=400, unit="batch")
    got = row(result, "last")
    assert got.units == 800
    assert got.estimate > row(unsilent.pvf(workload, trials=400), "last").estimate


def test_rates_and_runs_have_no_number_of_flips(workload):
    result = unsilent.pvf(workload, trials=50, fault="bitflip:rate=0.001")
    assert {r.flips for r in result.rows} == {None}
    assert row(result, "model", "model").n == 150


def test_a_zero_rate_is_all_masked(workload):
    got = row(unsilent.pvf(workload, trials=20, fault="bitflip:rate=0"), "last")
    assert (got.estimate, got.masked) == (0, got.units)
    assert got.high > 0.01
