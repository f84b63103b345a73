"""What the pages of both coverage campaigns show of false alarms and cost, on made-up results."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from unsilent.studies.coverage.analysis import RocPoint
from unsilent.studies.coverage.inference.analysis import Cost
from unsilent.studies.coverage.inference.report import duplication_is_cheaper
from unsilent.studies.coverage.report import _roc
from unsilent.studies.coverage.report_parts import MOST_TICKS, roc_figure


def axis_of(least, most):
    return roc_figure({"one": [(0.0, 0.5), (1.0, 1.0)]}, least, most, "false alarms", "detected")["layout"]["xaxis"]


@pytest.mark.parametrize(
    ("samples", "asked", "end"),
    [(1_000, 0.05, 0.05), (102_000, 0.001, 0.001), (240, 0.001, 10 / 240), (3, 0.001, 1.0)],
    ids=["inference", "training", "few steps", "hardly any"],
)
def test_the_axis_of_false_alarms_ends_at_the_largest_rate_asked_or_at_ten_alarms(samples, asked, end):
    axis = axis_of(0.5 / samples, asked)
    assert axis["type"] == "log"
    assert [10**place for place in axis["range"]] == pytest.approx([0.5 / samples, end])


@pytest.mark.parametrize("samples", [3, 50, 240, 1_000, 102_000, 10_000_000])
def test_ticks_are_few_and_on_the_axis(samples):
    least = 0.5 / samples
    axis = axis_of(least, 0.05)
    first, *others = axis["tickvals"]
    assert (first, axis["ticktext"][0]) == (least, "none")
    assert 1 <= len(others) <= MOST_TICKS
    assert all(least < tick <= 10 ** axis["range"][1] * 1.01 for tick in others)
    for tick, text in zip(others, axis["ticktext"][1:], strict=True):
        assert float(text.removesuffix(" %")) == pytest.approx(100 * tick)
        assert 100 * tick == pytest.approx(float(f"{100 * tick:.0e}"))


def test_a_rule_is_shown_with_what_it_detects_at_no_more_false_alarms():
    """Thresholds from low to high: 40 % of the faults at 0.1 % false alarms, 30 % at 0.05 %, 20 % without any."""
    points = tuple(RocPoint(*each) for each in [(1.0, 0.9), (1e-3, 0.4), (5e-4, 0.3), (0.0, 0.2), (0.0, 0.0)])
    result = SimpleNamespace(clean_steps=10_000, roc={"a": points}, options=SimpleNamespace(rate=1e-3))
    trace = _roc(result)["data"][0]
    assert trace["line"]["shape"] == "hv"  # as high as the last point to the left
    shown = list(zip(trace["x"], trace["y"], strict=True))
    for rate, expected in [(2e-4, 0.2), (6e-4, 0.3), (2e-3, 0.4)]:
        assert (
            [y for x, y in shown if x <= rate][-1]
            == expected
            == max(p.detected for p in points if p.false_alarms <= rate)
        )


def cheaper(**ratios):
    costs = [Cost(name, (ratio, 1.0), 0.0) for name, ratio in ratios.items()]
    return list(duplication_is_cheaper(SimpleNamespace(costs=costs, reference="drdna")))


def test_the_page_says_where_running_twice_is_cheaper():
    (text,) = cheaper(ranger=1.5, abft=4.0, drdna=9.0, duplication=2.0)
    assert text.startswith("with 1 sample in a batch, running the model twice and comparing the answers")
    assert text.endswith(
        "(duplication) took 2.00 times the CPU time of the model alone, less than drdna (9.00 times) and 1 other detector"
    )
    (text,) = cheaper(drdna=1.5, abft=4.0, duplication=2.0)
    assert text.endswith("less than abft (4.00 times)")


def test_the_page_says_nothing_of_running_twice_where_it_is_not_cheaper_or_not_known():
    assert cheaper(drdna=1.5, abft=2.0, duplication=2.0) == []
    assert cheaper(drdna=9.0) == []
    assert cheaper(drdna=9.0, duplication=math.nan) == []
    assert cheaper(drdna=math.nan, duplication=2.0) == []
