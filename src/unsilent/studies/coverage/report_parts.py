"""Parts that the reports on coverage of trainings and of inference have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unsilent.report.model import Column
from unsilent.report.theme import SERIES_COLOURS, Figure, figure

SHARE: Mapping[str, Any] = {"kind": "estimate", "unit": "%", "scale": 100.0}
"""What a column of shares with limits is made with."""


def comparison_columns(reference: str, *names: str) -> tuple[Column, ...]:
    """Of a table of paired comparisons with a reference, behind columns of these names."""
    return (
        *(Column(name, left_aligned=True) for name in names),
        Column(f"{reference} minus {names[0]}, points"), Column(f"only {reference}", "number", priority=1),
        Column(f"only {names[0]}", "number", priority=1), Column("p"),
    )  # fmt: skip


def roc_figure(
    curves: Mapping[str, Sequence[tuple[float, float]]], least: float, false_alarms: str, detected: str
) -> Figure:
    """Detected faults against false alarms: a curve of points for each detector; ``least``: the leftmost place."""
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": name, "line": {"color": SERIES_COLOURS[number % len(SERIES_COLOURS)],
            "dash": ("solid", "dash", "dot")[number // len(SERIES_COLOURS) % 3], "shape": "hv"},
            "x": [max(x, least) for x, _ in points], "y": [y for _, y in points],
        }
        for number, (name, points) in enumerate(curves.items())
    ]  # fmt: skip
    return figure(
        traces, 460, xaxis={"type": "log", "title": {"text": false_alarms}},
        yaxis={"range": [0, 1.02], "title": {"text": detected}},
    )  # fmt: skip
