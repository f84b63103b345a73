"""A figure of stacked bars that show shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unsilent.report.theme import OUTCOME_COLOURS, OUTCOME_NAMES, Figure, figure, label, labels, quarter_ticks


class Bar(NamedTuple):
    """One bar: its name, a detail in small text, and a count or share for each outcome.

    All bars have the same outcomes; not all values are 0.
    """

    name: str
    detail: str
    parts: Mapping[str, float]


def stacked_shares_figure(bars: Sequence[Bar], axis: str) -> Figure:
    """A figure with a bar for each row, divided by the share of each outcome."""
    names = labels([bar.name for bar in bars], 22)
    traces = [_part(bars, kind) for kind in bars[0].parts if any(bar.parts[kind] for bar in bars)]
    xaxis = {"range": [0, 1], **quarter_ticks(), "title": {"text": axis}}
    rows = [name + _detail(bar) for name, bar in zip(names, bars, strict=True)]
    yaxis = {"tickvals": list(range(len(bars))), "ticktext": rows, "range": [len(bars) - 0.4, -0.6]}
    yaxis |= {"showgrid": False, "automargin": True}
    more = {"barmode": "stack", "showlegend": True, "bargap": 0.25}
    return figure(traces, 120 + 24 * len(bars), xaxis=xaxis, yaxis=yaxis, **more)


def _part(bars: Sequence[Bar], kind: str) -> Figure:
    name = OUTCOME_NAMES.get(kind, label(kind))
    shares = [bar.parts[kind] / sum(bar.parts.values()) for bar in bars]
    heads = [f"<b>{label(bar.name, 60)}</b>{_detail(bar)}" for bar in bars]
    hover = [f"{head}<br>{name}: {100 * x:.3g} %" for head, x in zip(heads, shares, strict=True)]
    look = {"marker": {"color": OUTCOME_COLOURS.get(kind, "#7A5C3E")}, "hoverinfo": "text", "hovertext": hover}
    return {"type": "bar", "orientation": "h", "name": name, "y": list(range(len(bars))), "x": shares, **look}


def _detail(bar: Bar) -> str:
    return f" · {label(bar.detail)}" if bar.detail else ""
