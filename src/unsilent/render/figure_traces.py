"""Drawing of plotly series with matplotlib: dots with limits, curves, heat maps, bars and images."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unsilent.report.theme import Figure

POINTS = 8 / 13
"""Number of points for each pixel: text has 13 pixels on a page and 8 points in a paper."""
MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "X", "pentagon": "p", "star": "*", "triangle-up": "^",
    "triangle-down": "v", "triangle-left": "<", "line-ns": "|", "line-ew": "_",
}  # fmt: skip
DEFAULTS: dict[str, Any] = {"symbol": "circle", "color": "#000000", "size": 6}
DASHES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
STEPS = {"linear": "default", "hv": "steps-post"}
"""How points are joined: by straight lines, or horizontally up to the next point and then vertically."""
_RGBA = re.compile(r"rgba\((\d+),(\d+),(\d+),([\d.]+)\)")


def draw_trace(axes: Any, trace: Figure, ends: dict[float, float]) -> Any:
    """Draw one series and return its artist for the legend.

    Args:
        axes: Matplotlib axes for the series.
        trace: Series in plotly's form.
        ends: Current end of the bar in each row, at which the next series of bars begins.
    """
    draw: dict[str, Callable[[Any, Figure, dict[float, float]], Any]]
    draw = {"scatter": _scatter, "bar": _bars, "heatmap": _cells, "image": _picture}
    return draw[trace["type"]](axes, trace, ends)


def colour(text: str) -> Any:
    """A plotly colour in the form that matplotlib reads."""
    match = _RGBA.fullmatch(text)
    return (*(int(match[n]) / 255 for n in (1, 2, 3)), float(match[4])) if match else text


def line_look(line: Figure) -> dict[str, Any]:
    """Colour, width and dashes of a line, as arguments of matplotlib."""
    look = {"linewidth": line.get("width", 2) * POINTS, "linestyle": DASHES[line.get("dash", "solid")]}
    return look | {"color": colour(line["color"])}


def _scatter(axes: Any, trace: Figure, ends: dict[float, float]) -> Any:
    from matplotlib.lines import Line2D

    x, y = (np.array([np.nan if v is None else v for v in trace[along]], float) for along in ("x", "y"))
    handle = Line2D([], [], linestyle="none")
    if "lines" in trace["mode"]:
        axes.plot(x, y, drawstyle=STEPS[trace["line"].get("shape", "linear")], **line_look(trace["line"]))
        handle = Line2D([], [], **line_look(trace["line"]))
    for along in ("x", "y"):
        bars = trace.get(f"error_{along}")
        if bars and len(bars["array"]):
            sides = {f"{along}err": [np.maximum(bars["arrayminus"], 0), np.maximum(bars["array"], 0)]}
            look = {"elinewidth": bars["thickness"] * POINTS, "capsize": bars["width"] * POINTS}
            axes.errorbar(x, y, **sides, fmt="none", ecolor=colour(bars["color"]), **look)
    marker = trace.get("marker", {})
    if "markers" in trace["mode"] and marker.get("opacity", 1):
        _markers(axes, x, y, marker)
        symbol, tone, size = (next(iter(_list_for_each_mark(marker, name, 1)), DEFAULTS[name]) for name in DEFAULTS)
        mark, face = _symbol(symbol, colour(tone))
        edge = {"markerfacecolor": face, "markeredgecolor": colour(tone)}
        handle.set(marker=mark, markersize=min(size, 12) * POINTS, **edge)
    return handle


def _list_for_each_mark(marker: Figure, name: str, count: int) -> list[Any]:
    """The symbol, colour or size of each mark, as a list."""
    value = marker.get(name, DEFAULTS[name])
    return [value] * count if isinstance(value, (str, int, float)) else list(value)


def _markers(axes: Any, x: Any, y: Any, marker: Figure) -> None:
    looks = list(zip(*(_list_for_each_mark(marker, name, len(x)) for name in DEFAULTS), strict=True))
    edge = marker.get("line", {})
    for symbol, tone, size in dict.fromkeys(looks):
        numbers = [number for number, look in enumerate(looks) if look == (symbol, tone, size)]
        shape, face = _symbol(symbol, colour(tone))
        look: dict[str, Any] = {"marker": shape, "s": (size * POINTS) ** 2, "alpha": marker.get("opacity"), "zorder": 3}
        look["linewidths"] = edge.get("width", 1 if face == "none" else 0) * POINTS
        if shape in "|_":  # these symbols are lines and have no face
            axes.scatter(x[numbers], y[numbers], color=colour(tone), **look | {"linewidths": POINTS})
        else:
            rim = colour(tone if face == "none" else edge.get("color", tone))
            axes.scatter(x[numbers], y[numbers], facecolors=face, edgecolors=rim, **look)


def _symbol(name: str, tone: Any) -> tuple[str, Any]:
    """The matplotlib marker for a plotly symbol, and the colour of its face."""
    return MARKERS[name.removesuffix("-open")], "none" if name.endswith("-open") else tone


def _bars(axes: Any, trace: Figure, ends: dict[float, float]) -> Any:
    from matplotlib.patches import Patch

    rows, lengths = trace["y"], trace["x"]
    begin = trace["base"] if "base" in trace else [ends.get(row, 0.0) for row in rows]
    tone, edge = colour(trace["marker"]["color"]), trace["marker"].get("line", {})
    look = {"color": tone, "height": trace.get("width", 0.75)}
    if edge:
        look |= {"edgecolor": colour(edge["color"]), "linewidth": np.array(edge["width"]) * POINTS}
    axes.barh(rows, lengths, left=begin, **look)
    ends.update({row: start + length for row, start, length in zip(rows, begin, lengths, strict=True)})
    return Patch(color=tone)


def _cells(axes: Any, trace: Figure, ends: dict[float, float]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    values = np.ma.masked_invalid([[np.nan if v is None else v for v in row] for row in trace["z"]])
    corners = [np.arange(size + 1) - 0.5 for size in values.shape]
    palette = LinearSegmentedColormap.from_list("heat", [tuple(stop) for stop in trace["colorscale"]])
    gaps = {"edgecolors": axes.get_facecolor(), "linewidth": 0.4} if trace.get("ygap") else {}
    return axes.pcolormesh(
        corners[1], corners[0], values, cmap=palette, vmin=trace.get("zmin"), vmax=trace.get("zmax"), **gaps
    )


def _picture(axes: Any, trace: Figure, ends: dict[float, float]) -> Any:
    return axes.imshow(np.array(trace["z"], np.uint8))


def thinned(values: Sequence[float], names: Sequence[str], room: float) -> tuple[list[float], list[str]]:
    """Ticks and their names, without every second or further one if the names need more than ``room`` points."""
    step = max(1, -int(-sum(len(name) + 2 for name in names) * 4.5 // room))
    return list(values[::-1][::step]), list(names[::-1][::step])
