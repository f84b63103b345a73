"""Cells of a report's tables as text, the same in a terminal and on a page; and what they are sorted by."""

from __future__ import annotations

from collections.abc import Sequence

from unsilent.basics.interval import Interval
from unsilent.report.model import Cell, Column, TableRow, TextCell
from unsilent.report.text import difference_text, escape_unprintable, interval_text

NOTHING = "–"


def header_text(column: Column) -> str:
    """The name of a column with its unit."""
    return f"{escape_unprintable(column.name)}, {column.unit}" if column.unit else escape_unprintable(column.name)


def cell_text(column: Column, cell: Cell) -> str:
    """The text of a cell."""
    if cell is None or (isinstance(cell, Interval) and cell.estimate is None):
        return NOTHING
    if isinstance(cell, TextCell):
        return escape_unprintable(cell.text)
    if isinstance(cell, Interval):
        return difference_text(cell) if column.kind == "difference" else interval_text(cell, column.scale)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if callable(column.digits) and not isinstance(cell, str):
        return escape_unprintable(column.digits(cell * column.scale))
    if isinstance(cell, int):
        return f"{cell:,}"
    return format(cell * column.scale, str(column.digits)) if isinstance(cell, float) else escape_unprintable(cell)


def cell_key(cell: Cell) -> float | None:
    """The number that a cell is sorted by; None: by its text."""
    if isinstance(cell, TextCell):
        return cell.key
    if isinstance(cell, Interval):
        return cell.estimate
    return float(cell) if isinstance(cell, (int, float)) else None


def texts(columns: Sequence[Column], row: TableRow) -> list[str]:
    """All cells of a row."""
    return [cell_text(column, cell) for column, cell in zip(columns, row.cells, strict=True)]


def filled_columns(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[int]:
    """Numbers of the columns in which some row has text; all where there is no row."""
    return [number for number in range(len(columns)) if not lines or any(line[number] for line in lines)]
