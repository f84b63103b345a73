"""A result as one JSON object: schema ``unsilent/pvf/1``.

Strict JSON: no NaN or infinity (they become null), keys are text, and anything JSON does not know becomes
its text.
"""

from __future__ import annotations

from typing import Any

from unsilent.render.fit import fit_rows
from unsilent.render.headline import sentence
from unsilent.strictjson import strict
from unsilent.studies.pvf.records import HeatMap, PvfResult

SCHEMA = "unsilent/pvf/1"
_SPEC = ("workload", "fault", "at", "per", "law", "unit", "judge", "confidence", "samples", "batches")
_SPEC_MACHINE = ("device", "dtype", "threads", "info")
_TOP = ("command", "seed", "seconds", "cpu_seconds", "golden_seconds", "store", "campaign", "device", "versions")


def to_json(result: PvfResult, *, fit_per_bit: float | None = None) -> dict[str, Any]:
    """The object that ``--json`` prints; with ``fit_per_bit`` it has a list ``fit`` as well."""
    found: dict[str, Any] = {"schema": SCHEMA}
    found |= {key: getattr(result, key) for key in _TOP}
    found["spec"] = _spec(result)
    found |= {"trials_done": result.trials_done, "trials_planned": result.trials_planned}
    found |= {"measure": result.measure, "headline": sentence(result)}
    found["results"] = [_fields(row) for row in result.rows]
    found["heat_maps"] = [_heat_map(heat_map) for heat_map in result.heat_maps]
    found["lookups"] = [_fields(row) | {"confidence": result.confidence, "unit": result.unit} for row in result.lookups]
    found["notes"] = list(result.notes)
    if fit_per_bit is not None:
        found["fit_per_bit"] = fit_per_bit
        found["fit"] = [
            {"target": f.row.target, "level": f.row.level, "flips": f.row.flips, "bits": f.row.bits}
            | {"raw": f.raw, "estimate": f.estimate, "low": f.low, "high": f.high, "reason": f.reason or None}
            | {"confidence": f.row.confidence, "n": f.row.n, "unit": f.row.unit}
            for f in fit_rows(result, fit_per_bit)
        ]
    plain = strict(found)
    assert isinstance(plain, dict)
    return plain


def _spec(result: PvfResult) -> dict[str, Any]:
    """All that was asked; where nothing was said, what it came to (the judge, the dtype)."""
    came_to = {key: getattr(result, key) for key in (*_SPEC, *_SPEC_MACHINE)}
    return came_to | {key: value for key, value in result.spec.items() if value is not None or key not in came_to}


def _fields(row: Any) -> dict[str, Any]:
    # `dataclasses.asdict` copies values deeply, which a mapping proxy does not survive.
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _heat_map(found: HeatMap) -> dict[str, Any]:
    return {
        "dtype": found.dtype,
        "layers": found.layers,
        "bits": found.bits,
        "fields": [found.fields.get(bit, "") for bit in found.bits],
        "estimate": found.estimate,
        "n": found.n,
    }
