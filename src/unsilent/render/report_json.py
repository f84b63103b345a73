"""A report as one JSON object, with an entry in ``results`` for each estimate."""

from __future__ import annotations

from typing import Any

from unsilent.basics.interval import COUNTED, Interval
from unsilent.basics.strictjson import as_json_values
from unsilent.report.model import Cell, Report, Table, TableRow, TextCell

FIELDS = ("estimate", "low", "high", "confidence", "n", "method")
RUN_DETAILS = frozenset(
    ("command", "store", "seconds", "cpu_seconds", "golden_seconds", "per_hour", "versions", "machine", "notes")
)
"""Names of fields, and of measures of estimates, that differ between two runs of the same campaign."""


def report_json(report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints.

    Infinite limits are null.
    """
    rows = [row for row in report.estimates.rows if not any(map(_is_counted, row.cells))]
    results = [row_object(report.estimates, row) for row in rows]
    further = report.further_json
    head = {
        "schema": report.schema, "command": report.repeat_command, "headline": report.headline, "notes": report.notes,
    }  # fmt: skip
    plain = as_json_values({**head, **further, "results": further.get("results", results)})
    assert isinstance(plain, dict)
    return plain


def without_run_details(value: Any) -> Any:
    """A copy of the object without the keys in `RUN_DETAILS`, at any depth."""
    if isinstance(value, dict):
        return {key: without_run_details(item) for key, item in value.items() if key not in RUN_DETAILS}
    if isinstance(value, list):
        other_items = [item for item in value if not (isinstance(item, dict) and item.get("measure") in RUN_DETAILS)]
        return [without_run_details(item) for item in other_items]
    return value


def row_object(table: Table, row: TableRow) -> dict[str, Any]:
    """A table row as an object with column names as keys.

    An estimate becomes several fields.
    """
    by_name: dict[str, Any] = {}
    for column, cell in zip(table.columns, row.cells, strict=True):
        if isinstance(cell, Interval):
            by_name |= {name: getattr(cell, name) for name in FIELDS}
        elif cell is not None:
            by_name[column.name] = cell.text if isinstance(cell, TextCell) else cell
    return by_name


def _is_counted(cell: Cell) -> bool:
    return isinstance(cell, Interval) and cell.method == COUNTED
