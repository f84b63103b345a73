"""Curves in a figure, distinguished by colour and dashes."""

from __future__ import annotations

from collections.abc import Sequence

from unsilent.report.theme import Figure, label, marker_series, series_colour

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def line_style(number: int) -> Figure:
    """The line style of series number ``number``."""
    return {"color": series_colour(number), "width": 2, "dash": DASHES[number % len(DASHES)]}


def line_series(
    name: str, points: Sequence[tuple[float, float | None]], line: Figure, hover: Sequence[str] = (), **more: object
) -> Figure:
    """A line through points, with a gap where a value is None.

    ``name``: the name in the legend. ``hover``: the text shown at each point.
    """
    x, y = [x for x, _ in points], [y for _, y in points]
    silent = {} if hover else {"hoverinfo": "skip"}
    return {**marker_series(label(name), x, y, hover, {}, mode="lines", line=line), **silent, **more}
