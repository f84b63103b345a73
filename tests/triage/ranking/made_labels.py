"""Labelled incidents of three causes and none, in ranks and steps that a generator draws; queries are executed and graded."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import numpy as np

from triage import made_triage as made
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.farm.labelled import GradedQuery, LabelledIncident
from unsilent.triage.farm.naming import HEALTHY
from unsilent.triage.farm.planned import PlannedIncident
from unsilent.triage.findings import FindingKind, Outcome
from unsilent.triage.possible_queries import possible_queries
from unsilent.triage.queries.table import execute
from unsilent.triage.ranking.model import train
from unsilent.triage.runbook import signals_of

CAUSES = {"NaN": FindingKind.NONFINITE, "scaled": FindingKind.GRADIENT, "batch": FindingKind.BATCH, HEALTHY: None}
TEMPLATES = {"NaN": "scan-nonfinite", "scaled": "compare-gradients", "batch": "inspect-batch"}
WORDS = {
    "NaN": "the loss became nan",
    "scaled": "gradients of a rank jumped",
    "batch": "strange samples",
    HEALTHY: "all is slow",
}

ROOT = tempfile.TemporaryDirectory()  # removed as the process ends
ROOT_PATH = Path(ROOT.name)


def incident(root, cause, number, place):
    """One incident; its number seeds rank and size, its place is that in the collection."""
    rng = np.random.default_rng([number, 7])
    ranks = int(rng.choice([2, 4]))
    rank = int(rng.integers(ranks))
    step, series, batches = int(rng.integers(88, 91)), {}, {}
    if cause == "NaN":
        series[rank] = made.spoiled(rank, step, 0, math.nan)
    elif cause == "scaled":
        series[rank] = made.spoiled(rank, step, 0, 10 ** rng.uniform(2, 9))
    elif cause == "batch":
        batches[rank] = [[made.batch(rank)[0][0] * 1e9, made.batch(rank)[0][1]]]
    if cause in ("batch", HEALTHY):  # a large loss: a finding that is nothing where there is no cause
        series[rank] = made.spoiled(rank, step, 2, 30.0)
    path = made.folder(root / f"{cause}-{number}", ranks, series, batches, alarms={rank: (made.alarm(90, rank),)})
    (path / "report.txt").write_text(WORDS[cause])
    bundle = Bundle(path)
    planned = PlannedIncident(place, cause, "nothing" if cause == HEALTHY else cause, "mlp", ranks, rank, step, 0, ())
    graded = tuple(
        _graded(bundle, one.query, CAUSES[cause], rank) for one in possible_queries(bundle, candidates_of(bundle))
    )
    return LabelledIncident(planned, path, str(number), graded)


def _graded(bundle, query, kind, rank):
    finding = execute(bundle, query)
    is_found = finding.outcome in (Outcome.DIFFERS, Outcome.LOCALISED) and kind is not None
    is_place = is_found and finding.ranks == (rank,)
    grade = 3 if is_place and finding.kind is kind else 2 if is_place else int(is_found)
    return GradedQuery(query, grade, finding.outcome, finding.kind, not is_found, 0.01)


@functools.cache
def collection(count=6, first=0):
    """So many of each cause, made once a process."""
    root = ROOT_PATH / f"{first}"
    each = [(cause, number) for number in range(first, first + count) for cause in CAUSES]
    return [incident(root, *one, place) for place, one in enumerate(each)]


@functools.cache
def model():
    """Trained on the collection, once a process."""
    return train(collection(), 0)


def signals(labelled):
    bundle = Bundle(labelled.folder)
    return signals_of(bundle, candidates_of(bundle))
