"""A comparison as one JSON object: schema ``unsilent/comparison/1``; strict like that of a result (`jsonout`).

A row's ``estimate``, ``low`` and ``high`` are those of the difference B - A; ``ratio`` is B / A, whose ``high`` is null where
nothing bounds it.
"""

from __future__ import annotations

from typing import Any

from unsilent.render.comparison_info import headline, second_line, sentence
from unsilent.strictjson import strict
from unsilent.studies.pvf.comparison import ComparedRow, Comparison, Estimated
from unsilent.studies.pvf.records import PvfResult, PvfRow

SCHEMA = "unsilent/comparison/1"
_COMMON = ("fault", "law", "per", "unit", "judge", "confidence")
_SIDE = (
    *("store", "campaign", "command", "workload", "info", "spec", "at", "seed", "device", "dtype", "threads"),
    *("samples", "batches", "trials_done", "trials_planned", "versions"),
)
_ROW = ("estimate", "low", "high", "confidence", "n", "unit", "method")


def comparison_json(found: Comparison) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    plain = strict(
        {
            "schema": SCHEMA,
            "command": found.command,
            "spec": {key: getattr(found.a, key) for key in _COMMON} | {"flips": found.a.spec["flips"]},
            "measure": found.a.measure,
            "headline": " ".join(sentence(parts) for parts in (headline(found), second_line(found)) if parts),
            "identical": found.identical,
            "a": _side(found.a),
            "b": _side(found.b),
            "changes": [{"what": c.what, "a": c.a, "b": c.b} for c in found.changes],
            "only_a": [_name(row) for row in found.only_a],
            "only_b": [_name(row) for row in found.only_b],
            "results": [_row(row) for row in found.rows],
            "notes": found.notes,
        }
    )
    assert isinstance(plain, dict)
    return plain


def _side(result: PvfResult) -> dict[str, Any]:
    return {key: getattr(result, key) for key in _SIDE}


def _name(row: PvfRow) -> dict[str, Any]:
    return {key: getattr(row, key) for key in ("target", "level", "parent", "flips")}


def _row(row: ComparedRow) -> dict[str, Any]:
    apart, times = row.difference, row.ratio
    common = {"confidence": row.a.confidence, "n": min(row.a.n, row.b.n), "unit": row.a.unit}
    return {
        **_name(row.a),
        **_estimate(apart, common),
        "method": row.method,
        "paired": row.paired,
        "p": row.p,
        "p_adjusted": row.adjusted,
        "differs": row.differs,
        "ratio": _estimate(times, common),
        "a": {key: getattr(row.a, key) for key in _ROW},
        "b": {key: getattr(row.b, key) for key in _ROW},
    }


def _estimate(found: Estimated, common: dict[str, Any]) -> dict[str, Any]:
    return {"estimate": found.estimate, "low": found.low, "high": found.high, **common}
