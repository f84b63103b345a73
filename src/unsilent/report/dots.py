"""Figures of estimates as dots with error bars.

An estimate of 0 is a triangle at its upper limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unsilent.report.text import EstimateWithLimits, rate_text, share_with_limits_text
from unsilent.report.theme import SOFT, Figure, figure, label, labels, percent_ticks

MOST_TICKS = 8


class CountedShare(EstimateWithLimits, Protocol):
    """The interface of a share with limits and its number of trials n."""

    @property
    def n(self) -> int: ...


def hover_text(share: CountedShare, *names: str) -> str:
    """The hover text for a share in a figure: its names, its value with limits, and n."""
    trials = f"<br>n = {share.n:,}" if share.n else ""
    return f"<b>{', '.join(label(name, 60) for name in names)}</b><br>{share_with_limits_text(share)}{trials}"


def rate_hover_text(rate: CountedShare, *names: str) -> str:
    """The hover text for a rate in a figure, like `hover_text`."""
    trials = f"<br>n = {rate.n:,}" if rate.n else ""
    return f"<b>{', '.join(label(name, 60) for name in names)}</b><br>{rate_text(rate).in_sentence}{trials}"


@dataclass(frozen=True, slots=True)
class Dots:
    """A series of estimates with limits.

    Attributes:
        name: Name in the legend, if there is a legend.
        colour: Colour of all dots, or a list with a colour for each dot.
        symbol: Symbol of all dots, or a list with a symbol for each dot.
        rows: Place, estimate and hover text of each dot.
    """

    name: str
    colour: str | Sequence[str]
    symbol: str | Sequence[str]
    rows: Sequence[tuple[float, EstimateWithLimits, str]]


def shares_figure(series: Sequence[Dots], names: Sequence[str], title: str, bottom: float | None = None) -> Figure:
    """A figure of shares with limits on a logarithmic axis, with the first row on top."""
    bottom = axis_bottom([row for dots in series for _, row, _ in dots.rows]) if bottom is None else bottom
    return _rows_figure(series, names, share_axis(bottom, title), bottom)


def rates_figure(series: Sequence[Dots], names: Sequence[str], title: str) -> Figure:
    """A figure of rates with limits on a logarithmic axis.

    At least one rate must be more than 0.
    """
    values = [row for dots in series for _, row, _ in dots.rows if row.estimate is not None and row.high > 0]
    first = math.floor(math.log10(min(value.estimate or value.high for value in values)) - 0.05)
    last = math.ceil(math.log10(max(value.high for value in values)) + 0.05)
    powers = range(first, last + 1, math.ceil((last - first) / MOST_TICKS))
    ticks = {"tickvals": [10.0**power for power in powers], "ticktext": [f"{10.0**power:g}" for power in powers]}
    axis = {"type": "log", "range": [first, last], "title": {"text": title}, **ticks}
    return _rows_figure(series, names, axis, 10.0**first)


def _rows_figure(series: Sequence[Dots], names: Sequence[str], axis: Figure, bottom: float) -> Figure:
    traces = [trace for dots in series for trace in dot_traces(dots, bottom)]
    legend = any(dots.name for dots in series)
    margin = {"l": 74, "r": 28, "t": 34 if legend else 10, "b": 52}
    height = 76 + 26 * len(names) + 24 * legend
    return figure(traces, height, xaxis=axis, yaxis=rows_axis(names), margin=margin)


def share_axis(bottom: float, title: str) -> Figure:
    """A logarithmic axis of shares."""
    return {"type": "log", "range": [math.log10(bottom), 0.08], "title": {"text": title}, **percent_ticks(bottom)}


def rows_axis(names: Sequence[str]) -> Figure:
    """An axis of row names, with the first one on top."""
    ends = [len(names) - 0.4, -0.6]
    return {"tickvals": list(range(len(names))), "ticktext": labels(names), "range": ends, "automargin": True}


def axis_bottom(values: Iterable[EstimateWithLimits]) -> float:
    """The lower end of a logarithmic axis of shares: a power of ten below all estimates and upper limits."""
    known = [value.estimate or value.high for value in values if value.estimate is not None and value.high > 0]
    return min(10.0 ** math.floor(math.log10(max(min(known, default=0.1), 1e-9)) - 0.05), 0.1)


def dot_traces(dots: Dots, bottom: float | None = None, along: str = "x") -> list[Figure]:
    """The plotly traces of dots with error bars along one axis.

    ``bottom``: the lower end of a logarithmic axis, on which estimates of 0 are hollow triangles at their upper limits.
    """
    known = [i for i, (_, row, _) in enumerate(dots.rows) if row.estimate is not None]
    some = [i for i in known if bottom is None or dots.rows[i][1].estimate]
    none = [i for i in known if i not in some and dots.rows[i][1].high > 0]
    colour = _values_at(dots.colour, some)
    least = -math.inf if bottom is None else bottom / 10
    values = [dots.rows[i][1] for i in some]
    bars: Figure = {"type": "data", "symmetric": False, "thickness": 1.3, "width": 3}
    bars["color"] = colour if isinstance(colour, str) else SOFT
    bars["array"] = [v.high - (v.estimate or 0) for v in values]
    bars["arrayminus"] = [(v.estimate or 0) - max(v.low, least) for v in values]

    def trace(indices: Sequence[int], at: Sequence[float | None], marker: Figure, **more: object) -> Figure:
        places, hover = [dots.rows[i][0] for i in indices], [dots.rows[i][2] for i in indices]
        result = {"type": "scatter", "mode": "markers", "hoverinfo": "text", "hovertext": hover, "showlegend": False}
        return {**result, along: list(at), "y" if along == "x" else "x": places, "marker": marker, **more}

    marker = {"color": colour, "symbol": _values_at(dots.symbol, some), "size": 10}
    named = {"name": dots.name, "showlegend": bool(dots.name), f"error_{along}": bars}
    upper_limit = "triangle-down-open" if along == "y" else "triangle-left-open"
    hollow = {"color": _values_at(dots.colour, none), "symbol": upper_limit, "size": 11}
    limits = trace(none, [dots.rows[i][1].high for i in none], {**hollow, "line": {"width": 1.6}})
    drawn = trace(some, [v.estimate for v in values], marker, **named)
    if not some:  # the legend names only series with a point
        drawn |= {"x": [None], "y": [None]}
    return [drawn, limits] if none else [drawn]


def _values_at(values: str | Sequence[str], indices: Sequence[int]) -> str | list[str]:
    return values if isinstance(values, str) else [values[i] for i in indices]
