"""Defines the kind of campaign that ``unsilent training`` runs, and the checks of its stored records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unsilent.basics.lazy_module import LazyFunction
from unsilent.campaigns.campaign_run import DryRun
from unsilent.campaigns.codec import Shape
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.store import Store
from unsilent.campaigns.stored_values import MOST_NOTES, MOST_THREADS, DamagedRecordError
from unsilent.faults.hardware import SHIPPED
from unsilent.replicas.noise_floor_records import FLOOR, are_numbers, parse_noise_floor
from unsilent.replicas.spec import MOST_STEPS
from unsilent.studies.training.spec import (
    END_REASONS,
    GUARDED_END_REASONS,
    GUARDED_PREFIX,
    HISTORY_KINDS,
    OBSERVED_END_REASONS,
    WATCHED_STEPS,
    ReferenceRunOptions,
    TrainingAnalysisOptions,
    TrainingBaseline,
    TrainingBudget,
    TrainingRow,
    TrainingSpec,
    make_training_spec,
)
from unsilent.workloads.zoo import TRAININGS

ABOUT = """Inject faults into single training steps and classify how each run ends.

Each trial continues the fault-free run from a random step. Reports outcome classes, what predicts harm, and training PVF, in
tables and an HTML report. Resumable: the same command continues where it stopped; more --trials extend it.
"""
MOST_AGAIN = 100
"""Maximum number of steps that a guarded run executes, as a multiple of the steps of a run."""


def check_spec(spec: TrainingSpec) -> None:
    """Raise ``DamagedRecordError`` if the settings have impossible numbers."""
    if spec.horizon is not None:
        h = spec.horizon
        if h.steps < 1 or h.window < 1 or not h.loss or not are_numbers((*h.loss, h.test), least=0):
            raise DamagedRecordError("its spec has an impossible horizon")
    if not 1 <= spec.threads <= MOST_THREADS:
        raise DamagedRecordError("its spec has an impossible number of threads")
    if not all(math.isfinite(weight) and weight > 0 for _, weight in spec.faults):
        raise DamagedRecordError("its spec has a fault model with an impossible weight")


def check_training_baseline(baseline: TrainingBaseline) -> None:
    """Raise ``DamagedRecordError`` if the baseline has impossible numbers or curves of different lengths."""
    lengths = {
        len(values) for values in (baseline.epochs, baseline.losses, baseline.metric, baseline.history_magnitudes)
    }
    if not baseline.targets or not 1 <= baseline.steps <= MOST_STEPS or lengths != {baseline.steps}:
        raise DamagedRecordError("its description names no target, or has curves of unequal lengths")
    right = are_numbers(
        (*baseline.losses, *baseline.metric, baseline.test_accuracy, baseline.test_loss)
    ) and are_numbers((baseline.golden_seconds, *(weight for _, weight in baseline.models)), least=0)
    watched = all(
        len(row) == len(HISTORY_KINDS) and are_numbers([x for x in row if x is not None], least=0)
        for row in baseline.history_magnitudes
    )
    right = right and len(baseline.notes) <= MOST_NOTES
    if not right or not watched or baseline.samples < 1 or baseline.parameters < 0 or not baseline.golden_seconds > 0:
        raise DamagedRecordError("its description has impossible numbers")


def is_possible_trial(trial: TrialId, spec: TrainingSpec, targets: frozenset[str]) -> bool:
    """Whether a trial can belong to a campaign, including ``guarded:`` trials."""
    return trial.flips is None and trial.target.removeprefix(GUARDED_PREFIX) in targets


def training_array_shapes(baseline: TrainingBaseline, values: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Expected shapes of the arrays of a row; raises ``DamagedRecordError``."""
    step, ran, reason = values["injection"].step, values["steps_run"], values["end_reason"]
    if reason not in END_REASONS or not 0 <= step < baseline.steps:
        raise DamagedRecordError("has an impossible injection step or end reason")
    followed = reason in OBSERVED_END_REASONS
    # A guard repeats steps, in a short training several times.
    least, most = (1, baseline.steps - step) if followed else (0, MOST_AGAIN * baseline.steps)
    if not least <= ran <= most:
        raise DamagedRecordError("has an impossible length")
    count = ran if followed else 0
    return {"losses": count, "metric": count, "history_magnitudes": (min(count, WATCHED_STEPS), len(HISTORY_KINDS))}


def check_row(row: TrainingRow, baseline: TrainingBaseline) -> None:
    """Raise ``DamagedRecordError`` if the end reason of a row is impossible for its target."""
    if row.end_reason in (OBSERVED_END_REASONS if row.trial.target.startswith(GUARDED_PREFIX) else GUARDED_END_REASONS):
        raise DamagedRecordError("has an end reason that is impossible for its target")


TRAINING = Kind(
    name="training",
    application_id=0x556E7374,  # "Unst"
    schema_version=6,
    spec=TrainingSpec,
    baseline=TrainingBaseline,
    row=TrainingRow,
    runner=LazyFunction("unsilent.studies.training.runner:TrainingRunner"),
    check_spec=check_spec,
    check_baseline=check_training_baseline,
    check_row=check_row,
    shapes=training_array_shapes,
    accepts_trial=is_possible_trial,
    is_planned_trial=lambda trial: not trial.target.startswith(GUARDED_PREFIX),
    record_readers={FLOOR: parse_noise_floor},
    shared_baseline_fields=("targets", "steps", "epochs", "losses", "metric"),
    analyse=LazyFunction("unsilent.studies.training.study:read_training", TrainingAnalysisOptions),
    report=LazyFunction("unsilent.studies.training.report:report"),
    compare=LazyFunction("unsilent.studies.training.comparison:compare_stores"),
    builtin_values={"workload": TRAININGS, "accelerator": SHIPPED},
    replay=LazyFunction("unsilent.studies.training.study:replay_training_trial"),
    command_help=ABOUT,
    budget=TrainingBudget,
    analysis_options=TrainingAnalysisOptions,
    further_option_classes=(ReferenceRunOptions,),
    resolve_spec=make_training_spec,
    late_fields=("horizon",),
    run=LazyFunction("unsilent.studies.training.study:run_training"),
    dry_run=DryRun(notes=LazyFunction("unsilent.studies.training.study:dry_run_notes")),
    example_arguments="train-resnet --trials 100",
)


class TrainingStore(Store[TrainingSpec, TrainingBaseline, TrainingRow]):
    """An open store of a training campaign."""

    kind = TRAINING
