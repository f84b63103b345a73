"""Defines the kind of campaign that ``unsilent coverage`` runs, and the checks of its stored records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unsilent.basics.lazy_module import LazyFunction
from unsilent.campaigns.campaign_run import DryRun
from unsilent.campaigns.codec import Shape
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.store import Store
from unsilent.campaigns.stored_values import DamagedRecordError
from unsilent.replicas.spec import MOST_STEPS
from unsilent.studies.coverage.spec import (
    CHANGES,
    ENDS,
    FOLLOWED,
    GOLDEN,
    MOST_FOLLOWED,
    RECORDED,
    CoverageAnalysisOptions,
    CoverageBaseline,
    CoverageBudget,
    CoverageRow,
    CoverageSpec,
    make_coverage_spec,
    parse_clean_target,
)
from unsilent.workloads.zoo import TRAININGS

ABOUT = """Measure which detection rules of a monitor find which faults of a training, and their false alarms.

Records the signals of faulty steps of each class of severity, and applies every rule to the recordings. Reports detection,
latency, false alarms and cost, in tables and an HTML report. Resumable: the same command continues where it stopped.
"""
MOST_SERIES, MOST_RULES, MOST_CELL_BYTES = 100_000, 10_000, 2**30


def check_spec(spec: CoverageSpec) -> None:
    """Raise ``DamagedRecordError`` if the settings have impossible numbers."""
    if not 1 <= spec.follow <= MOST_FOLLOWED:
        raise DamagedRecordError("its spec has an impossible number of steps to follow")


def check_baseline(baseline: CoverageBaseline) -> None:
    """Raise ``DamagedRecordError`` if the baseline has impossible numbers."""
    counts = 1 <= baseline.steps <= MOST_STEPS and 1 <= len(baseline.series) <= MOST_SERIES
    if not counts or not baseline.targets or not baseline.golden_seconds > 0 or {*baseline.changes} - {*CHANGES}:
        raise DamagedRecordError("its description has impossible numbers, or names no target")


def accepts_trial(trial: TrialId, spec: CoverageSpec, targets: frozenset[str]) -> bool:
    """Whether a trial can belong to a campaign, including the golden run and fault-free runs."""
    return trial.flips is None and (
        trial == GOLDEN or trial.target in targets or parse_clean_target(trial.target) is not None
    )


def array_shapes(baseline: CoverageBaseline, values: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Expected shapes of the arrays of a row; raises ``DamagedRecordError``."""
    from unsilent.studies.coverage.scoring import BINS

    steps, series, count = values["steps"], len(baseline.series), _rule_count(values["rules"])
    most = baseline.steps if values["end"] == RECORDED else MOST_FOLLOWED if values["end"] == FOLLOWED else 0
    if values["end"] not in ENDS or not 0 <= steps <= most or not 0 <= values["injection"].step < baseline.steps:
        raise DamagedRecordError("has an impossible end, step or number of steps")
    return {"signals": (steps, series), "seen": (steps, series), "events": (count, 4), "scores": (count, BINS)}


def _rule_count(text: str) -> int:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or len(names) > MOST_RULES or not all(isinstance(name, str) for name in names):
        raise DamagedRecordError("has impossible names of rules")
    return len(names)


def check_row(row: CoverageRow, baseline: CoverageBaseline) -> None:
    """Raise ``DamagedRecordError`` if a row has impossible counts."""
    if (row.events < 0).any() or (row.scores < 0).any() or (row.seen > 1).any():
        raise DamagedRecordError("has impossible counts")


COVERAGE = Kind(
    name="coverage",
    application_id=0x556E7377,  # "Unsw"
    schema_version=2,
    spec=CoverageSpec,
    baseline=CoverageBaseline,
    row=CoverageRow,
    runner=LazyFunction("unsilent.studies.coverage.runner:CoverageRunner"),
    check_spec=check_spec,
    check_baseline=check_baseline,
    check_row=check_row,
    shapes=array_shapes,
    accepts_trial=accepts_trial,
    is_planned_trial=lambda trial: trial != GOLDEN and parse_clean_target(trial.target) is None,
    max_cell_bytes=MOST_CELL_BYTES,
    shared_baseline_fields=("targets", "series", "steps"),
    analyse=LazyFunction("unsilent.studies.coverage.analysis:analyse", CoverageAnalysisOptions),
    report=LazyFunction("unsilent.studies.coverage.report:report"),
    builtin_values={"workload": TRAININGS},
    command_help=ABOUT,
    budget=CoverageBudget,
    analysis_options=CoverageAnalysisOptions,
    resolve_spec=make_coverage_spec,
    run=LazyFunction("unsilent.studies.coverage.study:run_coverage"),
    dry_run=DryRun(notes=LazyFunction("unsilent.studies.coverage.study:dry_run_notes")),
    example_arguments="train-resnet --trials 20",
)


class CoverageStore(Store[CoverageSpec, CoverageBaseline, CoverageRow]):
    """An open store of a coverage campaign."""

    kind = COVERAGE
