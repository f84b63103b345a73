"""Struck trainings as one JSON object: schema ``unsilent/training/1``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsilent.campaigns.trainings.spec import WATCHED
from unsilent.render.training_info import least_accuracy
from unsilent.statistics.intervals import Interval
from unsilent.strictjson import strict
from unsilent.studies.trainings.records import Caught, Group, Point, TrainingResult

SCHEMA = "unsilent/training/1"
_TOP = (
    "command", "workload", "spec", "campaign", "store", "steps", "samples", "parameters", "optimizers", "golden_test",
    "golden_seconds", "confidence", "level", "margin", "n", "seconds", "cpu_seconds", "versions", "info",
)  # fmt: skip


def training_json(result: TrainingResult) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    found: dict[str, Any] = {"schema": SCHEMA} | {name: getattr(result, name) for name in _TOP}
    found["thresholds"] = _fields(result.thresholds)
    floors = result.floors
    found["floors"] = {"implementation": _fields(floors.implementation), "seeds": _fields(floors.seeds)}
    found["least_accuracy"], found["least_accuracy_different"] = least_accuracy(result)
    found["results"] = list(rows(result))
    found["classes"] = {one.name: one.n for one in result.classes}
    found["different"] = {one.name: one.different for one in result.classes}
    found["groups"] = {
        kind: [{"name": g.name, "n": g.n, "counts": g.counts} for g in groups] for kind, groups in result.groups.items()
    }
    found["conditions"] = [
        {
            name: getattr(c, name)
            for name in ("kind", "factor", "hit", "missed", "false", "clear", "loud_with", "loud_without")
        }
        for c in result.conditions
    ]
    found["points"] = [_point(point) for point in result.points]
    found["curves"] = [_fields(curve) for curve in result.curves]
    found["cost"] = _fields(result.cost)
    found["guard"] = None if result.guard is None else _guard(result)
    found["notes"] = list(result.notes)
    plain = strict(found)
    assert isinstance(plain, dict)
    return plain


def rows(result: TrainingResult) -> Iterator[dict[str, Any]]:
    """One row for each estimate with limits."""
    for one in result.classes:
        yield _row("class", one.name, "share", one.share)
    yield from _group("all", "all", result.whole)
    for kind, groups in result.groups.items():
        for group in groups:
            yield from _group(kind, group.name, group)
    for contrast in result.contrasts:
        names = (contrast.first, contrast.second, f"{contrast.first} - {contrast.second}")
        for name, interval in zip(names, (contrast.one, contrast.other, contrast.difference), strict=True):
            yield _row("contrast", name, contrast.name, interval)
    for c in result.conditions:
        name = f"{c.kind} above {c.factor:g}"
        yield _row("condition", name, "sensitivity", c.sensitivity)
        yield _row("condition", name, "specificity", c.specificity)
        yield _row("condition", name, "sensitivity_different", c.different)
    for part in result.parts:
        extra = {"what": part.what, "part": part.part, "elements": part.elements, "failures": part.failures}
        yield _row("target", part.target, "training_pvf", part.pvf) | extra
        yield _row("target", part.target, "training_pvf_different", part.different)
    if result.guard is not None:
        for kind, found in _caught(result):
            yield _row(kind, found.name, "caught", found.share) | {"caught": found.within, "identical": found.identical}


def _group(kind: str, name: str, group: Group) -> Iterator[dict[str, Any]]:
    yield _row(kind, name, "different", group.different)
    yield _row(kind, name, "harmful", group.harmful)
    yield _row(kind, name, "latent", group.latent)


def _row(kind: str, target: str, measure: str, interval: Interval) -> dict[str, Any]:
    return {
        "group": kind,
        "target": target,
        "measure": measure,
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "confidence": interval.confidence,
        "n": interval.n,
        "unit": "trial",
        "method": interval.method,
    }


def _caught(result: TrainingResult) -> Sequence[tuple[str, Caught]]:
    guard = result.guard
    if guard is None:
        return ()
    return [
        ("guard", guard.different),
        ("guard", guard.all),
        ("guard", guard.largest),
        *(("guard size", one) for one in guard.sizes),
        *(("guard group", one) for one in guard.groups),
    ]


def _guard(result: TrainingResult) -> Mapping[str, Any]:
    guard = result.guard
    assert guard is not None
    counts = [
        {"name": one.name, "kind": kind, "n": one.n, "caught": one.within, "identical": one.identical}
        for kind, one in _caught(result)
    ]
    return {
        "large": guard.large,
        "late": guard.late,
        "stopped": guard.stopped,
        "alarms": guard.alarms,
        "faults": counts,
    }


def _point(point: Point) -> dict[str, Any]:
    """Ratios by kind; null where there is none, and where it is no number, which ``not_finite`` tells."""
    ratios = dict(zip(WATCHED, point.ratios, strict=False))
    lost = [kind for kind, ratio in ratios.items() if ratio is not None and not math.isfinite(ratio)]
    return {"trial": point.trial, "class": point.outcome, "ratios": ratios, "not_finite": lost}


def _fields(row: Any) -> dict[str, Any]:
    # `dataclasses.asdict` copies values deeply, which a mapping proxy does not survive.
    return {name: getattr(row, name) for name in row.__dataclass_fields__}
