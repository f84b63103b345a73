"""Curves of figures: names and texts hold no markup, gaps stay gaps."""

from __future__ import annotations

from itertools import pairwise

from unsilent.report.curves import DASHES, line_series, line_style
from unsilent.report.theme import SERIES_COLOURS
from unsilent.studies.coverage.report_parts import roc_figure

NAME = "<b>mine</b>"


def test_a_curve_has_no_markup_of_its_name():
    drawn = line_series(NAME, [(1.0, 2.0), (2.0, None)], line_style(0), ["a", "b"])
    assert (drawn["name"], drawn["x"], drawn["y"], drawn["mode"]) == (
        "&lt;b&gt;mine&lt;/b&gt;",
        [1.0, 2.0],
        [2.0, None],
        "lines",
    )
    assert drawn["hovertext"] == ["a", "b"]
    assert line_series("x", [], line_style(0))["hoverinfo"] == "skip"


def test_neighbouring_curves_differ_in_colour_and_dash():
    looks = [(line_style(n)["color"], line_style(n)["dash"]) for n in range(len(DASHES) * len(SERIES_COLOURS))]
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(looks[:21]))
    assert len(set(looks[:21])) == 21


def test_trade_offs_say_both_shares_of_each_point_and_no_markup():
    (drawn,) = roc_figure({NAME: [(0.0, 0.25), (0.1, 1.0)]}, 0.005, 0.1, "false alarms", "detected")["data"]
    assert drawn["name"] == "&lt;b&gt;mine&lt;/b&gt;"
    assert drawn["x"] == [0.005, 0.1]
    assert drawn["hovertext"][0] == "&lt;b&gt;mine&lt;/b&gt;<br>25 % detected at 0 % false alarms"
