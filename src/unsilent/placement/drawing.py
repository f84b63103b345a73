"""Figure of the hierarchy of a machine: a box for each component, and a colour for each group of devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from unsilent.basics.lazy_numpy import np
from unsilent.placement.placements import Placement
from unsilent.placement.ranking import Reduction
from unsilent.placement.system import Level, System
from unsilent.report.theme import GREY, INK, SERIES_COLOURS, SOFT, Figure, figure, label

MOST_DEVICES = 64
"""Largest number of devices drawn; of a larger machine, the first components of each level are drawn."""
_ROW = 8
"""Largest number of components side by side."""
_GAP, _HEAD = 0.18, 0.42


@dataclass
class _Canvas:
    shapes: list[Figure] = field(default_factory=list)
    texts: list[Figure] = field(default_factory=list)


def bandwidth_text(bandwidth: float) -> str:
    """A bandwidth as text, such as ``12.5 GB/s``."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bandwidth >= size:
            return f"{bandwidth / size:.4g} {unit}"
    return f"{bandwidth:.4g} B/s"


def shown_counts(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Number of components drawn for each level, with at most `MOST_DEVICES` devices in all.

    Components of inner levels are kept first.
    """
    result: list[int] = []
    room = MOST_DEVICES
    for number, count in enumerate(reversed(counts)):
        outer = len(counts) - number - 1
        fits = max(1, room // 2 ** min(outer, 3))
        result.append(min(count, fits))
        room = max(1, room // result[-1])
    return tuple(reversed(result))


def hierarchy_figure(system: System, placement: Placement, reduction: Reduction) -> Figure:
    """Figure of a machine, with the groups of one reduction in colours."""
    groups = np.empty(system.devices, int)
    for number, members in enumerate(placement.reduction_groups(reduction.axes)):
        groups[members] = number
    places = np.empty((system.devices, len(placement.axes)), int)
    grid = placement.grid()
    places[grid.ravel()] = np.array(np.unravel_index(np.arange(system.devices), grid.shape)).T
    captions = ["".join(f"{name[:1]}{at}" for name, at in zip(placement.axes, place, strict=True)) for place in places]
    canvas, counts = _Canvas(), shown_counts(system.counts)
    width, height = _draw(canvas, system, counts, captions, groups.tolist(), (0.0, 0.0), 0, 0)
    axis = {"visible": False, "showgrid": False}
    return figure(
        [{"type": "scatter", "x": [0], "y": [0], "mode": "markers", "marker": {"opacity": 0}, "hoverinfo": "skip"}],
        int(min(1200, max(160, 36 * height + 40))),
        shapes=canvas.shapes, annotations=canvas.texts, showlegend=False, margin={"l": 8, "r": 8, "t": 8, "b": 8},
        xaxis={**axis, "range": [-0.2, max(width, 6) + 0.2]}, yaxis={**axis, "range": [height + 0.2, -0.2]},
    )  # fmt: skip


def _draw(
    canvas: _Canvas, system: System, counts: tuple[int, ...], captions: list[str], groups: list[int],
    corner: tuple[float, float], depth: int, first: int,
) -> tuple[float, float]:  # fmt: skip
    """Draw the components of a level from a corner on, and return their width and height."""
    level, inside = system.levels[depth], system.inside(depth)
    x, y = corner
    width = row_height = 0.0
    for number in range(counts[depth]):
        if number % _ROW == 0 and number:
            x, y, row_height = corner[0], y + row_height + _GAP, 0.0
        device = first + number * inside
        if depth == len(system.levels) - 1:
            colour = SERIES_COLOURS[groups[device] % len(SERIES_COLOURS)]
            w, h = 1.0, 0.8
            canvas.shapes.append(_box(x, y, w, h, GREY, colour, 0.35))
            canvas.texts.append(_text(x + w / 2, y + h / 2, captions[device], INK, "center"))
        else:
            w, h = _draw(canvas, system, counts, captions, groups, (x + _GAP, y + _HEAD), depth + 1, device)
            w, h = w + 2 * _GAP, h + _HEAD + _GAP
            canvas.shapes.append(_box(x, y, w, h, SOFT, "rgba(0,0,0,0)", 1))
            canvas.texts.append(_text(x + 0.1, y + _HEAD / 2, _caption(level, number, counts[depth]), SOFT, "left"))
        x, row_height = x + w + _GAP, max(row_height, h)
        width = max(width, x - _GAP - corner[0])
    return width, y + row_height - corner[1]


def _caption(level: Level, number: int, count: int) -> str:
    more = f" (of {level.count})" if count < level.count and number == count - 1 else ""
    return f"{label(level.name, 16)} {number}{more}, {bandwidth_text(level.bandwidth)}"


def _box(x: float, y: float, width: float, height: float, line: str, fill: str, opacity: float) -> Figure:
    return {
        "type": "rect", "x0": x, "x1": x + width, "y0": y, "y1": y + height, "line": {"color": line, "width": 1},
        "fillcolor": fill, "opacity": opacity, "layer": "below",
    }  # fmt: skip


def _text(x: float, y: float, text: str, colour: str, anchor: str) -> Figure:
    return {
        "x": x, "y": y, "text": label(text, 60), "showarrow": False, "xanchor": anchor, "yanchor": "middle",
        "font": {"size": 11, "color": colour},
    }  # fmt: skip
