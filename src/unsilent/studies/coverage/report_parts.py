"""Parts that the reports on coverage of trainings and of inference have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unsilent.report.curves import line_series, line_style
from unsilent.report.model import Cell, Column, Table, TableRow
from unsilent.report.text import p_value_text
from unsilent.report.theme import Figure, figure, label


def comparison_table(reference: str, names: Sequence[str], rows: Iterable[tuple[Cell, ...]]) -> Table:
    """Paired comparisons with a reference: cells by ``names``, the difference, faults that only one detected, and p."""
    columns = (
        *map(Column.text, names), Column.points(f"{reference} minus {names[0]}"), Column.count(f"only {reference}", priority=1),
        Column.count(f"only {names[0]}", priority=1), Column("p", "number", digits=p_value_text),
    )  # fmt: skip
    return Table(columns, tuple(map(TableRow, rows)), "Paired comparisons", terminal_rows=0)


def roc_figure(
    curves: Mapping[str, Sequence[tuple[float, float]]], least: float, false_alarms: str, detected: str
) -> Figure:
    """Detected faults against false alarms: a curve of points for each detector; ``least``: the leftmost place."""
    traces = []
    for number, (name, points) in enumerate(curves.items()):
        hover = [f"{label(name)}<br>{100 * y:.3g} % detected at {100 * x:.3g} % false alarms" for x, y in points]
        line = {**line_style(number), "shape": "hv"}
        traces.append(line_series(name, [(max(x, least), y) for x, y in points], line, hover))
    return figure(
        traces, 460, xaxis={"type": "log", "title": {"text": false_alarms}},
        yaxis={"range": [0, 1.02], "title": {"text": detected}},
    )  # fmt: skip
