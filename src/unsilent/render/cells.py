"""Text and sort keys of the cells in a report's tables, shared by terminal and page."""

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
    """The number by which a cell is sorted; None if it is sorted by its text."""
    if isinstance(cell, TextCell):
        return cell.key
    if isinstance(cell, Interval):
        return cell.estimate
    return float(cell) if isinstance(cell, (int, float)) else None


def texts(columns: Sequence[Column], row: TableRow) -> list[str]:
    """The texts of all cells in a row."""
    return [cell_text(column, cell) for column, cell in zip(columns, row.cells, strict=True)]


def filled_columns(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[int]:
    """The numbers of the columns that have text in some row, or of all columns if there are no rows."""
    return [number for number in range(len(columns)) if not lines or any(line[number] for line in lines)]
