"""The common style of figures: colours, markers, labels and axes of probability.

Plotly reads part of HTML in every text (`<b>`, `<a>`, entities), so each name passes through `label`, which
cleans, shortens and escapes it. Colours are Okabe and Ito's, safe for colour-blind readers, and have the
same meaning in all figures; shape or text repeats the information of the colour.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from unsilent.report.text import escape_unprintable, short, shorten_distinct

Figure = dict[str, Any]

SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C3E")
MODEL_COLOUR = "#1f2933"
OUTCOME_COLOURS = {
    "masked": "#E4E7EB",
    "benign": "#B4BFCB",
    "sdc": "#D55E00",
    "due": "#0072B2",
    "nonfinite": "#0072B2",
    "exception": "#56B4E9",
    "crash": "#084A75",
    "hang": "#A8CBE6",
}
OUTCOME_NAMES = {"sdc": "silent (SDC)", "due": "detectable (DUE)", "nonfinite": "non-finite"}
MARKERS = ("circle", "square", "diamond", "cross", "x", "pentagon", "star")
INK, SOFT, GRID, GREY = "#1f2933", "#5c6873", "#e8ebee", "#cfd5db"
MOST_COLOURED = 3 * len(SERIES_COLOURS)
"""Number of the first series that is grey, because its colour and shape would repeat those of another series."""
HEAT = [[0, "#FFF8EC"], [0.25, "#FDD49E"], [0.5, "#FC8D59"], [0.75, "#D7301F"], [1, "#5F0000"]]


def series_colour(number: int) -> str:
    """The colour of series number ``number``."""
    return SERIES_COLOURS[number % len(SERIES_COLOURS)] if number < MOST_COLOURED else GREY


def series_marker(number: int) -> str:
    """The marker shape of series number ``number``."""
    return MARKERS[number % len(MARKERS)]


def label(name: str, width: int = 30) -> str:
    """A name as plotly text, shortened and escaped."""
    return html.escape(short(escape_unprintable(name), width), quote=False)


def labels(names: Sequence[str], width: int = 30) -> list[str]:
    """The labels of several names on one axis, shortened so that they remain distinct."""
    distinct = shorten_distinct([escape_unprintable(name) for name in names], width)
    return [html.escape(name, quote=False) for name in distinct]


def quarter_ticks() -> Figure:
    """Axis ticks at quarters, for an axis of shares that begins at 0."""
    ticks = [0, 0.25, 0.5, 0.75, 1]
    return {"tickvals": ticks, "ticktext": [percent_label(t) for t in ticks]}


def percent_ticks(bottom: float) -> Figure:
    """Axis ticks at powers of ten from ``bottom`` to 100 %, for a logarithmic axis of shares."""
    ticks = [10.0**k for k in range(round(math.log10(bottom)), 1)]
    return {"tickvals": ticks, "ticktext": [percent_label(t) for t in ticks]}


def percent_label(value: float) -> str:
    """A share in percent as the label of a tick."""
    return f"{100 * value:g} %"


def vertical_line(x: float, colour: str, width: float = 1.5, **more: Any) -> Figure:
    """A vertical line over the whole height of a figure.

    ``more``: attributes of the line, such as ``dash``.
    """
    line = {"color": colour, "width": width, **more}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def marker_series(
    name: str, x: Sequence[Any], y: Sequence[Any], hover: Sequence[str], marker: Figure, **more: Any
) -> Figure:
    """A series of marks.

    ``name``: the name in the legend; empty: no entry. ``hover``: the text shown at each mark.
    """
    look = {"type": "scatter", "mode": "markers", "name": name, "showlegend": bool(name), "marker": marker}
    places = {"x": list(x), "y": list(y), "hoverinfo": "text", "hovertext": list(hover)}
    return {**look, **places, **more}


def figure(data: list[Figure], height: int, **layout: Any) -> Figure:
    """A figure with the common style, to which the given layout is added."""
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GREY, "ticks": "", "fixedrange": True}
    font = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK}
    for name in ("xaxis", "yaxis"):
        layout[name] = {**axis, **layout.get(name, {})}
        if "title" in layout[name]:
            layout[name]["title"] = {"font": {"size": 13, "color": SOFT}, **layout[name]["title"]}
    base: Figure = {
        "height": height,
        "font": font,
        "margin": {"l": 74, "r": 28, "t": 34, "b": 52},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": SOFT, "font": {"size": 12, "color": INK}},
    }
    return {"data": data, "layout": {**base, **layout}}
