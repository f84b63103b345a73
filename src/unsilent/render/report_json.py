"""A report as one JSON object: what its study says of itself, and ``results``, an object for each estimate with limits."""

from __future__ import annotations

from typing import Any

from unsilent.interval import COUNTED, Interval
from unsilent.report.model import Cell, Report, Row, Shown, Table
from unsilent.strictjson import strict

FIELDS = ("estimate", "low", "high", "confidence", "n", "method")
OF_A_RUN = frozenset(
    ("command", "store", "seconds", "cpu_seconds", "golden_seconds", "per_hour", "versions", "machine")
)
"""Fields, and measures of estimates, that differ between two runs of the same campaign."""


def report_json(report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; limits that nothing bounds are null."""
    rows = [row for row in report.estimates.rows if not any(map(_is_counted, row.cells))]
    results = [row_object(report.estimates, row) for row in rows]
    plain = strict({"schema": report.schema, **report.data, "results": report.data.get("results", results)})
    assert isinstance(plain, dict)
    return plain


def canonical_json(value: Any) -> Any:
    """The object without what is `OF_A_RUN`, at any depth."""
    if isinstance(value, dict):
        return {key: canonical_json(item) for key, item in value.items() if key not in OF_A_RUN}
    if isinstance(value, list):
        kept = [item for item in value if not (isinstance(item, dict) and item.get("measure") in OF_A_RUN)]
        return [canonical_json(item) for item in kept]
    return value


def row_object(table: Table, row: Row) -> dict[str, Any]:
    """Names of columns and their values; an estimate is spread out into its fields."""
    by_name: dict[str, Any] = {}
    for column, cell in zip(table.columns, row.cells, strict=True):
        if isinstance(cell, Interval):
            by_name |= {name: getattr(cell, name) for name in FIELDS}
        elif cell is not None:
            by_name[column.name] = cell.text if isinstance(cell, Shown) else cell
    return by_name


def _is_counted(cell: Cell) -> bool:
    return isinstance(cell, Interval) and cell.method == COUNTED
