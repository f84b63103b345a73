"""Parts that the reports on coverage of training and of inference share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from unsilent.report.curves import line_series, line_style
from unsilent.report.model import Cell, Column, Table, TableRow
from unsilent.report.text import p_value_text
from unsilent.report.theme import Figure, figure, label, percent_label, quarter_ticks

LEAST_WIDTH = 20
"""Minimum ratio of the end of the axis of false alarms to its start, which makes room for ten false alarms."""
MOST_TICKS = 8


def comparison_table(reference: str, names: Sequence[str], rows: Iterable[tuple[Cell, ...]]) -> Table:
    """The table of paired comparisons with a reference."""
    columns = (
        *map(Column.text, names), Column.points(f"{reference} minus {names[0]}"), Column.count(f"only {reference}", priority=1),
        Column.count(f"only {names[0]}", priority=1), Column("p", "number", digits=p_value_text),
    )  # fmt: skip
    return Table(columns, tuple(map(TableRow, rows)), "Paired comparisons", terminal_rows=0)


def roc_figure(
    curves: Mapping[str, Sequence[tuple[float, float]]], least: float, most: float, false_alarms: str, detected: str
) -> Figure:
    """ROC curves: detected faults against false alarms, one curve per detector.

    Args:
        least: Position of the mark for no false alarms, below the smallest share that can be measured.
        most: Requested share of false alarms, at which the axis ends unless it would be too short.
    """
    end = min(max(most, LEAST_WIDTH * least), 1.0)
    traces = []
    for number, (name, points) in enumerate(curves.items()):
        hover = [f"{label(name)}<br>{100 * y:.3g} % detected at {100 * x:.3g} % false alarms" for x, y in points]
        line = {**line_style(number), "shape": "hv"}
        traces.append(line_series(name, [(max(x, least), y) for x, y in points], line, hover))
    return figure(
        traces, 460,
        xaxis={"type": "log", "range": [math.log10(least), math.log10(end)], **_false_alarm_ticks(least, end),
               "title": {"text": false_alarms}},
        yaxis={"range": [0, 1.02], **quarter_ticks(), "title": {"text": detected}},
    )  # fmt: skip


def _false_alarm_ticks(least: float, end: float) -> Figure:
    """Ticks of the axis of false alarms, from ``least``, labelled as none, to ``end``."""
    decades = range(math.floor(math.log10(least)), 1)
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1,)):
        places = (step * 10.0**decade for decade in decades for step in steps)
        ticks = [place for place in places if 1.9 * least <= place <= 1.001 * end]
        if len(ticks) <= MOST_TICKS:
            break
    return {"tickvals": [least, *ticks], "ticktext": ["none", *map(percent_label, ticks)]}
