"""Estimates as reports show them: what their limits are, as cells of a table, as dots with limits in a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unsilent.interval import PART_OF_LIST
from unsilent.report import text
from unsilent.report.model import TextCell
from unsilent.report.theme import SOFT, Figure, figure, labels, percent_ticks, upper_limit_marker

NO_ESTIMATE_KEY = -9.0
"""What a cell without an estimate is sorted by: below every share and every difference."""
FEW_TRIALS = 20
"""With fewer trials an estimate says too little to be listed among the highest ones: such rows come last."""


class EstimateWithLimits(Protocol):
    """What has an estimate and limits; None: nothing was tried."""

    @property
    def estimate(self) -> float | None: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Estimate(EstimateWithLimits, Protocol):
    """And says how they were made."""

    @property
    def method(self) -> str: ...


def is_exact(row: EstimateWithLimits) -> bool:
    """Whether every fault there is was tried, so that nothing is estimated."""
    return row.estimate is not None and row.low == row.high


def has_few_trials(row: EstimateWithLimits, trials: int) -> bool:
    """Whether the estimate is from fewer than `FEW_TRIALS` trials and not exact."""
    return trials < FEW_TRIALS and not is_exact(row)


def has_list_bounds(row: Estimate) -> bool:
    """Whether the limits are what the rest of a list could make of the row, not an interval."""
    return not is_exact(row) and row.method.endswith(PART_OF_LIST)


def has_any_interval(rows: Iterable[Estimate]) -> bool:
    """Whether any row has an interval."""
    return not all(is_exact(row) or has_list_bounds(row) for row in rows)


def limits_text(rows: Iterable[Estimate], confidence: float) -> str:
    """What the limits of these rows are: intervals, bounds, or none because rows are exact."""
    rows = list(rows)
    exact, bounded = sum(map(is_exact, rows)), sum(map(has_list_bounds, rows))
    parts = [f"{100 * confidence:g} % intervals"] if has_any_interval(rows) or not rows else []
    parts += ["for partly run fault lists, bounds that allow any outcome of the remaining faults"] if bounded else []
    if exact:
        every = exact == len(rows)
        parts.append(
            "all rows are exact, because every fault was tried"
            if every
            else "rows are exact where every fault was tried"
        )
    return "; ".join(parts)


def estimate_cells(shown: text.EstimateText, row: EstimateWithLimits) -> tuple[TextCell, TextCell]:
    """Estimate and limits as two cells; no limits where nothing was tried."""
    limits = "–" if shown.estimate == text.NO_TRIAL else shown.limits
    return TextCell(shown.estimate, NO_ESTIMATE_KEY if row.estimate is None else row.estimate), TextCell(
        limits, row.high
    )


def share_cells(row: EstimateWithLimits) -> tuple[TextCell, TextCell]:
    """`cells` of a share, in percent."""
    return estimate_cells(text.estimate_text(row.estimate, row.low, row.high), row)


@dataclass(frozen=True, slots=True)
class Dots:
    """One series of estimates with limits.

    Attributes:
        name: In the legend, where there is one.
        colour, symbol: Of all dots, or of each.
        rows: Place, estimate, and what is shown when it is pointed at.
    """

    name: str
    colour: str | Sequence[str]
    symbol: str | Sequence[str]
    rows: Sequence[tuple[float, EstimateWithLimits, str]]


def shares_figure(series: Sequence[Dots], names: Sequence[str], title: str, bottom: float | None = None) -> Figure:
    """Dots with limits on a logarithmic axis, first row on top; a hollow triangle at the upper limit of none."""
    bottom = axis_bottom([row for dots in series for _, row, _ in dots.rows]) if bottom is None else bottom
    traces = [trace for dots in series for trace in dot_traces(dots, bottom)]
    legend = any(dots.name for dots in series)
    margin = {"l": 74, "r": 28, "t": 34 if legend else 10, "b": 52}
    height = 76 + 26 * len(names) + 24 * legend
    return figure(traces, height, xaxis=share_axis(bottom, title), yaxis=rows_axis(names), margin=margin)


def share_axis(bottom: float, title: str) -> Figure:
    """A logarithmic axis of shares."""
    return {"type": "log", "range": [math.log10(bottom), 0.08], "title": {"text": title}, **percent_ticks(bottom)}


def rows_axis(names: Sequence[str]) -> Figure:
    """An axis of names, the first on top."""
    ends = [len(names) - 0.4, -0.6]
    return {"tickvals": list(range(len(names))), "ticktext": labels(names), "range": ends, "automargin": True}


def axis_bottom(values: Iterable[EstimateWithLimits]) -> float:
    """Where a logarithmic axis of shares starts: a power of ten below every estimate and upper limit."""
    known = [value.estimate or value.high for value in values if value.estimate is not None and value.high > 0]
    return min(10.0 ** math.floor(math.log10(max(min(known, default=0.1), 1e-9)) - 0.05), 0.1)


def dot_traces(dots: Dots, bottom: float | None = None, along: str = "x") -> list[Figure]:
    """Estimates with bars at their limits along one axis.

    Above ``bottom`` of a logarithmic one, where those of none are hollow triangles at their upper limits.
    """
    known = [i for i, (_, row, _) in enumerate(dots.rows) if row.estimate is not None]
    some = [i for i in known if bottom is None or dots.rows[i][1].estimate]
    none = [i for i in known if i not in some and dots.rows[i][1].high > 0]
    colour = _kept(dots.colour, some)
    least = -math.inf if bottom is None else bottom / 10
    values = [dots.rows[i][1] for i in some]
    bars: Figure = {"type": "data", "symmetric": False, "thickness": 1.3, "width": 3}
    bars["color"] = colour if isinstance(colour, str) else SOFT
    bars["array"] = [v.high - (v.estimate or 0) for v in values]
    bars["arrayminus"] = [(v.estimate or 0) - max(v.low, least) for v in values]

    def trace(kept: Sequence[int], at: Sequence[float | None], marker: Figure, **more: object) -> Figure:
        places, hover = [dots.rows[i][0] for i in kept], [dots.rows[i][2] for i in kept]
        result = {"type": "scatter", "mode": "markers", "hoverinfo": "text", "hovertext": hover, "showlegend": False}
        return {**result, along: list(at), "y" if along == "x" else "x": places, "marker": marker, **more}

    marker = {"color": colour, "symbol": _kept(dots.symbol, some), "size": 10}
    named = {"name": dots.name, "showlegend": bool(dots.name), f"error_{along}": bars}
    hollow = {"color": _kept(dots.colour, none), "symbol": upper_limit_marker(along == "y"), "size": 11}
    limits = trace(none, [dots.rows[i][1].high for i in none], {**hollow, "line": {"width": 1.6}})
    drawn = trace(some, [v.estimate for v in values], marker, **named)
    if not some:  # a legend names only what has a point
        drawn |= {"x": [None], "y": [None]}
    return [drawn, limits] if none else [drawn]


def _kept(values: str | Sequence[str], kept: Sequence[int]) -> str | list[str]:
    return values if isinstance(values, str) else [values[i] for i in kept]


def difference_cell(gap: EstimateWithLimits) -> TextCell:
    """A difference in percentage points with its sign and limits: ``+0.31 [-0.2, +0.9]``."""
    signs = text.signed(gap.estimate, gap.low, gap.high)
    return TextCell(f"{signs.estimate}{signs.limits_in_sentence}", gap.estimate)
