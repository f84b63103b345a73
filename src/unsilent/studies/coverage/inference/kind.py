"""Defines the kind of campaign that ``unsilent inference-coverage`` runs, and the checks of its stored records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsilent.basics.lazy_module import LazyFunction
from unsilent.basics.lazy_numpy import np
from unsilent.basics.options import Request
from unsilent.campaigns.campaign_run import DryRun
from unsilent.campaigns.codec import Shape
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.options import EngineOptions
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.store import Store
from unsilent.campaigns.stored_values import DamagedRecordError
from unsilent.studies.coverage.inference.spec import (
    CLEAN_TARGETS,
    ENDS,
    ERROR_MODELS,
    FOUND,
    JUDGED,
    MOST_TRIES,
    RUNGS,
    TIMED,
    TIMED_BATCHES,
    TIMING,
    InferenceCoverageBaseline,
    InferenceCoverageBudget,
    InferenceCoverageOptions,
    InferenceCoverageRow,
    InferenceCoverageSpec,
    make_inference_spec,
)
from unsilent.workloads.zoo import ZOO

ABOUT = """Measure which detectors find which faults of an inference, and their false alarms."""
MOST_SAMPLES, MOST_LAYERS, MOST_DETECTORS, MOST_CELL_BYTES = 10**7, 10**5, 1000, 2**30


def check_spec(spec: InferenceCoverageSpec) -> None:
    """Raise ``DamagedRecordError`` if the settings have impossible numbers."""
    if not 1 <= spec.tries <= MOST_TRIES or not 0 < spec.flip_rate <= 1:
        raise DamagedRecordError("its spec has an impossible number of tries or rate of flips")


def check_baseline(baseline: InferenceCoverageBaseline) -> None:
    """Raise ``DamagedRecordError`` if the baseline has impossible numbers."""
    detectors = baseline.detectors
    layers = [len(detector.layers) for detector in detectors]
    if not 1 <= len(detectors) <= MOST_DETECTORS or min(layers) < 1 or sum(layers) > MOST_LAYERS:
        raise DamagedRecordError("its description has impossible numbers of detectors or layers")
    if any(len(detector.flops) != len(detector.layers) or detector.nbytes < 0 for detector in detectors):
        raise DamagedRecordError("its description has a detector of impossible numbers")
    if not baseline.samples or min(baseline.samples) < 1 or sum(baseline.samples) > MOST_SAMPLES:
        raise DamagedRecordError("its description has an impossible number of samples")
    counts = [baseline.clean_trials.get(part, 0) for part in CLEAN_TARGETS]
    if not baseline.targets or not baseline.golden_seconds > 0 or min(counts) < 1 or baseline.model_bytes < 1:
        raise DamagedRecordError("its description has impossible numbers, or names no target")


def accepts_trial(trial: TrialId, spec: InferenceCoverageSpec, targets: frozenset[str]) -> bool:
    """Whether a trial can belong to a campaign, including trials of clean samples and of timing."""
    return trial.flips is None and (trial == TIMING or trial.target in targets or trial.target in CLEAN_TARGETS)


def array_shapes(baseline: InferenceCoverageBaseline, values: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Expected shapes of the arrays of a row; raises ``DamagedRecordError``."""
    end, samples, changed = values["end"], values["samples"], values["changed"]
    if end not in ENDS or changed > samples or samples > MOST_SAMPLES or values["batch"] >= len(baseline.samples):
        raise DamagedRecordError("has an impossible end, batch or number of samples")
    if end == FOUND and (samples != baseline.samples[values["batch"]] or not changed):
        raise DamagedRecordError("has an impossible number of samples")
    detectors, layers = len(baseline.detectors), sum(len(detector.layers) for detector in baseline.detectors)
    margins: Shape = (layers, changed) if end == FOUND else (detectors, samples) if end == JUDGED else 0
    return {
        "flags": samples if end == FOUND else 0,
        "margins": margins,
        "originals": samples if end == JUDGED else 0,
        "restored": (len(RUNGS), changed) if end == FOUND else 0,
        "rung_seconds": len(RUNGS) if end == FOUND else 0,
        "times": (1 + detectors, len(TIMED_BATCHES)) if end == TIMED else 0,
    }


def check_row(row: InferenceCoverageRow, baseline: InferenceCoverageBaseline) -> None:
    """Raise ``DamagedRecordError`` if a row has impossible flags, margins or times."""
    if (row.flags > 1).any() or (row.restored > 1).any() or int(row.flags.sum()) != row.changed * (row.end == FOUND):
        raise DamagedRecordError("has impossible flags")
    if np.isnan(row.margins).any() or (row.rung_seconds < 0).any():
        raise DamagedRecordError("has a margin that is NaN, or a negative time")


def check_options(request: Request, spec: InferenceCoverageSpec) -> None:
    """Raise ``UsageError`` if there are too few clean samples for the rate of false alarms."""
    from unsilent.studies.coverage.inference.scoring import check_clean_samples

    check_clean_samples(spec.clean_samples, request[InferenceCoverageOptions].rate)


INFERENCE_COVERAGE = Kind(
    name="inference-coverage",
    application_id=0x556E7379,  # "Unsy"
    schema_version=4,
    spec=InferenceCoverageSpec,
    baseline=InferenceCoverageBaseline,
    row=InferenceCoverageRow,
    runner=LazyFunction("unsilent.studies.coverage.inference.runner:InferenceCoverageRunner"),
    check_spec=check_spec,
    check_baseline=check_baseline,
    check_row=check_row,
    shapes=array_shapes,
    accepts_trial=accepts_trial,
    is_planned_trial=lambda trial: trial.target in ERROR_MODELS,
    max_cell_bytes=MOST_CELL_BYTES,
    shared_baseline_fields=("targets", "detectors", "samples", "clean_trials"),
    analyse=LazyFunction("unsilent.studies.coverage.inference.analysis:analyse", InferenceCoverageOptions),
    report=LazyFunction("unsilent.studies.coverage.inference.report:report"),
    builtin_values={"workload": ZOO},
    command_help=ABOUT,
    budget=InferenceCoverageBudget,
    analysis_options=InferenceCoverageOptions,
    execution_options=EngineOptions,
    resolve_spec=make_inference_spec,
    check_options=check_options,
    run=LazyFunction("unsilent.studies.coverage.inference.study:run_inference_coverage"),
    dry_run=DryRun(notes=LazyFunction("unsilent.studies.coverage.inference.study:dry_run_notes")),
    example_arguments="digits-cnn --trials 50",
)


class InferenceCoverageStore(Store[InferenceCoverageSpec, InferenceCoverageBaseline, InferenceCoverageRow]):
    """An open store of an inference coverage campaign."""

    kind = INFERENCE_COVERAGE
