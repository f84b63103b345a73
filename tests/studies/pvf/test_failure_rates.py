"""Failure rates of two models: PVF x bits, computed again by hand; which is said to fail more often, and when nothing is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import unsilent
from conftest import in_process
from unsilent.basics.interval import Interval
from unsilent.studies.pvf.comparison import ComparedRow
from unsilent.studies.pvf.failure_rates import FailureRates, failure_rates_text, fit_headline
from unsilent.studies.pvf.records import PvfRow


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same model in float32 and in bfloat16."""
    folder = tmp_path_factory.mktemp("widths")
    for dtype in ("float32", "bfloat16"):
        done = in_process(
            "pvf", "digits-cnn", "--trials", 60, "--dtype", dtype, "--executor", "serial", "--store", folder / f"{dtype}.sqlite"
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return folder / "float32.sqlite", folder / "bfloat16.sqlite"


def shown(*words):
    done = in_process("diff", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_ratio_is_that_of_pvf_times_bits(stores):
    found = shown(*stores)
    rows = {(one["level"], one["target"]): one for one in found["results"]}
    assert found["failure_rates"]
    for one in found["failure_rates"]:
        row = rows[one["level"], one["target"]]
        assert one["bits_a"] == 2 * one["bits_b"]
        if row["a"]["estimate"]:
            expected = row["b"]["estimate"] * one["bits_b"] / (row["a"]["estimate"] * one["bits_a"])
            assert one["ratio"]["estimate"] == pytest.approx(expected)
            assert one["ratio"]["low"] == pytest.approx(row["ratio"]["low"] / 2)
    assert "At the same fault rate per bit" in found["headline"]
    assert "B holds 0.5 times as many bits" in found["headline"]


@pytest.mark.slow
def test_with_a_rate_fit_comes_first(stores):
    found = shown(*stores, "--fit-per-bit", 0.002)
    assert "FIT" in found["headline"].split(":")[0]
    assert found["fit_per_bit"] == 0.002
    model = found["failure_rates"][-1]
    row = next(one for one in found["results"] if one["level"] == "model")
    assert model["fit_a"]["estimate"] == pytest.approx(0.002 * model["bits_a"] * row["a"]["estimate"])
    assert model["fit_b"]["high"] == pytest.approx(0.002 * model["bits_b"] * row["b"]["high"])


@pytest.mark.slow
def test_of_equal_bits_nothing_more_is_said(stores, tmp_path):
    done = in_process(
        "pvf", "digits-cnn", "--trials", 60, "--seed", 3, "--executor", "serial", "--store", tmp_path / "c.sqlite"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "per bit" not in shown(stores[0], tmp_path / "c.sqlite")["headline"]


def test_a_rate_of_memory_is_refused_for_values_of_a_run(tmp_path):
    path = tmp_path / "t.sqlite"
    done = in_process("pvf", "digits-cnn", "--at", "op:*", "--trials", 4, "--executor", "serial", "--store", path)
    assert done.returncode == 0, done.stderr
    done = in_process("diff", path, path, "--fit-per-bit", 1)
    assert done.returncode == 2
    assert "--fit-per-bit is a fault rate of parameters in memory" in done.stderr


def rates(low, estimate, high):
    counts = dict.fromkeys(("units", "masked", "benign", "sdc", "due", "elements"), 1)
    row = PvfRow(
        target="model", level="model", parent="", flips=1, estimate=0.1, low=0.05, high=0.2, confidence=0.95, n=100,
        unit="sample", due_kinds={}, method="", silent_share=None, bits=320, **counts,
    )  # fmt: skip
    pair = Interval(0.0, -0.1, 0.1, 0.95, 100, ""), Interval(2.0, 1.0, 4.0, 0.95, 100, "")
    compared = ComparedRow(row, replace(row, bits=160), *pair, 1.0, 1.0, False, False, "")
    return (FailureRates(compared, Interval(estimate, low, high, 0.95, 100, "")),)


@pytest.mark.parametrize(
    ("limits", "said", "of_fit"),
    [
        ((0.5, 0.7, 0.9), "B fails less often: 0.70 times [0.50, 0.90] as often as A", "is lower in B"),
        ((1.1, 1.4, 2.0), "B fails more often: 1.4 times [1.1, 2.0] as often as A", "is higher in B"),
        ((0.5, 0.9, 1.3), "which of them fails more often is not established", "is not established"),
    ],
)
def test_what_is_said_follows_from_the_limits(limits, said, of_fit):
    assert said in failure_rates_text(rates(*limits))
    assert of_fit in fit_headline(rates(*limits), 0.1)


def test_of_no_wrong_output_no_ratio_is_said():
    assert "how often B fails compared with A is not known" in failure_rates_text(rates(0.0, None, float("inf")))


class Widths(nn.Module):
    """A layer in float32, and one of another dtype."""

    def __init__(self, dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3).to(dtype)

    def forward(self, x):
        return self.last(self.first(x).to(self.last.weight.dtype)).float()


@pytest.mark.slow
def test_a_row_of_several_widths_has_a_reason_instead(tmp_path):
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        made = unsilent.Workload(Widths(dtype), [torch.rand(6, 4)], judge="top1", name="widths")
        unsilent.pvf(made, trials=40, store=tmp_path / f"{name}.sqlite")
    done = in_process("diff", tmp_path / "a.sqlite", tmp_path / "b.sqlite", "--plain")
    assert done.returncode == 0, done.stderr
    assert "# no failure rate for model: mixed element widths" in done.stdout
    done = in_process("diff", tmp_path / "a.sqlite", tmp_path / "a.sqlite", "--plain")
    assert "no failure rate" not in done.stdout  # bits are alike and have one width
    done = in_process("diff", tmp_path / "b.sqlite", tmp_path / "b.sqlite", "--plain")
    assert "no failure rate" not in done.stdout  # bits are alike, so PVF says all
    done = in_process("diff", tmp_path / "b.sqlite", tmp_path / "b.sqlite", "--plain", "--fit-per-bit", 1)
    assert "# no failure rate for model: mixed element widths" in done.stdout
