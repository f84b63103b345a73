"""A number is said once: a list of estimates makes the table for machines, rows of sections, and texts of figures."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.render.cells import cell_text, texts
from unsilent.render.report_json import report_json
from unsilent.render.report_terminal import render_report
from unsilent.report.dots import hover_text
from unsilent.report.estimates import Estimate, machine_table, rows_across
from unsilent.report.model import Column, Report, Table

SHARE = Interval(0.25, 0.1, 0.45, 0.95, 20, "Clopper-Pearson")
NONE = Interval(0.0, 0.0, 0.308, 0.95, 10, "Clopper-Pearson")
GAP = Interval(0.25, -0.06, 0.41, 0.95, 30, "joint over 2")
JOINT = Interval(0.25, 0.08, 0.5, 0.975, 20, "")
NAMES = ("part", "flips", "measure", "")
ESTIMATES = [
    Estimate({"part": "weights", "flips": 8, "measure": "harmful"}, SHARE, "trial", JOINT),
    Estimate({"part": "weights", "flips": 8, "measure": "gap"}, GAP, "trial"),
    Estimate({"part": "moment", "flips": 1, "measure": "harmful"}, NONE, "trial"),
]


def shown(estimates):
    return Report("unsilent/x/1", "kicker", "title", "headline", machine_table(estimates, NAMES))


def test_a_list_of_estimates_makes_results():
    harmful, gap, none = report_json(shown(ESTIMATES))["results"]
    assert harmful == {
        "part": "weights", "flips": 8, "measure": "harmful", "estimate": 0.25, "low": 0.1, "high": 0.45, "confidence": 0.95,
        "n": 20, "method": "Clopper-Pearson", "unit": "trial", "joint_low": 0.08, "joint_high": 0.5,
    }  # fmt: skip
    assert (gap["measure"], gap["low"], "joint_low" in gap) == ("gap", -0.06, False)
    assert (none["part"], none["high"]) == ("moment", 0.308)


def test_a_list_of_estimates_makes_plain_lines():
    console = Console(file=io.StringIO(), width=200)
    render_report(shown(ESTIMATES), console, plain=True)
    head, *lines = (line.split() for line in console.file.getvalue().splitlines() if not line.startswith("#"))
    assert head == ["part", "flips", "measure", "estimate", "low", "high", "n"]
    assert lines[0] == ["weights", "8", "harmful", "0.25", "0.1", "0.45", "20"]


def test_plain_columns_never_shift():
    estimates = [Estimate({"part": "weights"}, SHARE, "trial", further={"failures": 5, "why": None}), ESTIMATES[2]]
    for some in (estimates, estimates[1:], []):
        table = machine_table(some, ("part", "", "failures"))
        assert [column.name for column in table.columns if not column.priority] == ["part", "", "failures"]
    first, second = report_json(shown(estimates))["results"]
    assert (first["failures"], "why" in first, "failures" in second) == (5, False, False)


def test_keys_that_not_all_estimates_have_are_left_empty():
    results = report_json(shown([Estimate({"a": "x"}, SHARE), Estimate({"a": "y", "b": "z"}, SHARE)]))["results"]
    assert [one.get("b") for one in results] == [None, "z"]
    assert all("unit" not in one for one in results)


def test_estimates_with_the_same_other_keys_share_a_row():
    rows = rows_across(ESTIMATES, "measure")
    assert rows == [
        {"part": "weights", "flips": 8, "harmful": SHARE, "gap": GAP},
        {"part": "moment", "flips": 1, "harmful": NONE},
    ]
    shown = Table.of(
        rows, (Column.text("part"), Column.count("flips"), Column.share("harmful"), Column.points("gap")), "Title"
    )
    assert shown.title == "Title"
    assert [texts(shown.columns, row) for row in shown.rows] == [
        ["weights", "8", "25 [10, 45]", "+25 [-6, +41]"],
        ["moment", "1", "0 [0, 31]", "–"],
    ]


def test_estimates_with_equal_keys_are_refused():
    with pytest.raises(ValueError, match="two estimates of weights, 8, gap"):
        rows_across([*ESTIMATES, ESTIMATES[1]], "measure")


def test_a_column_says_where_a_row_has_its_cell():
    columns = (
        Column("time", "number", of=lambda one: one / 2, digits=lambda seconds: f"{seconds:.0f} s"),
        Column.percent("part", lambda one: one / 100),
    )
    shown = Table.of([10.0, 4.0], columns, is_emphasised=lambda one: one > 5)
    assert [texts(columns, row) for row in shown.rows] == [["5 s", "10"], ["2 s", "4"]]
    assert [row.cells[0] for row in shown.rows] == [5.0, 2.0]  # sorted by the number, not by its text
    assert [row.emphasised for row in shown.rows] == [True, False]


def test_texts_of_marks_say_limits_and_trials_and_hold_no_markup_of_names():
    assert hover_text(SHARE, *ESTIMATES[0].names) == "<b>weights, 8, harmful</b><br>25 % [10, 45]<br>n = 20"
    assert hover_text(NONE, "moment") == "<b>moment</b><br>0 % [0, 31]<br>n = 10"
    assert hover_text(SHARE, "<i>x</i>", "y").startswith("<b>&lt;i&gt;x&lt;/i&gt;, y</b><br>")
    assert hover_text(Interval(None, 0.0, 1.0, 0.95, 0, ""), "x") == "<b>x</b><br>no trial"


def test_a_share_of_no_trials_is_not_shown_as_an_interval():
    none = Interval(None, 0.0, 1.0, 0.95, 0, "")
    assert [cell_text(column, none) for column in (Column.share("share"), Column.points("gap"))] == ["–", "–"]


def test_a_column_of_an_unknown_kind_is_refused():
    with pytest.raises(UsageError, match="unknown kind of column 'nmber'; did you mean 'number'"):
        Column("wrong votes", "nmber")


def test_the_headline_is_in_the_json_of_every_report():
    table = machine_table(ESTIMATES, NAMES)
    assert report_json(Report("unsilent/x/1", "x", "Title", "Headline", table))["headline"] == "Headline"
