"""The picture of a trace: outputs in execution order against the share that differs, and the largest relative change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from unsilent.render.trace_info import PHASE_NAMES, magnitude, marks, segments, share_text
from unsilent.report.look import GREY, INK, SERIES_COLOURS, SOFT, Figure, figure, label, percent
from unsilent.report.text import counted
from unsilent.traced import BEFORE, Trace, TraceRow

LOOKS = {
    "fwd": (SERIES_COLOURS[0], "circle"),
    "recomputed": (SERIES_COLOURS[5], "diamond"),
    "bwd": (SERIES_COLOURS[1], "square"),
    "outside": (SERIES_COLOURS[3], "cross"),
    "update": (SERIES_COLOURS[2], "triangle-up"),
}
BAD = "#B00020"
HEIGHT = 380


def share_figure(trace: Trace) -> Figure:
    """Share of changed elements on a logarithmic scale; what is unchanged is a tick on the line at the bottom."""
    shares = [row.share for row in trace.rows if row.change.changed]
    bottom = 10.0 ** math.floor(math.log10(min(shares, default=0.1)) - 1e-9)
    rail = bottom / 10**0.45
    traces = _by_phase(trace, lambda row: row.share if row.change.changed else None)
    same = [i for i, row in enumerate(trace.rows) if not row.change.changed]
    unchanged = {
        "type": "scatter",
        "mode": "markers",
        "name": "unchanged",
        "x": same,
        "y": [rail] * len(same),
        "marker": {"color": "#8a97a3", "symbol": "line-ns-open", "size": 7, "line": {"width": 1}},
        "hoverinfo": "text",
        "hovertext": [_hover(i, trace.rows[i]) for i in same],
    }
    powers = range(round(math.log10(bottom)), 1)
    told = [k for k in powers if (0 - k) % max(1, math.ceil(len(powers) / 7)) == 0]
    ticks = {"tickvals": [rail, *(10.0**k for k in told)], "ticktext": ["0", *(percent(10.0**k) for k in told)]}
    low = math.log10(bottom) - 0.8
    scale = {"type": "log", "range": [low, 0.03 * -low], "title": {"text": "changed elements"}, **ticks}
    return _figure(trace, [*traces, *([unchanged] if same else [])], scale)


def relative_figure(trace: Trace) -> Figure | None:
    """Largest relative change on a logarithmic scale; above it, what has no ratio. None where no number changed."""
    rows = trace.rows
    values = [row.change.relative for row in rows if row.change.relative]
    bad = [i for i, row in enumerate(rows) if row.change.nonfinite]
    born = [i for i, row in enumerate(rows) if row.change.from_zero and row.change.relative is None]
    if not (values or bad or born):
        return None
    low = math.floor(math.log10(min(values, default=0.1)) - 1e-9)
    high = math.ceil(math.log10(max(values, default=1.0)) + 1e-9)
    traces = _by_phase(trace, lambda row: row.change.relative or None)
    step = (high - low) / 10
    top, rails = float(high), []
    for numbers, name, short_name, symbol, colour in (
        (born, "from 0 alone", "from 0", "triangle-up-open", SOFT),
        (bad, "NaN or infinity", "NaN, ∞", "x", BAD),
    ):
        if numbers:
            top += step
            rails.append((top, short_name))
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": numbers,
                    "y": [10.0 ** min(top, 307.0)] * len(numbers),
                    "marker": {"color": colour, "symbol": symbol, "size": 8},
                    "hoverinfo": "text",
                    "hovertext": [_hover(i, rows[i]) for i in numbers],
                }
            )
    told = [k for k in range(low, high + 1) if k % max(1, math.ceil((high - low) / 6)) == 0]
    scale = {
        "type": "log",
        "range": [low - 0.06 * (high - low), top + step / 1.5],
        "tickvals": [*(10.0**k for k in told if k < 308), *(10.0 ** min(at, 307.0) for at, _ in rails)],
        "ticktext": [
            *(f"10<sup>{k}</sup>" if abs(k) > 2 else f"{10.0**k:g}" for k in told if k < 308),
            *(n for _, n in rails),
        ],
        "title": {"text": "largest relative change"},
    }
    return _figure(trace, traces, scale)


def _by_phase(trace: Trace, value: Callable[[TraceRow], float | None]) -> list[Figure]:
    """One series of points for each phase that the run has; one without points still explains its colour."""
    found = []
    for phase, (colour, symbol) in LOOKS.items():
        numbers = [i for i, row in enumerate(trace.rows) if row.phase == phase]
        shown = [i for i in numbers if value(trace.rows[i]) is not None]
        if numbers:
            found.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": PHASE_NAMES[phase],
                    "x": list[int | None](shown) or [None],
                    "y": [value(trace.rows[i]) for i in shown] or [None],
                    "marker": {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.85},
                    "hoverinfo": "text",
                    "hovertext": [_hover(i, trace.rows[i]) for i in shown],
                }
            )
    return found


def _figure(trace: Trace, traces: Sequence[Figure], scale: Figure) -> Figure:
    count = len(trace.rows)
    return figure(
        list(traces),
        HEIGHT,
        showlegend=True,
        hovermode="closest",
        margin={"l": 74, "r": 20, "t": 62, "b": 52},
        legend={"orientation": "h", "x": 0, "y": 1.07, "yanchor": "bottom", "traceorder": "normal"},
        shapes=[*_phases(trace), *_places(trace)],
        annotations=_place_names(trace),
        xaxis={
            "range": [-0.03 * count - 1, count * 1.02],
            "title": {"text": "outputs, in the order they are computed"},
            "showgrid": False,
        },
        yaxis=scale,
    )


def _phases(trace: Trace) -> list[Figure]:
    """A line where one phase follows another, and a tint of its colour behind each."""
    found = segments(trace.rows)
    line, tint = (
        {"color": GREY, "width": 1.5},
        {"type": "rect", "opacity": 0.06, "line": {"width": 0}, "layer": "below"},
    )
    tints = [
        {
            **tint,
            "fillcolor": LOOKS.get(one.phase, (SOFT, ""))[0],
            "x0": one.first - 0.5,
            "x1": one.last + 0.5,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
        }
        for one in found
    ]
    return [*tints, *(_upright(one.first - 0.5, line) for one in found[1:])] if len(found) > 1 else []


def _places(trace: Trace) -> list[Figure]:
    return [_upright(_at(row), {"color": INK, "width": 1.5, "dash": "dot"}) for row in marks(trace)]


def _place_names(trace: Trace) -> list[Figure]:
    """The word beside the line of a fault, on the side where there is room; of several the first alone has it."""
    found = list(marks(trace).items())[:1]
    names = {
        row: "fault" if len(f) == 1 and len(trace.faults) == 1 else counted(len(trace.faults), "fault")
        for row, f in found
    }
    right = 0.75 * len(trace.rows)
    return [
        _text(f" {n} ", _at(row), 1.0, INK, "right" if row > right else "left", "bottom") for row, n in names.items()
    ]


def _at(row: int) -> float:
    return -0.5 if row == BEFORE else float(row)


def _upright(x: float, line: Figure) -> Figure:
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line, "layer": "below"}


def _text(text: str, x: float, y: float, colour: str, anchor: str, yanchor: str = "bottom") -> Figure:
    place = {"x": x, "xanchor": anchor, "y": y, "yref": "paper", "yanchor": yanchor, "showarrow": False}
    return {"text": text, "font": {"size": 12, "color": colour}, **place}


def _hover(number: int, row: TraceRow) -> str:
    # The only markup in these strings is what stands here: names are escaped.
    step = f", micro-step {row.micro_step}" if row.micro_step else ""
    head = (
        f"<b>{label(row.label, 70)}</b><br>output {number}, {PHASE_NAMES.get(row.phase, '')}{step}, {label(row.kind)}"
    )
    change = row.change
    if row.other:
        return f"{head}<br>in the faulty run {label(row.other)}"
    if not change.changed:
        return f"{head}<br>unchanged"
    told = [f"{share_text(row)} % changed ({change.changed:,} of {row.elements:,})"]
    if change.absolute is not None:
        told.append(f"relative at most {magnitude(change.relative)}, absolute {magnitude(change.absolute)}")
    if change.from_zero:
        told.append(f"{change.from_zero:,} from 0")
    if change.nonfinite:
        told.append(f"{change.nonfinite:,} NaN or infinite")
    return "<br>".join([head, *told])
