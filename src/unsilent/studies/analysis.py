"""From stored trials to estimates: rows by target, rolled up to layers, components and the model.

Every estimate carries an interval that knows that one fault is scored on many samples (`statistics.clustered`); sums over
targets are weighted by their share of the sampling law (`statistics.combine`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.spec import Description, TargetInfo, TrialRow
from unsilent.campaigns.store import Store
from unsilent.errors import UsageError, unknown
from unsilent.outcomes.base import Outcome
from unsilent.statistics import Interval, clustered, combine
from unsilent.studies.hits import SingleHit, heat_map, lookup_rows, single_hits
from unsilent.studies.records import PvfResult, PvfRow

UNITS = ("sample", "batch")
INTERVALS = ("wilson", "clopper-pearson")
FEW = 10
"""Incorrect trials below which an interval for clustered counts is known to be optimistic."""


@dataclass(frozen=True)
class Question:
    """How stored trials are read; the same store answers any of them."""

    unit: str = "sample"
    confidence: float = 0.95
    interval: str = "wilson"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise unknown("--unit", self.unit, UNITS)
        if self.interval not in INTERVALS:
            raise unknown("--interval", self.interval, INTERVALS)
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"--confidence is {self.confidence}; expected a value from 0.5 to below 1, like 0.95")

    def estimate(self, tally: Tally) -> Interval:
        """PVF with its interval."""
        return clustered(tally.incorrect, tally.sizes, self.confidence, self.interval)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tally:
    """Outcomes of some trials in one unit: ``classes[i, o]`` units of trial i ended as `Outcome` o; int64[trials, 7]."""

    classes: NDArray[np.int64]

    @property
    def incorrect(self) -> NDArray[np.int64]:
        """Incorrect units a trial."""
        wrong: NDArray[np.int64] = self.classes[:, Outcome.SDC :].sum(1)
        return wrong

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Units a trial."""
        units: NDArray[np.int64] = self.classes.sum(1)
        return units

    @property
    def silent(self) -> float | None:
        """Share of the incorrect units that are silent; None where none is incorrect."""
        wrong = int(self.incorrect.sum())
        return float(self.classes[:, Outcome.SDC].sum()) / wrong if wrong else None

    def totals(self) -> dict[str, int]:
        """Units by class name over all trials."""
        sums = self.classes.sum(0)
        return {o.name.lower(): int(sums[o]) for o in Outcome}

    @classmethod
    def of(cls, rows: Sequence[TrialRow], samples: Sequence[int], unit: str) -> Tally:
        """Count trials; a batch ends as the worst of its samples (due over sdc over benign over masked)."""
        codes = np.frombuffer(b"".join(r.codes for r in rows), np.uint8).reshape(len(rows), sum(samples))
        if unit == "batch":
            starts = np.concatenate([[0], np.cumsum(samples)[:-1]])
            codes = np.maximum.reduceat(codes, starts, axis=1) if len(rows) else codes[:, : len(samples)]
        return cls(np.stack([(codes == o).sum(1) for o in Outcome], axis=1).astype(np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Tally]) -> Tally:
        """Several tallies as one."""
        return cls(np.concatenate([p.classes for p in parts]))


def analyse(store: Store, question: Question) -> PvfResult:
    """Everything a report shows, from a store alone."""
    spec, description = store.spec, store.description
    grouped: dict[tuple[str, int | None], list[TrialRow]] = {}
    for row in store.rows():
        grouped.setdefault((row.trial.target, row.trial.flips), []).append(row)
    tallies = {key: Tally.of(rows, description.samples, question.unit) for key, rows in grouped.items()}
    empty = Tally(np.zeros((0, len(Outcome)), np.int64))
    rows: list[PvfRow] = []
    for flips in spec.flips:
        strata = [(t, tallies.get((t.name, flips), empty)) for t in description.targets]
        rows += _direct_and_rolled_up(strata, flips, question)
    hits = [hit for rs in grouped.values() for hit in single_hits(rs, description)]
    if spec.per == "component" and 1 in spec.flips:
        rows += _layers_by_hits([h for h in hits if h.row.trial.flips == 1], description, question)
    budget, command = store.budget()
    seconds, cpu = store.usage()
    return PvfResult(
        workload=spec.workload,
        info=description.info,
        fault=spec.fault,
        at=" ".join(spec.at),
        per=spec.per,
        law=spec.law,
        unit=question.unit,
        judge=description.judge,
        seed=spec.seed,
        confidence=question.confidence,
        command=command,
        store=str(store.path),
        campaign=description.campaign,
        samples=sum(description.samples),
        batches=len(description.samples),
        trials_done=sum(len(r) for r in grouped.values()),
        trials_planned=budget * len(description.targets) * len(spec.flips),
        seconds=seconds,
        cpu_seconds=cpu,
        golden_seconds=description.golden_seconds,
        versions=description.versions,
        device=description.fingerprint.get("device", spec.device),
        dtype=spec.dtype
        or Counter(t.dtype for t in description.tensors for _ in range(t.elements > 0)).most_common(1)[0][0],
        threads=spec.threads,
        rows=tuple(rows),
        heat_map=heat_map(hits, description, question.unit),
        lookups=lookup_rows(hits, description, question.unit, question.confidence, question.interval),
        notes=(*description.notes, *_notes(rows)),
    )


