"""A heat map of a share by layer and bit position: its record and its figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsilent.report.theme import GREY, HEAT, INK, SOFT, Figure, figure, label, labels, percent_label, vertical_line

FIELD_NAMES = {"value": "value bits"}
"""Headings of columns that differ from the names of their fields."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """PVF by layer and bit position, from trials that flipped one bit of one dtype.

    Values are None for a layer and bit without a trial.
    """

    dtype: str
    layers: tuple[str, ...]
    bits: tuple[int, ...]
    fields: Mapping[int, str]
    """Field of each bit position: ``sign``, ``exponent`` or ``mantissa``; for an integer ``sign`` or ``value``."""
    estimate: tuple[tuple[float | None, ...], ...]
    n: tuple[tuple[int, ...], ...]

    @property
    def total_trials(self) -> int:
        """The number of trials in all cells."""
        return sum(map(sum, self.n))


def heat_figures(maps: Sequence[HeatMap], measure: str) -> list[tuple[HeatMap, Figure]]:
    """A figure for each map that is not empty, all with the same colour scale."""
    nonempty_maps = [heat for heat in maps if heat.layers and heat.bits]
    floor = colour_scale_bottom([value for heat in nonempty_maps for row in heat.estimate for value in row if value])
    return [(heat, heat_figure(heat, floor, measure)) for heat in nonempty_maps]


def colour_scale_bottom(values: Sequence[float]) -> float:
    """The lower end of the colour scale: a power of ten, one to four decades below 1."""
    lowest = min(values, default=0.01)
    return min(max(10.0 ** math.floor(math.log10(lowest)), 1e-4), 0.1)


def heat_figure(heat: HeatMap, scale_bottom: float, measure: str) -> Figure:
    """A figure of layers and bit positions, with the sign bit on the left.

    Colour is the estimate on a logarithmic scale from ``scale_bottom``, cells without a trial stay grey, zero is the
    palest colour.
    """
    order = sorted(range(len(heat.bits)), key=lambda i: -heat.bits[i])
    bits = [heat.bits[i] for i in order]
    values = [[row[i] for i in order] for row in heat.estimate]
    counts = [[row[i] for i in order] for row in heat.n]
    fields = [heat.fields.get(bit, "") for bit in bits]
    starts = [i for i in range(len(bits)) if i == 0 or fields[i] != fields[i - 1]]
    ticks = [10.0**k for k in range(math.ceil(math.log10(scale_bottom) - 1e-9), 1)]
    # Title and scale are above the map: there is no room beside a map of one row, or on a phone.
    corner = {"xref": "container", "x": 0, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top"}
    # 38: room for the left half of the first tick's text.
    bar: Figure = {"orientation": "h", "lenmode": "pixels", "len": 310, "xpad": 38}
    bar |= {"tickangle": 0, "ticklabeloverflow": "allow", "ypad": 28, "tickvals": [math.log10(t) for t in ticks]}
    bar |= {"ticktext": [("≤ " if i == 0 else "") + percent_label(t) for i, t in enumerate(ticks)], **corner}
    colours = [[None if v is None else math.log10(max(v, scale_bottom)) for v in row] for row in values]
    hover = []
    for layer, row, row_counts in zip(heat.layers, values, counts, strict=True):
        shares = ["no trial" if value is None else f"{measure} {100 * value:.3g} %" for value in row]
        cells = zip(bits, fields, shares, row_counts, strict=True)
        name = f"<b>{label(layer, 60)}</b>"
        hover.append([f"{name}<br>bit {bit} ({label(field)})<br>{share}, n = {n:,}" for bit, field, share, n in cells])
    places = {"x": list(range(len(bits))), "y": list(range(len(values)))}
    gaps = {"xgap": 1, "ygap": 1 if len(values) <= 80 else 0, "hoverongaps": False}
    trace = heat_series(colours, hover, bar, zmin=math.log10(scale_bottom), zmax=0, **places, **gaps)
    step = max(1, math.ceil(len(values) / 80))
    named = [i for i, bit in enumerate(bits) if len(bits) <= 16 or bit % 4 == 0 or i == 0]
    xaxis = {"tickvals": named, "ticktext": [str(bits[i]) for i in named], "range": [-0.5, len(bits) - 0.5]}
    yaxis = {"tickvals": list(range(0, len(values), step)), "ticktext": labels(heat.layers, 26)[::step]}
    ends = zip(starts, [*starts[1:], len(bits)], strict=True)
    return figure(
        [trace],
        min(1500, 192 + max(14, min(26, 1200 // len(values))) * len(values)),
        margin={"l": 74, "r": 28, "t": 96, "b": 52},
        title={"text": label(measure), "font": {"size": 13, "color": SOFT}, **corner, "pad": {"t": 4}},
        plot_bgcolor=GREY,
        shapes=[vertical_line(start - 0.5, INK) for start in starts[1:]],
        annotations=[_field(fields[start], start, end - 1, len(bits)) for start, end in ends],
        xaxis={**xaxis, "title": {"text": "bit position"}, "showgrid": False},
        yaxis={**yaxis, "range": [len(values) - 0.5, -0.5], "showgrid": False, "automargin": True},
    )


def heat_series(
    colours: Sequence[Sequence[float | None]], hover: Sequence[Sequence[str]], bar: Figure, **more: object
) -> Figure:
    """The plotly trace of a heat map, in which None stays grey.

    ``hover``: the text shown at each cell. ``bar``: the look of the colour scale.
    """
    trace = {"type": "heatmap", "z": colours, "text": hover, "hoverinfo": "text", "colorscale": HEAT}
    return {**trace, "colorbar": {"thickness": 12, "outlinewidth": 0, **bar}, **more}


def _field(name: str, first: int, last: int, columns: int) -> Figure:
    place: Figure = {"x": (first + last) / 2, "xanchor": "center", "y": 1, "yref": "paper", "yanchor": "bottom"}
    if 8 * (last - first + 1) < columns and first == 0:
        # Too narrow for its name, which then extends over the names of the rows instead of over the next field.
        place |= {"x": last + 0.45, "xanchor": "right"}
    return {
        "text": label(FIELD_NAMES.get(name, name)),
        "showarrow": False,
        "font": {"size": 12, "color": SOFT},
        **place,
    }
