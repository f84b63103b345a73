"""A report as one self-contained HTML file; see `pages` for what keeps it harmless."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsilent.render.cells import cell_key, head, texts
from unsilent.render.pages import capitalised, render_page, write_page
from unsilent.report.model import Grid, Heading, Part, Plot, Report, Row, Shown, Table, Text
from unsilent.report.text import clean
from unsilent.report.theme import Figure

TEMPLATE = "report.html.jinja"


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_page(report_html(report), path)


def report_html(report: Report) -> str:
    """The whole page as text."""
    return render_page(TEMPLATE, page(report), figures(report))


def figures(report: Report) -> dict[str, Figure]:
    """All figures by the names of their places."""
    return {plot.name: plot.figure for section in report.sections for plot in _plots(section.parts)}


def page(report: Report) -> dict[str, Any]:
    """Everything the template shows."""
    return {
        "title": clean(report.title),
        "kicker": clean(report.kicker),
        "headline": capitalised(clean(report.headline)),
        "numbers": [tuple(map(clean, number)) for number in report.numbers],
        "findings": [capitalised(clean(line)) for line in report.findings],
        "sections": [
            {
                "title": clean(s.title),
                "lead": clean(s.lead),
                "parts": [_part(part, s.title) for part in s.parts if _on_page(part)],
            }
            for s in report.sections
            if any(map(_on_page, s.parts))
        ],
        "notes": [capitalised(clean(line)) for line in report.notes],
        "facts": [(clean(term), clean(text)) for term, text in report.facts],
        "again": clean(report.again),
        "method": [clean(line) for line in report.method.split("\n") if line],
    }


def _plots(parts: tuple[Part, ...]) -> Iterator[Plot]:
    for part in parts:
        if isinstance(part, Plot):
            yield part
        elif isinstance(part, Grid):
            yield from _plots(part.parts)


def _on_page(part: Part) -> bool:
    return not isinstance(part, Table) or part.on_page


def _part(part: Part, section: str) -> dict[str, Any]:
    if isinstance(part, Plot):
        return {"kind": "plot", "name": part.name, "label": clean(part.label)}
    if isinstance(part, Text):
        return {"kind": "text", "lines": [(mark, clean(text)) for mark, text in part.lines]}
    if isinstance(part, Heading):
        return {"kind": "heading", "title": clean(part.title), "small": clean(part.small)}
    if isinstance(part, Grid):
        return {"kind": "grid", "parts": [_part(inner, section) for inner in part.parts]}
    heads = [(head(column), bool(column.left) or not number) for number, column in enumerate(part.columns)]
    rows = [_row(part, row) for row in part.rows]
    title = "" if part.title.lower() == section.lower() else capitalised(clean(part.title))
    return {"kind": "table", "title": title, "heads": heads, "rows": rows, "long": part.long}


def _row(table: Table, row: Row) -> dict[str, Any]:
    cells = []
    for text, cell in zip(texts(table.columns, row), row.cells, strict=True):
        mark, bar = (cell.mark, cell.bar) if isinstance(cell, Shown) else (None, None)
        ends = bar and (100 * bar[0], max(100 * (bar[1] - bar[0]), 0.6))
        cells.append((text, cell_key(cell), mark, ends))
    return {"strong": row.strong, "hint": clean(row.hint), "cells": cells}
