"""Figures of parameter vulnerability as plain plotly dicts: against flips, by layer and bit, how trials ended, embedding rows.

Nothing with trials is dropped silently (what is left out is counted or named); an estimate of zero stays a point, marked as an
upper limit; no data is None, never zero.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsilent.report.estimates import Dots, bottom_of, dot_traces, share_axis, shares_figure
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
)
from unsilent.report.text import flips_text, shown
from unsilent.studies.pvf.records import HeatMap, LookupRow, PvfResult, PvfRow
from unsilent.studies.pvf.report.rows import at_level, main_level, rank

SERIES = 8
"""Lines that one figure can tell apart."""
BARS = 40
"""Bars that one figure can hold."""


# -- against the number of flips ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Curves:
    """What is drawn: targets with their rows, the model last; how many targets are left out, and which no trial struck."""

    series: Mapping[str, Sequence[PvfRow]]
    left_out: int
    missing: tuple[str, ...]

    @property
    def flips(self) -> list[int]:
        """Numbers of flips, ascending."""
        return sorted({row.flips for rows in self.series.values() for row in rows if row.flips is not None})

    @property
    def drawn(self) -> int:
        """Targets beside the model."""
        return sum(rows[0].level != "model" for rows in self.series.values())


def curves(result: PvfResult) -> Curves:
    """Rows of the main level (the `SERIES` - 1 most vulnerable targets) and of the model."""
    level = main_level(result)
    named = _series(at_level(result.rows, level)) if level != "model" else {}
    missing = sorted({row.target for row in at_level(result.rows, level) if row.estimate is None})
    ranked = sorted(named, key=lambda name: max(map(rank, named[name])), reverse=True)[: SERIES - 1]
    kept = {name: rows for name, rows in named.items() if name in ranked} | _series(at_level(result.rows, "model"))
    return Curves(kept, len(named) - len(ranked), tuple(missing))


def _series(rows: Sequence[PvfRow]) -> dict[str, list[PvfRow]]:
    found: dict[str, list[PvfRow]] = {}
    for row in rows:
        if row.estimate is not None:
            found.setdefault(row.target, []).append(row)
    return found


def curves_figure(lines: Curves, measure: str) -> Figure:
    """Estimates against flips on two logarithmic axes, or one dot per target where there is only one number of flips."""
    every = list(enumerate(lines.series.items()))
    looks = [_look(i, rows[0]) for i, (_, rows) in every]
    hover = [[_hover(name, row, measure) for row in rows] for _, (name, rows) in every]
    flips = lines.flips
    if len(flips) < 2:
        dots = [
            Dots("", *looks[i], [(i, *pair) for pair in zip(rows, hover[i], strict=True)]) for i, (_, rows) in every
        ]
        return shares_figure(dots, list(lines.series), measure)
    bottom = bottom_of([row for rows in lines.series.values() for row in rows])
    traces = []
    for i, (name, rows) in every:
        # Shifted a little along x, or the error bars of all series would lie on each other.
        shift = 1.035 ** (i - (len(every) - 1) / 2)
        places = [
            (row.flips * shift, row, told) for row, told in zip(rows, hover[i], strict=True) if row.flips is not None
        ]
        mine = dot_traces(Dots(label(name), *looks[i], places), bottom, "y")
        line = {"color": looks[i][0], "width": 2, **({"dash": "dash"} if rows[0].level == "model" else {})}
        mine[0] |= {"mode": "lines+markers", "line": line}
        traces += [{**trace, "legendgroup": str(i)} for trace in mine]
    ends = [math.log10(flips[0]) - 0.12, math.log10(flips[-1]) + 0.12]
    axis = {"type": "log", "range": ends, "tickvals": flips, "ticktext": [f"{f:,}" for f in flips]}
    title = {"title": {"text": "flipped bits per fault"}}
    return figure(traces, 440, xaxis=axis | title, yaxis=share_axis(bottom, measure))


def _look(index: int, row: PvfRow) -> tuple[str, str]:
    if row.level == "model":
        return MODEL_COLOUR, "circle-open"
    return SERIES_COLOURS[index % len(SERIES_COLOURS)], MARKERS[index % len(MARKERS)]


def _hover(name: str, row: PvfRow | LookupRow, measure: str) -> str:
    text = shown(row.estimate, row.low, row.high)
    limits = "" if row.estimate == 0 else f" {text.limits}"
    # The only markup in these strings is what stands here: names are escaped, numbers hold none but "<".
    value = html.escape(f"{text.estimate} %{limits}", quote=False)
    flips = f" · {flips_text(row.flips)}" if isinstance(row, PvfRow) else ""
    return f"<b>{label(name, 60)}</b>{flips}<br>{measure} {value}<br>n = {row.n:,} faults"


def lookup_figure(lookups: Sequence[LookupRow], measure: str) -> Figure:
    """Embedding rows by how often they are looked up, with limits."""
    rows = [row for row in lookups if row.estimate is not None]
    places = [(float(i), row, _hover(row.heat, row, measure)) for i, row in enumerate(rows)]
    dots = Dots("", SERIES_COLOURS[0], "circle", places)
    return shares_figure([dots], [row.heat for row in rows], measure)


# -- by layer and bit --------------------------------------------------------------------------------------------------


def heat_figures(result: PvfResult) -> list[tuple[HeatMap, Figure]]:
    """The heat maps that have something to show; one scale for all of them, so that a colour means the same number."""
    maps = [heat for heat in result.heat_maps if heat.layers and heat.bits]
    floor = floor_of([value for heat in maps for row in heat.estimate for value in row if value])
    return [(heat, heat_figure(heat, floor, result.measure)) for heat in maps]


def heat_figure(heat: HeatMap, floor: float, measure: str) -> Figure:
    """Layer x bit, the sign bit on the left, as a number is written.

    Colour is the estimate on a logarithmic scale from ``floor``, cells without a trial stay grey, zero is the palest colour.
    """
    order = sorted(range(len(heat.bits)), key=lambda i: -heat.bits[i])
    bits = [heat.bits[i] for i in order]
    values = [[row[i] for i in order] for row in heat.estimate]
    counts = [[row[i] for i in order] for row in heat.n]
    fields = [heat.fields.get(bit, "") for bit in bits]
    starts = [i for i in range(len(bits)) if i == 0 or fields[i] != fields[i - 1]]
    ticks = [10.0**k for k in range(math.ceil(math.log10(floor) - 1e-9), 1)]
    # Title and scale lie above the map: a map of one row has no room for them at its side, a phone none at all.
    corner = {"xref": "container", "x": 0, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top"}
    # 38: room for the half of the first tick's text that hangs over.
    bar: Figure = {"thickness": 12, "outlinewidth": 0, "orientation": "h", "lenmode": "pixels", "len": 310, "xpad": 38}
    bar |= {"tickangle": 0, "ticklabeloverflow": "allow", "ypad": 28, "tickvals": [math.log10(t) for t in ticks]}
    bar |= {"ticktext": [("≤ " if i == 0 else "") + percent(t) for i, t in enumerate(ticks)], **corner}
    trace: Figure = {"type": "heatmap", "x": list(range(len(bits))), "y": list(range(len(values)))}
    trace |= {"zmin": math.log10(floor), "zmax": 0, "colorscale": HEAT, "colorbar": bar, "xgap": 1}
    trace |= {"ygap": 1 if len(values) <= 80 else 0, "hoverongaps": False, "hoverinfo": "text"}
    trace |= {
        "z": [[None if v is None else math.log10(max(v, floor)) for v in row] for row in values],
        "text": [
            [
                f"<b>{label(layer, 60)}</b><br>bit {bit} ({label(field)})<br>"
                + ("no trial" if v is None else f"{measure} {100 * v:.3g} %")
                + f", n = {n:,}"
                for bit, field, v, n in zip(bits, fields, row, own, strict=True)
            ]
            for layer, row, own in zip(heat.layers, values, counts, strict=True)
        ],
    }
    step = max(1, math.ceil(len(values) / 80))
    named = [i for i, bit in enumerate(bits) if len(bits) <= 16 or bit % 4 == 0 or i == 0]
    xaxis = {"tickvals": named, "ticktext": [str(bits[i]) for i in named], "range": [-0.5, len(bits) - 0.5]}
    yaxis = {"tickvals": list(range(0, len(values), step)), "ticktext": labels(heat.layers, 26)[::step]}
    return figure(
        [trace],
        min(1500, 192 + max(14, min(26, 1200 // len(values))) * len(values)),
        margin={"l": 74, "r": 28, "t": 96, "b": 52},
        title={"text": label(measure), "font": {"size": 13, "color": SOFT}, **corner, "pad": {"t": 4}},
        plot_bgcolor=GREY,
        shapes=[_separator(start - 0.5) for start in starts[1:]],
        annotations=[
            _field(fields[start], start, end - 1, len(bits))
            for start, end in zip(starts, [*starts[1:], len(bits)], strict=True)
        ],
        xaxis={**xaxis, "title": {"text": "bit position"}, "showgrid": False},
        yaxis={**yaxis, "range": [len(values) - 0.5, -0.5], "showgrid": False, "automargin": True},
    )


def _separator(x: float) -> Figure:
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": INK, "width": 1.5}}


def _field(name: str, first: int, last: int, columns: int) -> Figure:
    place: Figure = {"x": (first + last) / 2, "xanchor": "center", "y": 1, "yref": "paper", "yanchor": "bottom"}
    if 8 * (last - first + 1) < columns and first == 0:
        # Too narrow for its name, which then leans over the names of the rows instead of over the next field.
        place |= {"x": last + 0.45, "xanchor": "right"}
    return {
        "text": label(FIELD_NAMES.get(name, name)),
        "showarrow": False,
        "font": {"size": 12, "color": SOFT},
        **place,
    }


# -- how trials ended --------------------------------------------------------------------------------------------------

Split = tuple[PvfRow, dict[str, float]]
"""A row, and its units by how they ended: shares weighted by the law, or counts."""


def split_rows(result: PvfResult) -> tuple[list[PvfRow], int]:
    """The rows of the main level whose outcomes are drawn (at most `BARS`, the most vulnerable), and how many are not.

    The model is left out where its parts are shown: its counts pool strata that were not sampled in proportion.
    """
    rows = [row for row in at_level(result.rows, main_level(result)) if row.units > 0]
    least = sorted(map(rank, rows), reverse=True)[:BARS][-1:]
    kept = [row for row in rows if rank(row) >= least[0]][:BARS]
    return kept, len(rows) - len(kept)


def outcome_split(result: PvfResult) -> list[Split]:
    """Masked, benign, silent and detectable units of each row drawn."""
    found = []
    for row in split_rows(result)[0]:
        counts: Mapping[str, float] = row.mix or {"masked": row.masked, "benign": row.benign, "sdc": row.sdc}
        due = sum(row.mix[kind] for kind in row.due_kinds) if row.mix else row.due
        found.append((row, {kind: float(counts[kind]) for kind in ("masked", "benign", "sdc")} | {"due": float(due)}))
    return found


def due_split(result: PvfResult) -> list[Split]:
    """Incorrect units only: silent against each kind of detectable error; rows without one are left out."""
    rows = [row for row in split_rows(result)[0] if row.sdc + row.due > 0]
    kinds = ("sdc", *dict.fromkeys(kind for row in rows for kind in row.due_kinds))
    whole = [row.mix or {"sdc": row.sdc, **row.due_kinds} for row in rows]
    return [(row, {kind: float(of.get(kind, 0)) for kind in kinds}) for row, of in zip(rows, whole, strict=True)]


def split_figure(splits: Sequence[Split], axis: str) -> Figure:
    """Stacked bars of shares, one bar per target and number of flips, first at the top."""
    names = labels([row.target for row, _ in splits], 22)
    counts = ["" if row.flips is None else f" · {row.flips:,}" for row, _ in splits]
    ticks = [0, 0.25, 0.5, 0.75, 1]
    traces = [_bars(splits, kind) for kind in splits[0][1] if any(found[kind] for _, found in splits)]
    xaxis = {"range": [0, 1], "tickvals": ticks, "ticktext": [percent(t) for t in ticks], "title": {"text": axis}}
    yaxis = {"tickvals": list(range(len(splits))), "ticktext": [a + b for a, b in zip(names, counts, strict=True)]}
    yaxis |= {"range": [len(splits) - 0.4, -0.6], "showgrid": False, "automargin": True}
    more = {"barmode": "stack", "showlegend": True, "bargap": 0.25}
    return figure(traces, 120 + 24 * len(splits), xaxis=xaxis, yaxis=yaxis, **more)


def _bars(splits: Sequence[Split], kind: str) -> Figure:
    name = OUTCOME_NAMES.get(kind, label(kind))
    parts = [counts[kind] / sum(counts.values()) for _, counts in splits]
    heads = [f"<b>{label(row.target, 60)}</b> · {flips_text(row.flips)}" for row, _ in splits]
    hover = [f"{head}<br>{name}: {100 * x:.3g} %" for head, x in zip(heads, parts, strict=True)]
    look = {"marker": {"color": OUTCOME_COLOURS.get(kind, "#7A5C3E")}, "hoverinfo": "text", "hovertext": hover}
    return {"type": "bar", "orientation": "h", "name": name, "y": list(range(len(splits))), "x": parts, **look}
