"""Figures of struck trainings as plain plotly dicts: shares with limits, of classes, groups, targets, and under the guard."""

from __future__ import annotations

from collections.abc import Sequence

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.estimates import Dots, bottom_of, dot_traces, rows_axis, shares_figure
from unsilent.report.look import MARKERS, SERIES_COLOURS, Figure, figure, label, percent
from unsilent.report.text import shown
from unsilent.statistics.intervals import Interval
from unsilent.studies.training.cells import events, ordered_groups, worst_first
from unsilent.studies.training.records import Caught, Group, Part, TrainingResult

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
"""Colour and shape of each class: greys for what is masked, blues for a lost loss, warm colours for latent harm."""
HARM, LATENT, DIFFERENT = SERIES_COLOURS[0], SERIES_COLOURS[1], SERIES_COLOURS[2]
ROWS = 24
"""Rows of a figure of groups or targets; tables have all."""
IN_ORDER = ("phase", "what was struck", "part of the run")
"""Kinds of groups whose own order says more than the most harmful first."""


def look(outcome: str) -> tuple[str, str]:
    """Colour and shape of a class."""
    return LOOKS[TrainingOutcome(outcome)]


def classes_figure(result: TrainingResult) -> Figure:
    """The share of each class, with limits."""
    classes = result.classes
    looks = [look(one.name) for one in classes]
    rows = [(float(i), one.share, _hover(one.name, one.share)) for i, one in enumerate(classes)]
    dots = Dots("", [colour for colour, _ in looks], [symbol for _, symbol in looks], rows)
    return shares_figure([dots], [one.name for one in classes], "share of trials")


def group_figures(result: TrainingResult) -> dict[str, Figure]:
    """Different, harmful and latent share of each group of the kinds that have more than one, all on one axis."""
    kinds = {kind: groups for kind, groups in ordered_groups(result).items() if len(groups) > 1}
    drawn = {kind: groups if kind in IN_ORDER else worst_first(groups)[:ROWS] for kind, groups in kinds.items()}
    bottom = bottom_of([share for groups in drawn.values() for g in groups for _, share, *_ in _shares(g)])
    return {kind: _group_figure(groups, bottom) for kind, groups in drawn.items()}


def _group_figure(groups: Sequence[Group], bottom: float) -> Figure:
    series = []
    for number in range(3):
        rows = []
        for i, g in enumerate(groups):
            word, share, colour, symbol = _shares(g)[number]
            rows.append((i + 0.24 * (number - 1), share, f"{_hover(g.name, share)} {word}"))
        series.append(Dots("", colour, symbol, rows))
    return shares_figure(series, [group.name for group in groups], "share of trials", bottom)


def _shares(group: Group) -> Sequence[tuple[str, Interval, str, str]]:
    """The shares of a group: word, share, colour and symbol."""
    return (
        ("different", group.different, DIFFERENT, "square"),
        ("harmful", group.harmful, HARM, "circle"),
        ("latent", group.latent, LATENT, "diamond"),
    )


def parts_figure(parts: Sequence[Part]) -> Figure:
    """Training PVF of the most vulnerable parts, a series for parameters and one for each other kind of target."""
    most: dict[str, float] = {}
    for part in parts:
        most[part.part or part.target] = max(most.get(part.part or part.target, 0.0), part.pvf.estimate or 0.0)
    names = list(most) if len(most) <= ROWS else sorted(most, key=lambda name: -most[name])[:ROWS]
    kinds = list(dict.fromkeys(part.what for part in parts))
    series = []
    for number, kind in enumerate(kinds):
        mine = [part for part in parts if part.what == kind and (part.part or part.target) in names]
        apart = 0.5 * ((number + 0.5) / len(kinds) - 0.5)
        rows = [(names.index(p.part or p.target) + apart, p.pvf, _hover(p.target, p.pvf)) for p in mine]
        colour, symbol = SERIES_COLOURS[number % len(SERIES_COLOURS)], MARKERS[number % len(MARKERS)]
        series.append(Dots(label(kind), colour, symbol, rows))
    return shares_figure(series, names, "training PVF")


def guard_figure(sizes: Sequence[Caught]) -> Figure:
    """Share of harmful faults that were caught, by their size."""
    kept = [one for one in sizes if one.n]
    rows = [(float(i), one.share, _hover(one.name, one.share)) for i, one in enumerate(kept)]
    traces = dot_traces(Dots("", HARM, "circle", rows))
    quarters = [0, 0.25, 0.5, 0.75, 1]
    axis = {"range": [-0.02, 1.02], "tickvals": quarters, "ticktext": [percent(q) for q in quarters]}
    title = {"title": {"text": "caught within two steps"}}
    names = rows_axis([f"{one.name} ({one.n})" for one in kept])
    return figure(traces, 120 + 34 * len(kept), xaxis=axis | title, yaxis=names)


def _hover(name: str, share: Interval) -> str:
    if not share.n:
        return f"<b>{label(name, 60)}</b><br>no trial"
    text = shown(share.estimate, share.low, share.high)
    value = "none" if not share.estimate else f"{text.estimate} %"
    return f"<b>{label(name, 60)}</b><br>{value} {text.limits}, {events(share):,} of {share.n:,}"
