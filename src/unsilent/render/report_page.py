"""A report as one self-contained HTML file.

See `pages` for how untrusted text is made safe.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from unsilent.render.cells import cell_key, filled_columns, header_text, texts
from unsilent.render.pages import capitalised, render_page, write_file
from unsilent.report.model import Cell, Mark, Part, Report, Table, TableRow, TextCell
from unsilent.report.theme import Figure


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write a report's page to ``path``, replacing it in one step, and return the path.

    Raises ``UsageError``.
    """
    return write_file(report_html(report).encode("utf-8", "backslashreplace"), path, "the report")


def report_html(report: Report) -> str:
    """The HTML text of a report's page."""
    sections = [replace(section, parts=tuple(filter(_is_on_page, section.parts))) for section in report.sections]
    values = {
        "report": report,
        "sections": [section for section in sections if section.parts],
        "kind_of": lambda part: type(part).__name__,
        "heads_and_rows": heads_and_rows,
        "capitalised": capitalised,
    }
    return render_page(values, figures_by_place(report))


def figures_by_place(report: Report) -> dict[str, Figure]:
    """All figures of a report, by the names of their places on the page."""
    return {name: plot.figure for name, plot in report.plots.items()}


def _is_on_page(part: Part) -> bool:
    return not isinstance(part, Table) or part.on_page


def heads_and_rows(table: Table) -> tuple[list[tuple[str, bool]], list[tuple[TableRow, list[tuple[Any, ...]]]]]:
    """The non-empty columns of a table: their heads, and their rows for a page.

    Returns:
        Name and left alignment of each column. Each row with the text, sort key, mark and bar of each of its cells.
    """
    lines = [texts(table.columns, row) for row in table.rows]
    filled = filled_columns(table.columns, lines)
    heads = [(header_text(table.columns[n]), bool(table.columns[n].left_aligned) or n == filled[0]) for n in filled]
    rows = [
        (row, [_shown_cell(line[number], row.cells[number]) for number in filled])
        for row, line in zip(table.rows, lines, strict=True)
    ]
    return heads, rows


def _shown_cell(text: str, cell: Cell) -> tuple[str, float | None, Mark | None, tuple[float, float] | None]:
    """Text, sort key and mark of a cell, and the ends of its bar in percent of the cell's width."""
    mark, bar = (cell.mark, cell.bar) if isinstance(cell, TextCell) else (None, None)
    ends = bar and (100 * bar[0], max(100 * (bar[1] - bar[0]), 0.6))
    return text, cell_key(cell), mark, ends
