"""A report as one self-contained HTML file; see `pages` for what keeps it harmless."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unsilent.render.cells import cell_key, filled_columns, header_text, texts
from unsilent.render.pages import capitalised, render_page, write_file
from unsilent.report.model import Column, Heading, Part, Plot, Report, SideBySide, Table, TableRow, TextBlock, TextCell
from unsilent.report.text import escape_unprintable
from unsilent.report.theme import Figure


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_file(report_html(report).encode("utf-8", "backslashreplace"), path, "the report")


def report_html(report: Report) -> str:
    """The whole page as text."""
    return render_page(template_values(report), figures_by_place(report))


def figures_by_place(report: Report) -> dict[str, Figure]:
    """All figures by the names of their places."""
    return {name: plot.figure for name, plot in report.plots.items()}


def template_values(report: Report) -> dict[str, Any]:
    """Everything the template shows."""
    return {
        "title": escape_unprintable(report.title),
        "kicker": escape_unprintable(report.report_type),
        "headline": capitalised(escape_unprintable(report.headline)),
        "numbers": [tuple(map(escape_unprintable, number)) for number in report.numbers],
        "findings": [capitalised(escape_unprintable(line)) for line in report.findings],
        "sections": [
            {
                "title": escape_unprintable(s.title),
                "lead": escape_unprintable(s.introduction),
                "parts": [_part(part, s.title) for part in s.parts if _on_page(part)],
            }
            for s in report.sections
            if any(map(_on_page, s.parts))
        ],
        "notes": [capitalised(escape_unprintable(line)) for line in report.notes],
        "facts": [(escape_unprintable(term), escape_unprintable(text)) for term, text in report.facts],
        "next": [
            (escape_unprintable(description), escape_unprintable(command))
            for description, command in report.next_commands
        ],
        "again": escape_unprintable(report.repeat_command),
        "method": [escape_unprintable(line) for line in report.method.split("\n") if line],
    }


def _on_page(part: Part) -> bool:
    return not isinstance(part, Table) or part.on_page


def _part(part: Part, section: str) -> dict[str, Any]:
    if isinstance(part, Plot):
        return {"kind": "plot", "name": part.name, "label": escape_unprintable(part.alt_text)}
    if isinstance(part, TextBlock):
        return {"kind": "text", "lines": [(mark, escape_unprintable(text)) for mark, text in part.lines]}
    if isinstance(part, Heading):
        return {"kind": "heading", "title": escape_unprintable(part.title), "small": escape_unprintable(part.subtitle)}
    if isinstance(part, SideBySide):
        return {"kind": "grid", "parts": [_part(inner, section) for inner in part.parts]}
    filled = filled_columns(part.columns, [texts(part.columns, row) for row in part.rows])
    columns = [part.columns[number] for number in filled]
    heads = [(header_text(column), bool(column.left_aligned) or not number) for number, column in enumerate(columns)]
    rows = [_row(columns, replace(row, cells=tuple(row.cells[number] for number in filled))) for row in part.rows]
    title = "" if part.title.lower() == section.lower() else capitalised(escape_unprintable(part.title))
    return {"kind": "table", "title": title, "heads": heads, "rows": rows, "long": part.sortable}


def _row(columns: Sequence[Column], row: TableRow) -> dict[str, Any]:
    cells = []
    for text, cell in zip(texts(columns, row), row.cells, strict=True):
        mark, bar = (cell.mark, cell.bar) if isinstance(cell, TextCell) else (None, None)
        ends = bar and (100 * bar[0], max(100 * (bar[1] - bar[0]), 0.6))
        cells.append((text, cell_key(cell), mark, ends))
    return {"strong": row.emphasised, "hint": escape_unprintable(row.tooltip), "cells": cells}
