"""Figures of faulty training runs, as plain plotly dicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.curves import line_series
from unsilent.report.dots import Dots, axis_bottom, dot_traces, hover_text, rows_axis, shares_figure
from unsilent.report.theme import (
    SERIES_COLOURS,
    Figure,
    figure,
    label,
    marker_series,
    quarter_ticks,
    series_colour,
    series_marker,
    vertical_line,
)
from unsilent.statistics.intervals import Interval
from unsilent.studies.training.records import ExampleCurve, GuardDetection, TrainingPvfRow, TrainingResult, TrialGroup
from unsilent.studies.training.sentences import most_vulnerable_first, ordered_groups, worst_first

LOOKS = {
    TrainingOutcome.MASKED_BITWISE: ("#7B8794", "circle-open"),
    TrainingOutcome.MASKED_BENIGN: ("#7B8794", "circle"),
    TrainingOutcome.IMMEDIATE_NAN: ("#0072B2", "triangle-up"),
    TrainingOutcome.SHORT_TERM_NAN: ("#56B4E9", "triangle-down"),
    TrainingOutcome.SHARP_DEGRADE: ("#D55E00", "square"),
    TrainingOutcome.SLOW_DEGRADE: ("#E69F00", "diamond"),
    TrainingOutcome.SHARP_SLOW_DEGRADE: ("#7A5C3E", "pentagon"),
    TrainingOutcome.LOW_TEST: ("#CC79A7", "star"),
    TrainingOutcome.IMPROVED: ("#009E73", "cross"),
    TrainingOutcome.CRASHED: ("#1F2933", "x"),
}
"""Colour and symbol of each class: grey for masked, blue for losses that are not finite, warm colours for latent harm."""
HARM, LATENT, DIFFERENT = SERIES_COLOURS[0], SERIES_COLOURS[1], SERIES_COLOURS[2]
ROWS = 24
"""Maximum number of rows in a figure of groups or targets; tables have all rows."""
IN_ORDER = ("phase", "what was corrupted", "part of the run")
"""Kinds of groups that keep their own order instead of the most harmful group first."""


def outcome_style(outcome: str) -> tuple[str, str]:
    """The colour and the marker symbol of a class."""
    return LOOKS[TrainingOutcome(outcome)]


def classes_figure(result: TrainingResult) -> Figure:
    """The share of each class with its limits."""
    classes = result.classes
    looks = [outcome_style(share.name) for share in classes]
    rows = [(float(i), share.share, hover_text(share.share, share.name)) for i, share in enumerate(classes)]
    dots = Dots("", [colour for colour, _ in looks], [symbol for _, symbol in looks], rows)
    return shares_figure([dots], [share.name for share in classes], "share of trials")


def group_figures(result: TrainingResult) -> dict[str, Figure]:
    """The shares of each group, by kind of grouping, all on the same axis range."""
    kinds = {kind: groups for kind, groups in ordered_groups(result).items() if len(groups) > 1}
    drawn = {kind: groups if kind in IN_ORDER else worst_first(groups)[:ROWS] for kind, groups in kinds.items()}
    bottom = axis_bottom([share for groups in drawn.values() for g in groups for _, share, *_ in _shares(g)])
    return {kind: _group_figure(groups, bottom) for kind, groups in drawn.items()}


def _group_figure(groups: Sequence[TrialGroup], bottom: float) -> Figure:
    series = []
    for number in range(3):
        rows = []
        for i, g in enumerate(groups):
            word, share, colour, symbol = _shares(g)[number]
            rows.append((i + 0.24 * (number - 1), share, hover_text(share, g.name, word)))
        series.append(Dots(word, colour, symbol, rows))
    return shares_figure(series, [group.name for group in groups], "share of trials", bottom)


def _shares(group: TrialGroup) -> Sequence[tuple[str, Interval, str, str]]:
    """The shares of a group, each with its name, colour and symbol."""
    return (
        ("different", group.different, DIFFERENT, "square"),
        ("harmful", group.harmful, HARM, "circle"),
        ("latent", group.latent, LATENT, "diamond"),
    )


def training_pvf_figure(parts: Sequence[TrainingPvfRow]) -> Figure:
    """The training PVF of the most vulnerable targets, with one series per kind of target."""
    names = list(dict.fromkeys(part.part or part.target for part in parts))
    if len(names) > ROWS:
        names = list(dict.fromkeys(part.part or part.target for part in most_vulnerable_first(parts)))[:ROWS]
    kinds = list(dict.fromkeys(part.memory_kind for part in parts))
    series = []
    for number, kind in enumerate(kinds):
        mine = [part for part in parts if part.memory_kind == kind and (part.part or part.target) in names]
        apart = 0.5 * ((number + 0.5) / len(kinds) - 0.5)
        rows = [(names.index(p.part or p.target) + apart, p.pvf, hover_text(p.pvf, p.target)) for p in mine]
        series.append(Dots(label(kind), series_colour(number), series_marker(number), rows))
    return shares_figure(series, names, "training PVF")


def guard_figure(sizes: Sequence[GuardDetection]) -> Figure:
    """The share of harmful faults that the guard caught, by the size of the fault."""
    with_trials = [size for size in sizes if size.n]
    rows = [(float(i), size.share, hover_text(size.share, size.name)) for i, size in enumerate(with_trials)]
    traces = dot_traces(Dots("", HARM, "circle", rows))
    axis = {"range": [-0.02, 1.02], **quarter_ticks(), "title": {"text": "caught within two steps"}}
    names = rows_axis([f"{size.name} ({size.n})" for size in with_trials])
    return figure(traces, 120 + 34 * len(with_trials), xaxis=axis, yaxis=names)


GOLDEN = "#B4BFCB"
"""Colour of the golden run."""
THIN = 400
"""Maximum number of points of a curve."""
_DASHES = ("solid", "dot", "dash")
_EXAMPLES = (SERIES_COLOURS[1], SERIES_COLOURS[0], SERIES_COLOURS[2])

LARGEST_EXPONENT = 308
"""Largest power of ten of a float64."""


def metric_figure(curves: Sequence[ExampleCurve], golden: ExampleCurve, steps: int) -> Figure:
    """The averaged training metric of the examples of one class, and of the golden run."""
    start = steps - len(golden.golden)
    traces = [_line("golden", *thinned(list(range(start, steps)), golden.golden), {"color": GOLDEN, "width": 5})]
    for number, curve in enumerate(curves):
        first = curve.step + len(curve.losses) - len(curve.metric)
        points = thinned(list(range(first, first + len(curve.metric))), curve.metric)
        traces.append(_line(curve.trial, *points, example_line_style(number)))
    every = [*golden.golden, *(y for curve in curves for y in curve.metric)]
    span = {"range": [-0.02, 1.04]} if all(0 <= y <= 1 for y in every) else {}
    yaxis = {"title": {"text": "training metric"}, **span}
    return figure(traces, 250, xaxis=_steps(curves, steps), yaxis=yaxis, **_bare(curves))


def loss_figure(curves: Sequence[ExampleCurve], steps: int, golden: Sequence[float] = ()) -> Figure | None:
    """The training loss of examples and of the golden run, on a logarithmic axis.

    The result is ``None`` if none of these losses is finite.
    """
    seen = [x for losses in (*(curve.losses for curve in curves), golden) for x in losses if x is not None and x > 0]
    if not seen:
        return None
    low, high = math.log10(min(seen)), math.log10(max(seen))
    room = 0.06 * max(high - low, 1.0)
    traces: list[Figure] = []
    if golden:
        traces.append(_line("golden", *peaks(0, golden), {"color": GOLDEN, "width": 3}))
    for number, curve in enumerate(curves):
        traces.append(_line(curve.trial, *peaks(curve.step, curve.losses), example_line_style(number, 1.2)))
        if None in curve.losses:
            step = curve.step + curve.losses.index(None)
            text = f"{label(curve.trial)}: loss not finite at step {step:,}"
            marker = {"symbol": "x", "size": 9, "color": example_line_style(number)["color"]}
            traces.append(marker_series("", [step], [10 ** min(high + 2 * room, LARGEST_EXPONENT)], [text], marker))
    ends = [low - room, high + 3 * room]
    yaxis = {"type": "log", "title": {"text": "training loss"}, "range": ends, **log_axis_ticks(*ends)}
    return figure(traces, 250, xaxis=_steps(curves, steps), yaxis=yaxis, **_bare(curves))


def log_axis_ticks(low: float, high: float) -> Figure:
    """Ticks of a logarithmic axis between two exponents, at most eight powers of ten."""
    every = max(1, math.ceil((high - low) / 8))
    digits = (1, 2, 5) if high - low < 1.6 else (1,)
    powers = range(math.floor(low / every) * every, math.ceil(high) + 1, every)
    ticks = {}
    for power in (power for power in powers if abs(power) < 308):
        for digit in digits:
            place = digit * 10.0**power
            ticks[place] = f"{place:g}" if digit > 1 else power_of_ten_text(power)
    return {"tickvals": list(ticks), "ticktext": list(ticks.values())}


def power_of_ten_text(exponent: int) -> str:
    """A power of ten as plotly text, like ``0.1``, ``100`` or ``10⁶``."""
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"10<sup>{exponent}</sup>"


def curve_figures(result: TrainingResult) -> dict[str, Figure]:
    """The figures of metric and loss for each class with examples, by the id of their place."""
    if not result.curves:
        return {}
    golden = max(result.curves, key=lambda curve: len(curve.golden))
    output = {}
    for name in dict.fromkeys(curve.outcome for curve in result.curves):
        mine = [curve for curve in result.curves if curve.outcome == name]
        output[f"metric-{name}"] = metric_figure(mine, golden, result.steps)
        losses = loss_figure(mine, result.steps, result.golden_losses)
        if losses is not None:
            output[f"loss-{name}"] = losses
    return output


def thinned(xs: Sequence[int], ys: Sequence[float]) -> tuple[list[int], list[float]]:
    """Evenly selected points, at most `THIN`, which always include the last.

    >>> thinned(range(3), [5.0, 6.0, 7.0])
    ([0, 1, 2], [5.0, 6.0, 7.0])
    """
    every = -(-len(xs) // THIN) or 1
    indices = sorted(set(range(len(xs) - 1, -1, -every)))
    return [xs[i] for i in indices], [ys[i] for i in indices]


def peaks(start: int, losses: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """The largest loss in each of at most `THIN` intervals of steps; None if one is not plottable.

    >>> peaks(7, [1.0, None, 2.0])
    ([7, 8, 9], [1.0, None, 2.0])
    """
    every = -(-len(losses) // THIN) or 1
    xs: list[int] = []
    ys: list[float | None] = []
    for first in range(0, len(losses), every):
        some = losses[first : first + every]
        known = [x for x in some if x is not None and x > 0]
        xs.append(start + first)
        ys.append(max(known) if len(known) == len(some) else None)
    return xs, ys


_MARGIN = {"l": 66, "r": 12, "t": 12, "b": 46}


def _line(name: str, xs: Sequence[int], ys: Sequence[float | None], line: Figure) -> Figure:
    mode = "lines" if len(xs) > 3 else "lines+markers"
    points = list(zip(xs, ys, strict=True))
    hover = [f"{label(name)}, step {x:,}: {_number(y)}" for x, y in points]
    return line_series(name, points, line, hover, mode=mode, marker={"size": 7, "color": line["color"]})


def example_line_style(number: int, width: float = 2) -> Figure:
    """The line style of an example, by its number."""
    return {"color": _EXAMPLES[number % len(_EXAMPLES)], "width": width, "dash": _DASHES[number % len(_DASHES)]}


def _steps(curves: Sequence[ExampleCurve], steps: int) -> Figure:
    """The axis of steps, from shortly before the first fault to the end of the run."""
    first = min(curve.step for curve in curves)
    room = max(0.05 * (steps - first), 1.0)
    return {"title": {"text": "step"}, "range": [max(first - room, -0.5), steps + 0.3 * room], "nticks": 7}


def _bare(curves: Sequence[ExampleCurve]) -> Figure:
    """The layout of a small figure without a legend."""
    return {"shapes": _corrupts(curves), "margin": _MARGIN, "showlegend": False}


def _corrupts(curves: Sequence[ExampleCurve]) -> list[Figure]:
    """Dotted lines at the steps of the faults, in the colours of the examples."""
    return [vertical_line(curve.step, _EXAMPLES[i % len(_EXAMPLES)], 1, dash="dot") for i, curve in enumerate(curves)]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
