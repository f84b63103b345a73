"""What the figures, the headline and the FIT table say, against numbers made by hand."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from report.showing import render_html
from unsilent.basics.errors import UsageError
from unsilent.report.heat import HeatMap, heat_figure
from unsilent.studies.pvf.analysis import MIXED_WIDTHS_REASON, check_rate, fit_rows, fit_versus_pvf_text
from unsilent.studies.pvf.records import components_with_own_layer, is_pooled, main_level, row_label
from unsilent.studies.pvf.report import (
    BARS,
    SERIES,
    curves,
    due_shares_by_row,
    outcome_shares_by_row,
    report,
    split_rows,
)
from unsilent.studies.pvf.words import headline as sentence
from unsilent.studies.pvf.words import next_commands


def wilson(hits, trials, z):
    middle, half = hits + z * z / 2, z * math.sqrt(hits * (trials - hits) / trials + z * z / 4)
    return (middle - half) / (trials + z * z), (middle + half) / (trials + z * z)


def test_the_column_of_fit_is_sorted_by_fit(demo):
    parts = [part for section in report(demo, 1e-4).sections for part in section.parts]
    table = next(part for part in parts if "(FIT)" in str(getattr(part, "title", "")))
    keys = {row.cells[0]: row.cells[4].key for row in table.rows}
    rates = {fit.row.target: fit.estimate for fit in fit_rows(demo, 1e-4)}
    assert {name: keys[name] for name in rates if name in keys} == rates


def test_curves_group_by_target_and_keep_zero(result, row, no_trial):
    rows = [row("a", flips=4), row("a", flips=1, estimate=0.0, low=0.0), no_trial("b"), row("model", "model")]
    found = curves(result(rows))
    series = [(name, [r.flips for r in rows]) for name, rows in found.series.items()]
    assert series == [("a", [1, 4]), ("model", [1])]
    assert found.series["a"][0].estimate == 0.0
    assert (found.flips, found.missing, found.left_out) == ([1, 4], ("b",), 0)


def test_curves_keep_the_most_vulnerable(result, row):
    found = curves(result([row(f"l{i}", "layer", estimate=i / 100, high=0.5) for i in range(12)]))
    assert (found.target_count, found.left_out) == (SERIES - 1, 12 - SERIES + 1)
    assert list(found.series) == [f"l{i}" for i in range(5, 12)]
    assert found.flips == [1]


def test_splits_add_up(result, row, no_trial):
    made = row("a", units=100, masked=80, benign=10, sdc=6, due=4, due_kinds={"nonfinite": 3, "hang": 1})
    study = result([made, no_trial("b"), row("c", estimate=0.0), row("model", "model")])
    assert outcome_shares_by_row(study)[0][1] == {"masked": 80, "benign": 10, "sdc": 6, "due": 4}
    assert [of.target for of, _ in outcome_shares_by_row(study)] == ["a", "c"]
    assert [(of.target, counts) for of, counts in due_shares_by_row(study)] == [
        ("a", {"sdc": 6, "nonfinite": 3, "hang": 1})
    ]


def test_splits_are_limited_and_counted(result, row):
    rows = [row(f"l{i}", "layer", estimate=i / 1000, high=0.9) for i in range(BARS + 5)]
    kept, left = split_rows(result(rows))
    assert (len(kept), left) == (BARS, 5)
    assert [r.target for r in kept] == [f"l{i}" for i in range(5, BARS + 5)]
    assert split_rows(result([])) == ([], 0)


def test_heat_reads_from_the_sign_bit():
    fields = {0: "mantissa", 1: "mantissa", 2: "exponent", 3: "sign"}
    heat = HeatMap("tiny", ("l",), (0, 1, 2, 3), fields, ((0.0, None, 0.5, 0.25),), ((4, 0, 2, 8),))
    drawn = heat_figure(heat, 0.01, "PVF")
    (trace,), layout = drawn["data"], drawn["layout"]
    assert layout["xaxis"]["ticktext"] == ["3", "2", "1", "0"]
    assert trace["z"] == [pytest.approx([math.log10(0.25), math.log10(0.5), None, -2.0])]
    assert [text.rpartition(" ")[2] for text in trace["text"][0]] == ["8", "2", "0", "4"]
    assert [note["text"] for note in layout["annotations"]] == ["sign", "exponent", "mantissa"]
    assert [shape["x0"] for shape in layout["shapes"]] == [0.5, 1.5]
    assert heat.total_trials == 14


def test_headline_claims_a_difference_only_where_intervals_separate(result, row):
    high = row("top", estimate=0.31, low=0.25, high=0.38)
    low = row("embedding", estimate=0.02, low=0.01, high=0.05)
    assert sentence(result([low, high])) == (
        "A random single-bit flip in `top` makes an output wrong with probability 31 % [25, 38]"
        " — at least 5.0 times `embedding` (2.0 % [1.0, 5.0])."
    )
    overlap = sentence(result([replace(low, joint_high=0.26), high]))
    assert overlap.endswith(
        "[25, 38]; the order of the components is not established (joint intervals overlap): run more trials."
    )
    zero = sentence(result([replace(low, estimate=0.0, low=0.0, high=0.01, joint_high=0.02), high]))
    assert zero.endswith("— at least 12 times `embedding` (< 1.0 %).")


def test_headline_of_what_was_tried_completely(result, row):
    """Exact numbers have no limits, and no more trials could be needed."""

    def exact(name, value, **more):
        return row(name, estimate=value, low=value, high=value, method="exhaustive", **more)

    told = sentence(result([exact("top", 0.31), exact("emb", 0.02)]))
    assert told == (
        "A random single-bit flip in `top` makes an output wrong with probability 31 % — at least 15 times `emb` (2 %)."
    )
    alike = sentence(result([exact("top", 0.25), exact("emb", 0.25)]))
    assert alike.endswith("makes an output wrong with probability 25 %, and the same holds for every component.")


def test_headline_of_a_list_that_was_run_in_part(result, row):
    part = {"method": "part of a list", "flips": None}
    spec = {"fault": "list f.jsonl", "spec": {"faults": "f.jsonl"}}
    rows = [row("top", estimate=0.31, low=0.2, high=0.7, **part), row("emb", estimate=0.0, low=0.0, high=0.5, **part)]
    assert sentence(result(rows, **spec)) == (
        "A fault of the `list f.jsonl` in `top` made an output wrong with probability 31 % (probability over the whole "
        "list: 20 to 70 %); which component is highest depends on the faults of the list that were not tried."
    )
    assert sentence(result([replace(rows[1], level="model")], **spec)) == (
        "A fault of the `list f.jsonl` made no output wrong in 500 trials (probability over the whole list: 0 to 50 %)."
    )


def test_equal_targets_are_rarely_called_different(result, row):
    """Of many equal components the best and the worst are picked after looking: only joint limits survive that."""
    rng = np.random.default_rng(11)
    parts, trials, normal = 50, 400, statistics.NormalDist()
    claims = []
    for confidence in (0.95, 1 - 0.05 / parts):
        claimed, z = 0, normal.inv_cdf(0.5 + confidence / 2)
        for _ in range(60):
            rows = []
            for i, hits in enumerate(rng.binomial(trials, 0.1, parts)):
                low, high = wilson(hits, trials, z)
                rows.append(row(f"p{i}", estimate=hits / trials, joint_low=low, joint_high=high))
            claimed += "overlap" not in sentence(result(rows))
        claims.append(claimed)
    assert claims[0] > 15
    assert claims[1] <= 3


def test_headline_speaks_of_one_flip_of_the_unit_and_of_the_model(result, row, no_trial):
    assert sentence(result([row("a"), row("a", flips=1, estimate=0.5)], unit="batch")).startswith("A random single-bit")
    both = [row("a", flips=4), row("a", flips=2), row("model", "model", flips=2, estimate=0.02, unit="batch")]
    assert sentence(result(both)).startswith(
        "A fault of 2 random bit flips anywhere in the parameters makes the output of a batch wrong with probability 2.0 %"
    )
    some = sentence(result(both, at="param:emb.* param:top.*"))
    assert some.startswith("A fault of 2 random bit flips in the parameters `param:emb.* param:top.*` makes")
    rate = sentence(result([replace(row("a"), flips=None)], fault="rate:at=1e-6"))
    assert rate.startswith("A `rate:at=1e-6` fault in `a` makes")
    some = sentence(result([row("a", flips=8)], fault="bitflip:bits=exponent"))
    assert some.startswith("A `bitflip:bits=exponent` fault of 8 places in `a` makes")
    none = sentence(result([row("a", estimate=0.0, low=0.0, high=0.0038)]))
    assert (
        none == "A random single-bit flip in `a` made no output wrong in 500 trials: its probability is below 0.38 %."
    )
    assert sentence(result([no_trial("a")])) == "No trial has been run yet."


def test_fit_by_hand(result, row, no_trial):
    table = row("table", estimate=0.001, low=0.0005, high=0.002, bits=10**9)
    mlp = row("mlp", estimate=0.1, low=0.05, high=0.2, bits=10**6)
    empty = row("empty", estimate=0.0, low=0.0, high=0.004, bits=1000)
    found = fit_rows(result([mlp, empty, no_trial("b", bits=10), table, row("mlp", flips=4)]), 1e-4)
    assert [f.row.target for f in found] == ["table", "mlp", "b", "empty"]
    assert [f.unmasked_fit for f in found] == pytest.approx([1e5, 100, 1e-3, 0.1])
    first = found[0]
    assert (first.estimate, first.low, first.high) == pytest.approx((100, 50, 200))
    assert found[1].estimate == pytest.approx(10)
    assert found[2].estimate is None
    assert fit_versus_pvf_text(found) == (
        "table has more FIT than mlp although its PVF is lower: it holds 1,000 times as many bits."
    )
    unsure = fit_rows(result([mlp, replace(table, joint_high=0.06)]), 1e-4)
    assert fit_versus_pvf_text(unsure) == ""
    assert fit_versus_pvf_text(fit_rows(result([mlp, empty]), 1e-4)) == ""


def test_no_fit_where_elements_have_several_widths(result, row):
    """PVF is uniform over elements, a rate per bit over bits: with several widths the product means nothing."""
    mixed = row("mixed", widest_share_of_bits=0.98, bits=10**9)
    found = fit_rows(
        result([mixed, row("a", widest_share_of_bits=0.995), row("model", "model", widest_share_of_bits=0.6)]), 1e-4
    )
    assert [(f.row.target, f.estimate is None, f.reason) for f in found] == [
        ("a", False, ""),
        ("mixed", True, MIXED_WIDTHS_REASON),
        ("model", True, MIXED_WIDTHS_REASON),
    ]
    assert (found[1].low, found[1].high, found[1].text.estimate) == (None, None, "–")
    assert fit_versus_pvf_text(found) == ""


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_fit_refuses_nonsense(result, row, rate):
    with pytest.raises(UsageError, match="fit-per-bit"):
        fit_rows(result([row("a")]), rate)


def test_fit_needs_single_flips(result, row):
    assert fit_rows(result([row("a", flips=4)]), 1e-4) == ()
    assert fit_rows(result([row("a")], fault="bitflip:bits=exponent"), 1e-4) == ()
    assert fit_rows(result([row("a")], fault="zero"), 1e-4) == ()
    assert fit_rows(result([row("a")], law="per-tensor"), 1e-4) == ()
    assert [f.row.level for f in fit_rows(result([row("model", "model"), row("a")]), 1.0)] == ["component", "model"]


def test_fit_of_values_of_a_run_is_refused():
    with pytest.raises(UsageError, match="a fault rate of parameters in memory, but the targets are values of a run"):
        check_rate(1e-4, transient=True)
    assert check_rate(1e-4) == 1e-4


def test_what_happens_in_a_component_itself_is_told_from_the_component(result, row):
    rows = [row("block"), row("block", "layer", "block"), row("block.conv", "layer", "block")]
    rows += [row("head"), row("head", "layer", "head")]
    study = result(rows)
    own = components_with_own_layer(rows)
    assert [row_label(r, own) for r in rows] == ["block", "block (itself)", "block.conv", "head", "head"]
    assert is_pooled(study)
    assert not is_pooled(result([row("a"), row("a", flips=4), row("model", "model")]))


def test_main_level(result, row):
    assert main_level(result([row("t", "tensor"), row("l", "layer"), row("b", "bit")])) == "layer"
    assert main_level(result([row("b", "bit"), row("model", "model")])) == "model"


@pytest.mark.parametrize(
    ("at", "where"),
    [
        ("op:*", "anywhere in the outputs of operations"),
        ("input:*", "anywhere in the inputs"),
        ("kv:*", "anywhere in the key/value cache"),
        ("op:a.* input:*", "in the values of `op:a.* input:*`"),
    ],
)
def test_faults_in_a_run_are_not_called_parameters(result, row, at, where):
    found = result([row("model", level="model", unit="batch")], at=at, transient=True, unit="batch")
    told = sentence(found)
    assert told.startswith(f"A random single-bit flip {where} makes the output of a batch wrong")
    assert found.measure == "P(incorrect)"
    assert fit_rows(found, 1e-4) == ()
    for text in (repr(found), render_html(found, fit_per_bit=1e-4).partition('id="figure-data"')[0]):
        assert "PVF" not in text
        assert "arameter vulnerability" not in text
        assert "P(incorrect)" in text


def test_next_commands_are_those_that_fit(result, row):
    """What can be run with a store: not where trials were not kept, and a plan only of single flips of parameters."""

    def of(**more):
        return dict(next_commands(result([row("a")], **more)))

    precise = "run trials until each row is precise"
    protect = "choose which parameters to protect"
    assert of() == {
        precise: "unsilent pvf dlrm --seed 7 --flips 1,4,16 --rel 20%",
        protect: "unsilent plan pvf.sqlite --budget 20%",
        "write the main table for a paper": "unsilent report pvf.sqlite --table -o table.tex",
    }
    assert of(store="") == of(command="unsilent.pvf(workload)") == {}
    assert precise not in of(command="unsilent pvf dlrm --ci 1%")
    assert protect not in of(at="op:*")
    assert protect not in of(fault="random")
    assert of(trials_done=5)["finish the campaign"].endswith("--trials 500 --store pvf.sqlite")
    assert "'a b.sqlite'" in of(store="a b.sqlite")[protect]
