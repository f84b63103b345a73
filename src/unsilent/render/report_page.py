"""A report as one self-contained HTML file; see `pages` for what keeps it harmless."""

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
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_file(report_html(report).encode("utf-8", "backslashreplace"), path, "the report")


def report_html(report: Report) -> str:
    """The whole page as text."""
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
    """All figures by the names of their places."""
    return {name: plot.figure for name, plot in report.plots.items()}


def _is_on_page(part: Part) -> bool:
    return not isinstance(part, Table) or part.on_page


def heads_and_rows(table: Table) -> tuple[list[tuple[str, bool]], list[tuple[TableRow, list[tuple[Any, ...]]]]]:
    """The columns of a table in which there is text, as a page has them.

    Returns:
        Of each column its name, and whether it is read from the left. The rows, with the text, the key, the mark and the bar of
        each cell.
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
    """Text, key, mark, and the ends of the bar in percent of the cell's width."""
    mark, bar = (cell.mark, cell.bar) if isinstance(cell, TextCell) else (None, None)
    ends = bar and (100 * bar[0], max(100 * (bar[1] - bar[0]), 0.6))
    return text, cell_key(cell), mark, ends