def _row(
    name: str,
    level: str,
    parent: str,
    flips: int | None,
    tally: Tally,
    interval: Interval,
    question: Question,
    size: tuple[int, int],
    silent: float | None = None,
) -> PvfRow:
    totals = tally.totals()
    silent = tally.silent if silent is None else silent
    due = {o.name.lower(): totals[o.name.lower()] for o in Outcome if o.due}
    return PvfRow(
        target=name,
        level=level,
        parent=parent,
        flips=flips,
        estimate=interval.estimate,
        low=interval.low,
        high=interval.high,
        confidence=question.confidence,
        n=len(tally.classes),
        unit=question.unit,
        units=int(tally.sizes.sum()),
        masked=totals["masked"],
        benign=totals["benign"],
        sdc=totals["sdc"],
        due=sum(due.values()),
        due_kinds=due,
        elements=size[0],
        bits=size[1],
        method=interval.method,
        silent_share=silent,
        incorrect_trials=int((tally.incorrect > 0).sum()),
    )


Strata = list[tuple[TargetInfo, Tally]]


def _direct_and_rolled_up(strata: Strata, flips: int | None, question: Question) -> list[PvfRow]:
    """Rows of the targets themselves, of what they belong to, and of the model."""
    intervals = {t.name: question.estimate(tally) for t, tally in strata}
    rows = [_group("model", "model", "", strata, intervals, flips, question)]
    level = strata[0][0].level
    if level != "component":
        for name in dict.fromkeys(t.component for t, _ in strata):
            members = [(t, y) for t, y in strata if t.component == name]
            rows.append(_group(name, "component", "", members, intervals, flips, question))
    if level in ("tensor", "bit"):
        for name in dict.fromkeys(t.layer for t, _ in strata):
            members = [(t, y) for t, y in strata if t.layer == name]
            rows.append(_group(name, "layer", members[0][0].component, members, intervals, flips, question))
    for target, tally in strata:
        parent = {"component": "", "layer": target.component}.get(level, target.layer)
        size = target.elements, target.bits
        rows.append(_row(target.name, level, parent, flips, tally, intervals[target.name], question, size))
    return rows


def _group(
    name: str,
    level: str,
    parent: str,
    members: Strata,
    intervals: dict[str, Interval],
    flips: int | None,
    question: Question,
) -> PvfRow:
    total = sum(t.share for t, _ in members)
    interval = combine(
        [t.share / total for t, _ in members], [intervals[t.name] for t, _ in members], question.confidence
    )
    # Elements of bit targets are the same ones again at every position.
    bits = sum(t.bits for t, _ in members)
    elements = sum(t.elements for t, _ in members if t.level != "bit" or t.name.endswith("/bit0"))
    wrong = {t.name: t.share * (intervals[t.name].estimate or 0.0) for t, _ in members}
    silent = (
        sum(wrong[t.name] * (y.silent or 0.0) for t, y in members) / sum(wrong.values())
        if any(wrong.values())
        else None
    )
    return _row(
        name, level, parent, flips, Tally.joined(y for _, y in members), interval, question, (elements, bits), silent
    )


def _layers_by_hits(hits: list[SingleHit], description: Description, question: Question) -> list[PvfRow]:
    """Layer rows of a campaign per component: the trials whose one fault fell in that layer.

    Given the layer that was hit, such a trial is a uniform draw from it, so the estimate is fair; its n is whatever chance gave.
    """
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for tensor in description.tensors:
        key = (tensor.component, tensor.layer)
        elements, bits = sizes.get(key, (0, 0))
        sizes[key] = elements + tensor.elements, bits + tensor.elements * tensor.width
    rows = []
    for (component, layer), size in sizes.items():
        mine = [h.row for h in hits if (h.tensor.component, h.tensor.layer) == (component, layer)]
        tally = Tally.of(mine, description.samples, question.unit)
        interval = question.estimate(tally)
        rows.append(_row(layer, "layer", component, 1, tally, interval, question, size))
    return rows if hits else []


def _notes(rows: Sequence[PvfRow]) -> list[str]:
    notes = []
    rare = dict.fromkeys(r.target for r in rows if r.level == "component" and 0 < r.incorrect_trials < FEW)
    if rare:
        notes.append(
            f"Fewer than {FEW} faults gave an incorrect output in some rows ({', '.join(rare)}): "
            "their intervals may cover less than they say; run more trials."
        )
    return notes
