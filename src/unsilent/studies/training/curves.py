"""Examples of struck trainings beside golden, as plain plotly dicts: the averaged training metric, and the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unsilent.report.look import SERIES_COLOURS, Figure, figure, label, upright
from unsilent.studies.training.records import Curve, TrainingResult

GOLDEN = "#B4BFCB"
"""Its colour."""
THIN = 400
"""Points of a curve."""
_DASHES = ("solid", "dot", "dash")
_EXAMPLES = (SERIES_COLOURS[1], SERIES_COLOURS[0], SERIES_COLOURS[2])

LARGEST_EXPONENT = 308
"""Of a float64 as a power of ten."""


def metric_figure(curves: Sequence[Curve], golden: Curve, steps: int) -> Figure:
    """The averaged training metric of the examples of one class, golden broad beneath them, a line at each fault's step."""
    start = steps - len(golden.golden)
    xs, ys = thinned(list(range(start, steps)), golden.golden)
    line = {"color": GOLDEN, "width": 5}
    traces: list[Figure] = [
        _line(xs, ys, "golden", line, [f"golden, step {x:,}: {y:.3g}" for x, y in zip(xs, ys, strict=True)])
    ]
    for number, curve in enumerate(curves):
        first = curve.step + len(curve.losses) - len(curve.metric)
        xs, ys = thinned(list(range(first, first + len(curve.metric))), curve.metric)
        hover = [f"{label(curve.trial)}, step {x:,}: {y:.3g}" for x, y in zip(xs, ys, strict=True)]
        traces.append(_line(xs, ys, label(curve.trial), stroke(number), hover))
    every = [*golden.golden, *(y for curve in curves for y in curve.metric)]
    span = {"range": [-0.02, 1.04]} if all(0 <= y <= 1 for y in every) else {}
    yaxis = {"title": {"text": "training metric"}, **span}
    return figure(traces, 250, xaxis=_steps(curves, steps), yaxis=yaxis, **_bare(curves))


def loss_figure(curves: Sequence[Curve], steps: int, golden: Sequence[float] = ()) -> Figure | None:
    """The training loss of the examples on a logarithmic axis, golden's beneath; a cross at the top where it is not finite.

    None where no loss is finite.
    """
    seen = [x for curve in curves for x in curve.losses if x is not None and x > 0]
    if not seen:
        return None
    seen += [x for x in golden if x > 0]
    low, high = math.log10(min(seen)), math.log10(max(seen))
    room = 0.06 * max(high - low, 1.0)
    traces: list[Figure] = []
    if golden:
        xs, ys = peaks(0, golden)
        hover = [f"golden, step {x:,}: {_number(y)}" for x, y in zip(xs, ys, strict=True)]
        traces.append(_line(xs, ys, "golden", {"color": GOLDEN, "width": 3}, hover))
    for number, curve in enumerate(curves):
        xs, ys = peaks(curve.step, curve.losses)
        hover = [f"{label(curve.trial)}, step {x:,}: {_number(y)}" for x, y in zip(xs, ys, strict=True)]
        traces.append(_line(xs, ys, label(curve.trial), stroke(number, 1.2), hover))
        if None in curve.losses:
            step = curve.step + curve.losses.index(None)
            text = f"{label(curve.trial)}: loss not finite at step {step:,}"
            cross = {"x": [step], "y": [10 ** min(high + 2 * room, LARGEST_EXPONENT)], "text": [text]}
            marker = {"symbol": "x", "size": 9, "color": stroke(number)["color"]}
            traces.append({"type": "scatter", "mode": "markers", "hoverinfo": "text", "marker": marker, **cross})
    ends = [low - room, high + 3 * room]
    yaxis = {"type": "log", "title": {"text": "training loss"}, "range": ends, **decades(*ends)}
    return figure(traces, 250, xaxis=_steps(curves, steps), yaxis=yaxis, **_bare(curves))


def decades(low: float, high: float) -> Figure:
    """Ticks of a logarithmic axis between two exponents: powers of ten, at most eight; 2 and 5 times them where it is short."""
    every = max(1, math.ceil((high - low) / 8))
    digits = (1, 2, 5) if high - low < 1.6 else (1,)
    powers = range(math.floor(low / every) * every, math.ceil(high) + 1, every)
    ticks = [
        (digit * 10.0**k, f"{digit * 10.0**k:g}" if digit > 1 else power(k))
        for k in powers
        if abs(k) < 308
        for digit in digits
    ]
    return {"tickvals": [tick for tick, _ in ticks], "ticktext": [text for _, text in ticks]}


def power(exponent: int) -> str:
    """``0.1``, ``1``, ``100``, ``10⁶`` as plotly text."""
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"10<sup>{exponent}</sup>"


def curve_figures(result: TrainingResult) -> dict[str, Figure]:
    """Metric and loss of each class that has examples, by the id of their places."""
    if not result.curves:
        return {}
    golden = max(result.curves, key=lambda curve: len(curve.golden))
    found = {}
    for name in dict.fromkeys(curve.outcome for curve in result.curves):
        mine = [curve for curve in result.curves if curve.outcome == name]
        found[f"metric-{name}"] = metric_figure(mine, golden, result.steps)
        losses = loss_figure(mine, result.steps, result.golden_losses)
        if losses is not None:
            found[f"loss-{name}"] = losses
    return found


def thinned(xs: Sequence[int], ys: Sequence[float]) -> tuple[list[int], list[float]]:
    """Every so many-th point, so that at most `THIN` are left; always the last.

    >>> thinned(range(3), [5.0, 6.0, 7.0])
    ([0, 1, 2], [5.0, 6.0, 7.0])
    """
    every = -(-len(xs) // THIN) or 1
    kept = sorted(set(range(len(xs) - 1, -1, -every)))
    return [xs[i] for i in kept], [ys[i] for i in kept]


def peaks(start: int, losses: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """The largest of so many steps each, so that at most `THIN` are left; None, a gap, where one is not finite or not above 0.

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


def _line(xs: Sequence[int], ys: Sequence[float | None], name: str, line: Figure, hover: Sequence[str]) -> Figure:
    mode = "lines" if len(xs) > 3 else "lines+markers"
    common = {"type": "scatter", "mode": mode, "hoverinfo": "text", "marker": {"size": 7, "color": line["color"]}}
    return {**common, "x": list(xs), "y": list(ys), "name": name, "line": line, "text": list(hover)}


def stroke(number: int, width: float = 2) -> Figure:
    """The line of the number-th example."""
    return {"color": _EXAMPLES[number % len(_EXAMPLES)], "width": width, "dash": _DASHES[number % len(_DASHES)]}


def _steps(curves: Sequence[Curve], steps: int) -> Figure:
    """From a little before the first fault to the end of the run."""
    first = min(curve.step for curve in curves)
    room = max(0.05 * (steps - first), 1.0)
    return {"title": {"text": "step"}, "range": [max(first - room, -0.5), steps + 0.3 * room], "nticks": 7}


def _bare(curves: Sequence[Curve]) -> Figure:
    """Without a legend, which would take half of so small a figure: the page tells which line is which."""
    return {"shapes": _strikes(curves), "margin": _MARGIN, "showlegend": False}


def _strikes(curves: Sequence[Curve]) -> list[Figure]:
    """A dotted line at each fault's step, in the colour of its example."""
    return [upright(curve.step, _EXAMPLES[i % len(_EXAMPLES)], 1, dash="dot") for i, curve in enumerate(curves)]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
