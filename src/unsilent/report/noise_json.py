"""Run-to-run variation as one JSON object: schema ``unsilent/noise/1``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from unsilent.statistics.intervals import Interval
from unsilent.strictjson import strict
from unsilent.studies.noise_records import NoiseResult, VariantNoise

SCHEMA = "unsilent/noise/1"


def noise_json(result: NoiseResult) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    names = ("command", "spec", "seed", "seconds", "cpu_seconds", "store", "versions")
    found: dict[str, Any] = {"schema": SCHEMA} | {name: getattr(result, name) for name in names}
    found |= {name: getattr(result, name) for name in ("workload", "training", "steps", "samples", "parameters")}
    found |= {name: getattr(result, name) for name in ("device", "machine", "level", "smallest_p", "info")}
    found["results"] = list(rows(result))
    found["variants"] = [_variant(one) for one in result.variants]
    found["switches"] = [asdict(effect) for effect in result.effects]
    found["churn_matrix"] = {"variants": result.matrix.variants, "churn": result.matrix.churn}
    found["loss_spread"] = [{"variant": c.variant, "steps": c.steps, "sd": c.sd} for c in result.curves]
    found["notes"] = list(result.notes)
    plain = strict(found)
    assert isinstance(plain, dict)
    return plain


def rows(result: NoiseResult) -> Iterator[dict[str, Any]]:
    """One row for each estimate; a limit that nothing bounds is null."""
    for one in result.variants:
        yield _row(one, "accuracy_sd", "all", one.accuracy.sd)
        if one.loss is not None:
            yield _row(one, "loss_sd", "all", one.loss.sd)
        yield _row(one, "churn", "all", one.churn)
        if one.unit is not None and one.raw is not None:
            yield _row(one, "distance_unit", "all", one.unit)
            yield _row(one, "distance_raw", "all", one.raw)
        yield _row(one, "parting_step", "all", one.parting)
        for group in one.groups:
            extra = {"samples": group.n, "error": group.error, "by_size": group.by_size, "p": group.p}
            extra |= {"p_corrected": group.corrected, "p_corrected_error": group.error_p, "draws": group.draws}
            yield _row(one, "group_error_sd", group.name, group.sd) | extra
            yield _row(one, "group_error_sd_common", group.name, group.common) | {"samples": group.n}


def _row(one: VariantNoise, measure: str, target: str, interval: Interval) -> dict[str, Any]:
    return {
        "variant": one.name,
        "switches": one.switches,
        "measure": measure,
        "target": target,
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "confidence": interval.confidence,
        "n": interval.n,
        "unit": "replica",
        "method": interval.method,
    }


def _variant(one: VariantNoise) -> dict[str, Any]:
    names = (
        "name",
        "switches",
        "n",
        "fixed",
        "distinct",
        "partings",
        "accuracies",
        "losses",
        "twin_churn",
        "twin_unit",
    )
    found = {name: getattr(one, name) for name in (*names, "seconds", "notes")}
    found["first"] = None if one.first is None else asdict(one.first)
    found["accuracy_mean"] = one.accuracy.mean
    found["loss_mean"] = None if one.loss is None else one.loss.mean
    return found
