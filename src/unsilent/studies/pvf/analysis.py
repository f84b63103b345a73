"""From stored trials to estimates: everything a report shows, computed from a store alone.

Every estimate carries an interval that knows that one fault is scored on many samples; sums over targets are weighted by
their share of the sampling law (`statistics.stratified`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath

from unsilent.campaigns.merging import without_shard
from unsilent.errors import StoreError
from unsilent.statistics.looks import confidence_at
from unsilent.studies.pvf.hits import dtypes, heat_maps, lookup_rows, single_hits
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.records import PvfResult, PvfRow
from unsilent.studies.pvf.rows import Group, layer_groups, make_rows, target_groups
from unsilent.studies.pvf.spec import CampaignSpec, Description
from unsilent.studies.pvf.stored import Stored
from unsilent.studies.pvf.tallies import Question


def analyse(store: PvfStore, question: Question) -> PvfResult:
    """Everything a report shows, from a store alone; raises ``StoreError`` where it holds what no campaign writes."""
    try:
        return _analysed(store, question)
    except (KeyError, IndexError, OverflowError, ZeroDivisionError) as error:  # its parts do not fit together
        raise StoreError(
            f"the store is damaged: what it holds does not fit together ({type(error).__name__}: {error}); use a copy"
        ) from error


def _analysed(store: PvfStore, question: Question) -> PvfResult:
    spec, description = store.spec, store.description
    question = question.of(spec.transient)
    unit = question.unit or "sample"
    stored = Stored(store, unit)
    groups: list[Group] = []
    for flips in spec.flips:
        groups += target_groups(stored, flips)
    hits = [hit for rows in stored.rows.values() for hit in single_hits(rows, description)]
    counting = [hit for hit in hits if stored.counts(hit.row)]
    if spec.per == "component" and 1 in spec.flips:
        groups += layer_groups([h for h in counting if h.row.trial.flips == 1], stored)
    rows = make_rows(groups, question)
    asked = store.budget()[1]
    planned = PVF.size(store)
    if stored.trials >= planned:  # all parts are there, whichever of them this store was asked for last
        asked = without_shard(asked)
    command = (
        " ".join([asked, *reading(question, Question().of(spec.transient))]) if asked.startswith("unsilent ") else asked
    )
    seconds, cpu = store.usage()
    return PvfResult(
        workload=spec.workload,
        info=description.info,
        fault=spec.fault if spec.faults is None else f"{spec.fault} {PurePath(spec.faults).name}",
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
        trials_done=stored.trials,
        trials_planned=planned,
        seconds=seconds,
        cpu_seconds=cpu,
        golden_seconds=description.golden_seconds,
        versions=description.versions,
        device=description.fingerprint.get("device", spec.device),
        dtype=dtype_of(spec, description),
        threads=spec.threads,
        rows=tuple(rows),
        heat_maps=heat_maps(hits, description, unit),
        lookups=()
        if spec.strata == "risk" or spec.faults is not None  # such trials are not uniform over rows
        else lookup_rows(counting, description, unit, _over_looks(stored, question.confidence)),
        transient=spec.transient,
        notes=(*description.notes, *_notes(rows, spec.transient)),
    )


def _over_looks(stored: Stored, confidence: float) -> float:
    """Confidence of an interval of its own, where a campaign may have stopped at any look."""
    looks = [plan.look for plan in stored.plans.values() if plan.first]
    return confidence_at(max(looks), confidence) if looks else confidence


def dtype_of(spec: CampaignSpec, description: Description) -> str:
    """What a reader is told: the dtype of the model's numbers, or all that were struck among values of a run."""
    struck = dtypes(description)
    if spec.transient:
        return " and ".join(filter(None, (", ".join(struck[:-1]), struck[-1])))
    return spec.dtype or struck[0]


def reading(question: Question, usual: Question) -> list[str]:
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
