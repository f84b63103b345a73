"""A trace as one self-contained HTML file; see `pages` for what keeps it harmless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unsilent.render.pages import Cell, Line, capitalised, render_page, write_page
from unsilent.render.trace_figures import relative_figure, share_figure
from unsilent.render.trace_info import PHASE_NAMES, TraceInfo, headline, magnitude, marks, share_text, worst
from unsilent.report.look import Figure
from unsilent.report.text import clean
from unsilent.traced import BEFORE, TraceRow

TEMPLATE = "trace.html.jinja"
ROWS = 2000
"""Rows of the table; the figures and the JSON have all."""
COLUMNS = ("operation", "phase", "tensor", "#", "changed", "changed %", "relative", "absolute", "from 0", "NaN, ∞")
TEXT = ("phase", "tensor")


def write_trace(info: TraceInfo, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_page(render_trace_html(info), path)


def render_trace_html(info: TraceInfo) -> str:
    """The whole page as text."""
    return render_page(TEMPLATE, page(info), figures(info))


def figures(info: TraceInfo) -> dict[str, Figure]:
    """The figures that have something to show."""
    if not info.trace.rows:
        return {}
    relative = relative_figure(info.trace)
    return {"share": share_figure(info.trace)} | ({} if relative is None else {"relative": relative})


def page(info: TraceInfo) -> dict[str, Any]:
    """Everything the template shows."""
    trace = info.trace
    struck = marks(trace)
    shown = [i for i, row in enumerate(trace.rows) if row.change.changed or i in struck]
    return {
        "title": capitalised(clean(info.title)),
        "headline": capitalised(headline(trace)),
        "worst": [capitalised(line) for line in worst(trace)],
        "numbers": numbers(info),
        "notes": [clean(note) for note in trace.notes],
        "faults": [(clean(f.site), clean(f.text), _where(info, f.row), f.bits) for f in trace.faults[:ROWS]],
        "columns": COLUMNS,
        "text_columns": TEXT,
        "rows": [_line(i, trace.rows[i], i in struck) for i in shown[:ROWS]],
        "left": max(len(shown) - ROWS, 0),
        "all": len(trace.rows),
        "changed": sum(1 for _ in trace.changed),
        "facts": [(term, clean(text)) for term, text in info.facts],
    }


def numbers(info: TraceInfo) -> list[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    rows = info.trace.rows
    changed = [rows[i] for i in info.trace.changed]
    told = [("outputs changed", f"{len(changed):,}", f"of {len(rows):,}")]
    for phase, name in PHASE_NAMES.items():
        mine = [row for row in rows if row.phase == phase]
        if mine and len(mine) < len(rows):
            told.append((name, f"{sum(row.change.changed > 0 for row in mine):,}", f"of {len(mine):,}"))
    largest = max((row.change.relative for row in changed if row.change.relative is not None), default=None)
    if largest is not None:
        told.append(("largest relative change", magnitude(largest), ""))
    bad = sum(row.change.nonfinite > 0 for row in changed)
    return [*told, ("with new NaN or ∞", f"{bad:,}", "")]


def _where(info: TraceInfo, row: int | None) -> str:
    if row is None:
        return "place not known"
    return "before the first operation" if row == BEFORE else clean(info.trace.rows[row].label)


def _line(number: int, row: TraceRow, struck: bool) -> Line:
    change = row.change
    phase = PHASE_NAMES.get(row.phase, row.phase) + (f" {row.micro_step}" if row.micro_step else "")
    share = row.other or share_text(row)
    return Line(
        ("▶ " if struck else "") + clean(row.label),
        "model" if struck else "",
        (
            Cell(phase),
            Cell(row.kind),
            Cell(f"{number:,}", float(number)),
            Cell(f"{change.changed:,}", float(change.changed)),
            Cell(share, row.share),
            Cell(magnitude(change.relative), -1.0 if change.relative is None else change.relative),
            Cell(magnitude(change.absolute), -1.0 if change.absolute is None else change.absolute),
            Cell(f"{change.from_zero:,}", float(change.from_zero)),
            Cell(f"{change.nonfinite:,}", float(change.nonfinite)),
        ),
    )
