"""From stored trials to estimates: everything a report shows, computed from a store alone.

Every estimate carries an interval that knows that one fault is scored on many samples; sums over targets are weighted by
their share of the sampling law (`statistics.stratified`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from unsilent.campaigns.spec import CampaignSpec, Description, TrialRow
from unsilent.campaigns.store import Store
from unsilent.outcomes.base import Outcome
from unsilent.studies.hits import dtypes, heat_maps, lookup_rows, single_hits
from unsilent.studies.records import PvfResult, PvfRow
from unsilent.studies.rows import Group, layer_groups, make_rows, strata_groups
from unsilent.studies.tallies import Question, Tally


def analyse(store: Store, question: Question) -> PvfResult:
    """Everything a report shows, from a store alone."""
    spec, description = store.spec, store.description
    question = question.of(spec.transient)
    grouped: dict[tuple[str, int | None], list[TrialRow]] = {}
    for row in store.rows():
        grouped.setdefault((row.trial.target, row.trial.flips), []).append(row)
    unit = question.unit or "sample"
    tallies = {key: Tally.of(rows, description.samples, unit) for key, rows in grouped.items()}
    empty = Tally(np.zeros((0, len(Outcome)), np.int64))
    groups: list[Group] = []
    for flips in spec.flips:
        groups += strata_groups([(t, tallies.get((t.name, flips), empty)) for t in description.targets], flips)
    hits = [hit for rs in grouped.values() for hit in single_hits(rs, description)]
    if spec.per == "component" and 1 in spec.flips:
        groups += layer_groups([h for h in hits if h.row.trial.flips == 1], description, question)
    rows = make_rows(groups, question)
    budget, asked = store.budget()
    command = (
        " ".join([asked, *_reading(question, Question().of(spec.transient))])
        if asked.startswith("unsilent ")
        else asked
    )
    seconds, cpu = store.usage()
    return PvfResult(
        workload=spec.workload,
        info=description.info,
        fault=spec.fault,
        at=" ".join(spec.at),
        per=spec.per,
        law=spec.law,
        unit=unit,
        judge=description.judge,
        seed=spec.seed,
        confidence=question.confidence,
        spec=spec.to_json(),
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
        dtype=_dtype(spec, description),
        threads=spec.threads,
        rows=tuple(rows),
        heat_maps=heat_maps(hits, description, unit),
        lookups=lookup_rows(hits, description, unit, question.confidence),
        transient=spec.transient,
        notes=(*description.notes, *_notes(rows, spec.transient)),
    )


def _dtype(spec: CampaignSpec, description: Description) -> str:
    """What a reader is told: the dtype of the model's numbers, or all that were struck among values of a run."""
    struck = dtypes(description)
    if spec.transient:
        return " and ".join(filter(None, (", ".join(struck[:-1]), struck[-1])))
    return spec.dtype or struck[0]


def _reading(question: Question, usual: Question) -> list[str]:
    """Options that ask this question of a store, where it is not the usual one."""
    known = asdict(usual)
    return [f"--{key} {value}" for key, value in asdict(question).items() if value != known[key]]


def _notes(rows: Sequence[PvfRow], transient: bool) -> list[str]:
    notes = []
    if (
        not transient
        and rows
        and all(r.masked == r.units for r in rows)
        and sum(r.n for r in rows if r.level == "model") >= 50
    ):
        notes.append("No fault changed a single bit of any output: check that run() uses the model that it is given.")
    return notes
