"""Info objects -> plotly figures as plain dicts (data and layout): thin, and without importing plotly.

Every name passes through `look.label`; hover texts are ready-made strings, never templates with names in
them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from unsilent.render.info import Curves, Heat, Series, Split
from unsilent.report.look import (
    FIELD_NAMES,
    GREY,
    HEAT,
    INK,
    MARKERS,
    MODEL_COLOUR,
    OUTCOME_COLOURS,
    OUTCOME_NAMES,
    SERIES_COLOURS,
    SOFT,
    Figure,
    figure,
    floor_of,
    label,
    labels,
    percent,
    percent_ticks,
    triangle,
)
from unsilent.report.text import flips_text, shown
from unsilent.studies.pvf.records import LookupRow, PvfRow

Rows = Sequence[PvfRow] | Sequence[LookupRow]


def bottom_of(rows: Sequence[PvfRow] | Sequence[LookupRow]) -> float:
    """Where the logarithmic axis of PVF starts: below every estimate and upper limit, and the lower limits if near."""
    seen = [row.estimate or row.high for row in rows if row.estimate is not None and row.high > 0]
    low = min(seen, default=0.01)
    lowest = max(min((r.low for r in rows if r.low > 0), default=low), low / 20)
    return 10.0 ** math.floor(math.log10(min(lowest, low)))


def curves_figure(curves: Curves, measure: str = "PVF") -> Figure:
    """Estimates against flips on two logarithmic axes, or one dot per target where there is only one number of flips."""
    points = [row for series in curves.series for row in series.rows]
    bottom = bottom_of(points)
    draw = _line if curves.against_flips else _dot
    traces = [t for i, s in enumerate(curves.series) for t in draw(s, i, len(curves.series), bottom, measure)]
    if any(row.estimate == 0 for row in points):
        traces.append(_limit_legend(curves.against_flips))
    scale = {"type": "log", "range": [math.log10(bottom), 0.08], "title": {"text": measure}, **percent_ticks(bottom)}
    if curves.against_flips:
        known = [f for f in curves.flips if f is not None]
        ends = [math.log10(min(known)) - 0.12, math.log10(max(known)) + 0.12]
        flips = {"type": "log", "range": ends, "tickvals": known, "ticktext": [f"{f:,}" for f in known]}
        return figure(traces, 440, xaxis={**flips, "title": {"text": "flipped bits per fault"}}, yaxis=scale)
    names = labels([s.name for s in curves.series])
    rows = {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.4, -0.6]}
    height = 150 + 34 * len(names)
    return figure(traces, height, xaxis=scale, yaxis={**rows, "automargin": True})


def heat_floor(heats: Sequence[Heat]) -> float:
    """Where the colours of some maps begin: one scale for all of them, so that a colour means the same number."""
    return floor_of([v for heat in heats for row in heat.estimate for v in row if v])


def heat_figure(heat: Heat, floor: float, measure: str = "PVF") -> Figure:
    """Layer x bit: colour is the estimate on a logarithmic scale, cells without a trial stay grey, zero is the palest colour.

    ``floor`` is the estimate at the palest colour (see `heat_floor`).
    """
    colours = [[None if v is None else math.log10(max(v, floor)) for v in row] for row in heat.estimate]
    ticks = [10.0**k for k in range(math.ceil(math.log10(floor) - 1e-9), 1)]
    bar = {
        "tickvals": [math.log10(t) for t in ticks],
        "ticktext": [("≤ " if i == 0 else "") + percent(t) for i, t in enumerate(ticks)],
        "thickness": 12,
        "outlinewidth": 0,
        # Lying above the map: a map of one row has no room for it at its side, a phone none at all.
        "orientation": "h",
        "lenmode": "pixels",
        "len": 310,
        "tickangle": 0,
        "ticklabeloverflow": "allow",
        "xref": "container",
        "x": 0,
        "xanchor": "left",
        "xpad": 38,  # room for the half of the first tick's text that hangs over
        "yref": "container",
        "y": 1,
        "yanchor": "top",
        "ypad": 28,
    }
    trace = {
        "type": "heatmap",
        "x": list(range(len(heat.bits))),
        "y": list(range(len(heat.layers))),
        "z": colours,
        "zmin": math.log10(floor),
        "zmax": 0,
        "colorscale": HEAT,
        "colorbar": bar,
        "xgap": 1,
        "ygap": 1 if len(heat.layers) <= 80 else 0,
        "hoverongaps": False,
        "hoverinfo": "text",
        "text": _heat_hover(heat, measure),
    }
    step = max(1, math.ceil(len(heat.layers) / 80))
    names = labels(heat.layers, 26)
    told = [i for i, bit in enumerate(heat.bits) if len(heat.bits) <= 16 or bit % 4 == 0 or i == 0]
    return figure(
        [trace],
        min(1500, 192 + max(14, min(26, 1200 // max(len(heat.layers), 1))) * len(heat.layers)),
        margin={"l": 74, "r": 28, "t": 96, "b": 52},
        # The title of the bar: plotly cuts one that stands beside a lying bar, and lays one above it over the ticks.
        title={
            "text": label(measure),
            "font": {"size": 13, "color": SOFT},
            "xref": "container",
            "x": 0,
            "xanchor": "left",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 4},
        },
        plot_bgcolor=GREY,
        shapes=[_separator(first) for _, first, _ in heat.fields[1:]],
        annotations=[_field(*run, len(heat.bits)) for run in heat.fields],
        xaxis={
            "tickvals": told,
            "ticktext": [str(heat.bits[i]) for i in told],
            "range": [-0.5, len(heat.bits) - 0.5],
            "title": {"text": "bit position"},
            "showgrid": False,
        },
        yaxis={
            "tickvals": list(range(0, len(names), step)),
            "ticktext": names[::step],
            "range": [len(heat.layers) - 0.5, -0.5],
            "showgrid": False,
            "automargin": True,
        },
    )


def split_figure(splits: Sequence[Split], axis: str) -> Figure:
    """Stacked bars of shares, one bar per target and number of flips, first at the top."""
    kinds = [k for k in splits[0].counts if any(s.counts[k] for s in splits)] if splits else []
    rows = list(range(len(splits)))
    names = labels([s.target for s in splits], 22)
    quarters = [0, 0.25, 0.5, 0.75, 1]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": OUTCOME_NAMES.get(kind, label(kind)),
            "y": rows,
            "x": [s.counts[kind] / s.total for s in splits],
            "marker": {"color": OUTCOME_COLOURS.get(kind, "#7A5C3E")},
            "hoverinfo": "text",
            "hovertext": [_split_hover(s, kind) for s in splits],
        }
        for kind in kinds
    ]
    return figure(
        traces,
        120 + 24 * len(splits),
        barmode="stack",
        showlegend=True,
        bargap=0.25,
        xaxis={
            "range": [0, 1],
            "tickvals": quarters,
            "ticktext": [percent(q) for q in quarters],
            "title": {"text": axis},
        },
        yaxis={
            "tickvals": rows,
            "ticktext": [name + _count(s.flips) for name, s in zip(names, splits, strict=True)],
            "range": [len(splits) - 0.4, -0.6],
            "showgrid": False,
            "automargin": True,
        },
    )


def lookup_figure(lookups: Sequence[LookupRow]) -> Figure:
    """PVF of embedding rows by how often they are looked up, with intervals."""
    rows = [row for row in lookups if row.estimate is not None]
    bottom = bottom_of(rows)
    at = list(range(len(rows)))
    traces = [_points(rows, at, SERIES_COLOURS[0], "circle", "", bottom, "x", [label(r.heat) for r in rows])]
    if any(row.estimate == 0 for row in rows):
        traces.append(_limits(rows, at, SERIES_COLOURS[0], "x", [label(r.heat) for r in rows]))
        traces.append(_limit_legend(False))
    scale = {"type": "log", "range": [math.log10(bottom), 0.08], "title": {"text": "PVF"}, **percent_ticks(bottom)}
    names = {"tickvals": at, "ticktext": [label(r.heat) for r in rows], "range": [len(rows) - 0.4, -0.6]}
    return figure(traces, 150 + 40 * len(rows), xaxis=scale, yaxis={**names, "automargin": True})


def _line(series: Series, index: int, count: int, bottom: float, measure: str) -> list[Figure]:
    """A line through the estimates above zero, and markers at the upper limits of the others."""
    colour, symbol = _look(series, index)
    # Shifted a little along x, or the error bars of all series would lie on each other.
    rows = [row for row in series.rows if row.flips is not None]
    x = [float(row.flips or 1) * 1.035 ** (index - (count - 1) / 2) for row in rows]
    hover = [_hover(series.name, row, measure) for row in rows]
    trace = _points(rows, x, colour, symbol, label(series.name), bottom, "y", hover)
    trace |= {"mode": "lines+markers", "line": {"color": colour, "width": 2}, "legendgroup": str(index)}
    if series.level == "model":
        trace["line"]["dash"] = "dash"
    return [trace, {**_limits(rows, x, colour, "y", hover), "legendgroup": str(index)}]


def _dot(series: Series, index: int, count: int, bottom: float, measure: str) -> list[Figure]:
    colour, symbol = _look(series, index)
    hover = [_hover(series.name, row, measure) for row in series.rows]
    at = [index] * len(series.rows)
    trace = _points(series.rows, at, colour, symbol, label(series.name), bottom, "x", hover)
    return [{**trace, "showlegend": False}, _limits(series.rows, at, colour, "x", hover)]


def _look(series: Series, index: int) -> tuple[str, str]:
    if series.level == "model":
        return MODEL_COLOUR, "circle-open"
    return SERIES_COLOURS[index % len(SERIES_COLOURS)], MARKERS[index % len(MARKERS)]


def _points(
    rows: Rows,
    at: Sequence[float],
    colour: str,
    symbol: str,
    name: str,
    bottom: float,
    along: str,
    hover: Sequence[str],
) -> Figure:
    """Estimates above zero with error bars; ``along`` is the axis that carries PVF."""
    values = [row.estimate or None for row in rows]
    bars: Figure = {
        "type": "data",
        "symmetric": False,
        "array": [max(row.high - (row.estimate or 0), 0) if row.estimate else 0 for row in rows],
        "arrayminus": [row.estimate - max(row.low, bottom / 10) if row.estimate else 0 for row in rows],
        "color": colour,
        "thickness": 1.3,
        "width": 3,
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        along: values,
        "x" if along == "y" else "y": list(at),
        f"error_{along}": bars,
        "marker": {"color": colour, "symbol": symbol, "size": 8},
        "hoverinfo": "text",
        "hovertext": list(hover),
        "connectgaps": True,
        "showlegend": bool(name),
    }


def _limits(rows: Rows, at: Sequence[float], colour: str, along: str, hover: Sequence[str]) -> Figure:
    """A hollow triangle, pointing to zero, at the upper limit of each estimate of zero."""
    none = [i for i in range(len(rows)) if rows[i].estimate == 0]
    return {
        "type": "scatter",
        "mode": "markers",
        along: [rows[i].high for i in none],
        "x" if along == "y" else "y": [at[i] for i in none],
        "marker": {"color": colour, "symbol": triangle(along == "y"), "size": 11, "line": {"width": 1.6}},
        "hoverinfo": "text",
        "hovertext": [hover[i] for i in none],
        "showlegend": False,
    }


def _limit_legend(vertical: bool) -> Figure:
    marker = {"color": SOFT, "symbol": triangle(vertical), "size": 11, "line": {"width": 1.6}}
    name = "no event seen: upper limit"
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "marker": marker}


def _hover(name: str, row: PvfRow, measure: str) -> str:
    text = shown(row.estimate, row.low, row.high)
    limits = "" if row.estimate == 0 else f" {text.limits}"
    # The only markup in these strings is what stands here: names are escaped, numbers hold none but "<".
    value = html.escape(f"{text.estimate} %{limits}", quote=False)
    return f"<b>{label(name, 60)}</b> · {flips_text(row.flips)}<br>{measure} {value}<br>n = {row.n:,} faults"


def _split_hover(split: Split, kind: str) -> str:
    name = OUTCOME_NAMES.get(kind, label(kind))
    part = split.counts[kind]
    head = f"<b>{label(split.target, 60)}</b> · {flips_text(split.flips)}"
    return f"{head}<br>{name}: {100 * part / split.total:.3g} %"


def _heat_hover(heat: Heat, measure: str) -> list[list[str]]:
    names = [f"<b>{label(layer, 60)}</b>" for layer in heat.layers]
    columns = [name for name, first, last in heat.fields for _ in range(first, last + 1)]
    return [
        [
            f"{names[i]}<br>bit {bit} ({label(columns[j])})<br>"
            + ("no trial" if v is None else f"{measure} {100 * v:.3g} %")
            + f", n = {heat.n[i][j]:,}"
            for j, (bit, v) in enumerate(zip(heat.bits, heat.estimate[i], strict=True))
        ]
        for i in range(len(heat.layers))
    ]


def _separator(column: int) -> Figure:
    line = {"color": INK, "width": 1.5}
    x = column - 0.5
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _field(name: str, first: int, last: int, columns: int) -> Figure:
    place = {"x": (first + last) / 2, "xanchor": "center", "y": 1, "yref": "paper", "yanchor": "bottom"}
    if 8 * (last - first + 1) < columns and first == 0:
        # Too narrow for its name, which then leans over the names of the rows instead of over the next field.
        place |= {"x": last + 0.45, "xanchor": "right"}
    return {
        "text": label(FIELD_NAMES.get(name, name)),
        "showarrow": False,
        "font": {"size": 12, "color": SOFT},
        **place,
    }


def _count(flips: int | None) -> str:
    return "" if flips is None else f" · {flips:,}"
