"""The figures of a trace: changed elements and relative changes of outputs, in execution order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from unsilent.basics.fault_trace import BEFORE_FIRST_ROW, FaultTrace, TracedFault, TraceRow
from unsilent.report.text import count_text
from unsilent.report.theme import (
    GREY,
    INK,
    SERIES_COLOURS,
    SOFT,
    Figure,
    figure,
    label,
    marker_series,
    percent_label,
    vertical_line,
)

PHASE_LOOKS = {
    "fwd": ("forward", SERIES_COLOURS[0], "circle"),
    "recomputed": ("recomputed", SERIES_COLOURS[5], "diamond"),
    "bwd": ("backward", SERIES_COLOURS[1], "square"),
    "outside": ("outside", SERIES_COLOURS[3], "cross"),
    "update": ("update", SERIES_COLOURS[2], "triangle-up"),
}
"""Name, colour and symbol of each phase."""
PHASE_NAMES = {phase: name for phase, (name, _, _) in PHASE_LOOKS.items()}
TICK = {"color": "#8a97a3", "symbol": "line-ns-open", "size": 7, "line": {"width": 1}}
BAD = "#B00020"
HEIGHT = 380
_LARGEST = 307.0
"""Largest exponent of ten that is drawn."""


@dataclass(frozen=True, slots=True)
class PhaseSegment:
    """Consecutive rows of one phase, from ``first`` to ``last``."""

    phase: str
    first: int
    last: int


def changed_share_figure(trace: FaultTrace) -> Figure:
    """The share of changed elements of each output, on a logarithmic scale."""
    shares = [row.share for row in trace.rows if row.change.changed]
    bottom = 10.0 ** math.floor(math.log10(min(shares, default=0.1)) - 1e-9)
    rail = bottom / 10**0.45
    series = _by_phase(trace, lambda row: row.share if row.change.changed else None)
    same = [i for i, row in enumerate(trace.rows) if not row.change.changed]
    if same:
        series.append(_points(trace, "unchanged", same, [rail] * len(same), TICK))
    powers = range(round(math.log10(bottom)), 1)
    drawn = [k for k in powers if (0 - k) % max(1, math.ceil(len(powers) / 7)) == 0]
    ticks = {"tickvals": [rail, *(10.0**k for k in drawn)], "ticktext": ["0", *(percent_label(10.0**k) for k in drawn)]}
    low = math.log10(bottom) - 0.8
    return _figure(trace, series, {"range": [low, 0.03 * -low], "title": {"text": "changed elements"}, **ticks})


def relative_figure(trace: FaultTrace) -> Figure | None:
    """The largest relative change of each output, on a logarithmic scale; None if no number changed."""
    changes = [row.change for row in trace.rows]
    values = [change.relative for change in changes if change.relative]
    bad = [i for i, change in enumerate(changes) if change.nonfinite]
    born = [i for i, change in enumerate(changes) if change.from_zero and change.relative is None]
    if not (values or bad or born):
        return None
    low = math.floor(math.log10(min(values, default=0.1)) - 1e-9)
    high = math.ceil(math.log10(max(values, default=1.0)) + 1e-9)
    series = _by_phase(trace, lambda row: row.change.relative or None)
    top = float(high)
    drawn = [k for k in range(low, high + 1) if k % max(1, math.ceil((high - low) / 6)) == 0 and k <= _LARGEST]
    ticks = {10.0**k: f"10<sup>{k}</sup>" if abs(k) > 2 else f"{10.0**k:g}" for k in drawn}
    for numbers, name, short_name, symbol, colour in (
        (born, "only changes from 0", "from 0", "triangle-up-open", SOFT),
        (bad, "NaN or infinity", "NaN, ∞", "x", BAD),
    ):
        if numbers:
            top += (high - low) / 10
            rail = 10.0 ** min(top, _LARGEST)
            ticks[rail] = short_name
            marker = {"color": colour, "symbol": symbol, "size": 8}
            series.append(_points(trace, name, numbers, [rail] * len(numbers), marker))
    ends = [low - 0.06 * (high - low), top + (high - low) / 15]
    title = {"text": "largest relative change"}
    return _figure(trace, series, {"range": ends, "tickvals": [*ticks], "ticktext": [*ticks.values()], "title": title})


def phase_segments(rows: Iterable[TraceRow]) -> list[PhaseSegment]:
    """Divide the rows into segments of consecutive rows with the same phase."""
    runs = [[*group] for _, group in groupby(enumerate(rows), key=lambda pair: pair[1].phase)]
    return [PhaseSegment(run[0][1].phase, run[0][0], run[-1][0]) for run in runs]


def faults_by_row(trace: FaultTrace) -> dict[int, list[TracedFault]]:
    """The faults by the number of the row that they corrupt.

    A fault without a known row is placed at the first row that differs.
    """
    mapping: dict[int, list[TracedFault]] = {}
    first = next(trace.changed_rows, BEFORE_FIRST_ROW)
    for fault in trace.faults:
        mapping.setdefault(first if fault.row is None else fault.row, []).append(fault)
    return dict(sorted(mapping.items()))


def magnitude(value: float | None) -> str:
    """A number as text with two significant digits; ``–`` for None."""
    if value is None:
        return "–"
    return f"{value:.2g}" if value == 0 or 1e-3 <= value < 1e4 else f"{value:.1e}"


def share_text(row: TraceRow) -> str:
    """The share of changed elements in percent, never rounded to 0 or 100."""
    if row.change.changed in (0, row.elements):
        return f"{100 * row.share:.0f}"
    share = min(100 * row.share, 99.9)
    return f"{share:.3g}" if share > 99 else magnitude(share)


def _by_phase(trace: FaultTrace, value: Callable[[TraceRow], float | None]) -> list[Figure]:
    """One series of points for each phase of the run."""
    result = []
    for phase, (name, colour, symbol) in PHASE_LOOKS.items():
        numbers = [i for i, row in enumerate(trace.rows) if row.phase == phase]
        values = {i: at for i in numbers if (at := value(trace.rows[i])) is not None}
        marker = {"color": colour, "symbol": symbol, "size": 7, "opacity": 0.85}
        if numbers:
            result.append(_points(trace, name, [*values], [*values.values()], marker))
    return result


def _points(trace: FaultTrace, name: str, numbers: Sequence[int], values: Sequence[float], marker: Figure) -> Figure:
    hover = [_hover(i, trace.rows[i]) for i in numbers]
    return marker_series(name, numbers or (None,), values or (None,), hover, marker)


def _figure(trace: FaultTrace, series: list[Figure], scale: Figure) -> Figure:
    count = len(trace.rows)
    title = {"text": "outputs, in the order of computation"}
    return figure(
        series,
        HEIGHT,
        showlegend=True,
        hovermode="closest",
        margin={"l": 74, "r": 20, "t": 62, "b": 52},
        legend={"orientation": "h", "x": 0, "y": 1.07, "yanchor": "bottom", "traceorder": "normal"},
        shapes=[*_phases(trace), *(_below(_row_position(row), INK, "dot") for row in faults_by_row(trace))],
        annotations=_fault_name(trace),
        xaxis={"range": [-0.03 * count - 1, count * 1.02], "title": title, "showgrid": False},
        yaxis={"type": "log", **scale},
    )


def _phases(trace: FaultTrace) -> list[Figure]:
    """Tinted backgrounds for the phases, and lines between them."""
    result = phase_segments(trace.rows)
    tint = {"type": "rect", "opacity": 0.06, "line": {"width": 0}, "layer": "below", "y0": 0, "y1": 1, "yref": "paper"}
    tints = [
        {**tint, "fillcolor": PHASE_LOOKS.get(s.phase, ("", SOFT))[1], "x0": s.first - 0.5, "x1": s.last + 0.5}
        for s in result
    ]
    return [*tints, *(_below(s.first - 0.5, GREY, "solid") for s in result[1:])] if len(result) > 1 else []


def _fault_name(trace: FaultTrace) -> list[Figure]:
    """The label at the line of the first fault, on the side that has room."""
    count = len(trace.faults)
    text = {"text": " fault " if count == 1 else f" {count_text(count, 'fault')} ", "font": {"size": 12, "color": INK}}
    place = {"y": 1.0, "yref": "paper", "yanchor": "bottom", "showarrow": False}
    side = [(row, "right" if row > 0.75 * len(trace.rows) else "left") for row in faults_by_row(trace)]
    return [{**text, **place, "x": _row_position(row), "xanchor": anchor} for row, anchor in side[:1]]


def _row_position(row: int) -> float:
    return -0.5 if row == BEFORE_FIRST_ROW else float(row)


def _below(x: float, colour: str, dash: str) -> Figure:
    return {**vertical_line(x, colour, dash=dash), "layer": "below"}


def _hover(number: int, row: TraceRow) -> str:
    # These strings contain no other markup than that written here: names are escaped.
    step = f", micro-step {row.micro_step}" if row.micro_step else ""
    place = f"output {number}, {PHASE_NAMES.get(row.phase, '')}{step}, {label(row.dtype_and_shape)}"
    lines, change = [f"<b>{label(row.label, 70)}</b>", place], row.change
    if row.faulty_type:
        return "<br>".join([*lines, f"in the faulty run {label(row.faulty_type)}"])
    if not change.changed:
        return "<br>".join([*lines, "unchanged"])
    lines.append(f"{share_text(row)} % changed ({change.changed:,} of {row.elements:,})")
    if change.absolute is not None:
        lines.append(f"largest change: relative {magnitude(change.relative)}, absolute {magnitude(change.absolute)}")
    if change.from_zero:
        lines.append(f"{change.from_zero:,} changed from 0")
    if change.nonfinite:
        lines.append(f"{change.nonfinite:,} NaN or infinite")
    return "<br>".join(lines)
