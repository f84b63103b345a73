"""Figures of the variation between runs, as plain plotly dicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unsilent.report.curves import line_series, line_style
from unsilent.report.dots import rows_axis
from unsilent.report.heat import heat_series
from unsilent.report.text import count_text
from unsilent.report.theme import (
    INK,
    SOFT,
    Figure,
    figure,
    label,
    labels,
    marker_series,
    series_colour,
    series_marker,
)
from unsilent.statistics.groups import GroupSpread
from unsilent.studies.noise.records import ChurnMatrix, LossSpread, NoiseResult, VariantNoise

GROUP_SIGNIFICANCE_LEVEL = 0.05
"""Corrected p value below which a group is reported to vary more than random groups of its size."""


def has_identical_replicas(result: VariantNoise) -> bool:
    """Whether all replicas ended with the same bits."""
    return result.distinct_final_states == 1


def is_significant_spread(group: GroupSpread) -> bool:
    """Whether a group varies more than random groups of the same size."""
    return group.corrected < GROUP_SIGNIFICANCE_LEVEL


def distribution_figure(variants: Sequence[VariantNoise], what: str) -> Figure:
    """The accuracy or loss of every replica, one row per variant."""
    traces = []
    for number, variant in enumerate(variants):
        values = [100 * v for v in variant.accuracies] if what == "accuracy" else list(variant.losses)
        hover = [f"{label(variant.name)}, replica {r}: {v:.4g}" for r, v in enumerate(values)]
        marker = {"color": series_colour(number), "symbol": series_marker(number), "size": 8, "opacity": 0.7}
        traces.append(marker_series("", values, _spread_out(number, len(values)), hover, marker))
    unit = "accuracy on held-out samples, %" if what == "accuracy" else "loss on held-out samples"
    rows = rows_axis([variant.name for variant in variants])
    return figure(traces, 110 + 60 * len(variants), xaxis={"title": {"text": unit}}, yaxis=rows)


def churn_figure(matrix: ChurnMatrix) -> Figure:
    """The churn between all pairs of replicas, in the order of the variants."""
    count = len(matrix.churn)
    owners = [(name, r) for name, n in matrix.variants for r in range(n)]
    starts = [sum(n for _, n in matrix.variants[:i]) for i in range(len(matrix.variants))]
    middles = [start + (n - 1) / 2 for start, (_, n) in zip(starts, matrix.variants, strict=True)]
    text = [
        [f"{label(a)} {i} and {label(b)} {j}: {100 * value:.3g} %" for (b, j), value in zip(owners, line, strict=True)]
        for (a, i), line in zip(owners, matrix.churn, strict=True)
    ]
    shares = [[100 * value for value in line] for line in matrix.churn]
    trace = heat_series(shares, text, {"title": {"text": "%"}}, zmin=0)
    lines = [
        {"type": "line", "x0": a, "x1": b, "y0": c, "y1": d, "line": {"color": INK, "width": 1}}
        for start in starts[1:]
        for a, b, c, d in ((start - 0.5, start - 0.5, -0.5, count - 0.5), (-0.5, count - 0.5, start - 0.5, start - 0.5))
    ]
    names = labels([name for name, _ in matrix.variants], 16)
    axis = {"tickvals": middles, "ticktext": names, "showgrid": False, "automargin": True}
    margin, reversed_axis = {"l": 90, "r": 20, "t": 24, "b": 40}, {**axis, "autorange": "reversed"}
    return figure([trace], 560, margin=margin, xaxis=axis, yaxis=reversed_axis, shapes=lines)


def loss_spread_figure(curves: Sequence[LossSpread], order: Sequence[str]) -> Figure:
    """The spread of the training loss against the step, on two logarithmic axes.

    Steps count from 0, which a logarithmic axis cannot show, so each step is drawn at its number plus 1.
    """
    traces = []
    for curve in curves:
        points = [(s + 1, v) for s, v in zip(curve.steps, curve.sd, strict=True) if v > 0 and math.isfinite(v)]
        hover = [f"{label(curve.variant)}, step {x - 1}: {y:.3g}" for x, y in points]
        traces.append(line_series(curve.variant, points, line_style(list(order).index(curve.variant)), hover))
    last = max((curve.steps[-1] for curve in curves), default=0)
    steps = [0, *(k * 10**power for power in range(len(str(last))) for k in (1, 2, 5) if k * 10**power <= last)]
    ticks = {"tickvals": [step + 1 for step in steps], "ticktext": [f"{step:,}" for step in steps]}
    return figure(
        traces,
        420,
        xaxis={"type": "log", "title": {"text": "step, counted from 0"}} | ticks,
        yaxis={"type": "log", "title": {"text": "sd of the training loss"}, "exponentformat": "power"},
    )


def groups_figure(variants: Sequence[VariantNoise]) -> Figure:
    """The standard deviation of each group's error, against that of a random group of the same size."""
    traces = []
    top = max((g.sd.high for v in variants for g in v.groups if not has_identical_replicas(v)), default=0.01)
    for number, variant in enumerate(variants):
        groups = variant.groups
        if not groups or has_identical_replicas(variant):
            continue
        symbol = series_marker(number)
        symbols = [symbol if is_significant_spread(group) else f"{symbol}-open" for group in groups]
        marker = {"color": series_colour(number), "symbol": symbols, "size": 9}
        bars: Figure = {"type": "data", "symmetric": False, "color": series_colour(number), "thickness": 1, "width": 0}
        bars["array"] = [100 * (g.sd.high - (g.sd.estimate or 0)) for g in groups]
        bars["arrayminus"] = [100 * ((g.sd.estimate or 0) - g.sd.low) for g in groups]
        x, y = [100 * g.sd_by_size for g in groups], [100 * (g.sd.estimate or 0) for g in groups]
        hover = [f"{label(variant.name)}, {label(g.name)}, {count_text(g.n, 'sample')}" for g in groups]
        traces.append(marker_series(label(variant.name), x, y, hover, marker, error_y=bars))
    widest = max((g.sd_by_size for v in variants for g in v.groups), default=0.01)
    end = 100 * 1.05 * min(widest, top)
    line = {"type": "line", "x0": 0, "y0": 0, "x1": end, "y1": end, "line": {"color": SOFT, "dash": "dot", "width": 1}}
    titles = "sd for a random group of the same size, points", "sd of the error of the group, percentage points"
    xaxis, yaxis = ({"title": {"text": title}, "rangemode": "tozero"} for title in titles)
    return figure(traces, 440, shapes=[line], xaxis=xaxis, yaxis=yaxis)


def plots_by_place(result: NoiseResult) -> dict[str, Figure]:
    """The figures that are not empty, by the id of their place in the page."""
    output = {"accuracy": distribution_figure(result.variants, "accuracy")} if result.variants else {}
    if result.variants and all(variant.loss is not None for variant in result.variants):
        output["loss"] = distribution_figure(result.variants, "loss")
    if len(result.churn_matrix.churn) > 1:
        output["churn"] = churn_figure(result.churn_matrix)
    if result.curves:
        output["parting"] = loss_spread_figure(result.curves, [variant.name for variant in result.variants])
    if any(variant.groups and not has_identical_replicas(variant) for variant in result.variants):
        output["groups"] = groups_figure(result.variants)
    return output


def _spread_out(row: int, count: int) -> list[float]:
    """Vertical positions for dots in one row, so that equal values do not hide each other."""
    return [row + 0.3 * ((7 * i % count) / max(count - 1, 1) - 0.5) for i in range(count)]
