"""Defines the kind of campaign that ``unsilent checkpoint study`` runs, and the checks of its stored records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsilent.basics.lazy_module import LazyFunction
from unsilent.campaigns.campaign_run import DryRun
from unsilent.campaigns.codec import Shape
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.store import Store
from unsilent.campaigns.stored_values import DamagedRecordError
from unsilent.replicas.noise_floor_records import FLOOR, are_numbers, parse_noise_floor
from unsilent.studies.checkpoint.spec import (
    ENDS,
    FOLLOWED,
    LOADED_BY,
    SECTIONS,
    CheckpointAnalysisOptions,
    CheckpointBaseline,
    CheckpointRow,
    CheckpointSpec,
    FloorOptions,
    make_checkpoint_spec,
)
from unsilent.workloads.zoo import TRAININGS

ABOUT = """Corrupt bits of a checkpoint and measure what they do to the training that resumes from it.

Trains to a step under each strategy (one process, DDP, FSDP2), alters copies of the checkpoint, resumes from each, and compares
with the clean resume. Resumable: the same command continues where it stopped; more --trials extend it.
"""
MOST_STEPS = 10**7
MOST_EVALUATIONS = 10**4
MOST_RANKS = 1024


def check_baseline(baseline: CheckpointBaseline) -> None:
    """Raise ``DamagedRecordError`` if the baseline has impossible numbers or curves of different lengths."""
    steps = baseline.steps - baseline.step
    if not 1 <= baseline.step < baseline.steps <= MOST_STEPS or not baseline.resumes or not baseline.targets:
        raise DamagedRecordError("its description has impossible numbers of steps, or no target")
    strategies = {run.strategy for run in baseline.resumes}
    if len(strategies) < len(baseline.resumes) or {target.strategy for target in baseline.targets} - strategies:
        raise DamagedRecordError("its description names strategies that were not run")
    if any(target.section not in SECTIONS or target.loaded_by not in LOADED_BY for target in baseline.targets):
        raise DamagedRecordError("its description has a target of no known section, or loaded in no known way")
    for run in baseline.resumes:
        evaluations = {len(run.evaluated_at), len(run.accuracy), len(run.held_out_loss)}
        counts = {len(run.elements)} == {run.ranks} and {len(each) for each in run.elements} == {len(baseline.layers)}
        curves = {len(run.losses), len(run.metric)} == {steps} and len(evaluations) == 1 and bool(run.evaluated_at)
        fits = curves and counts and len(run.final_hashes) == run.ranks
        numbers = (*run.losses, *run.metric, *run.accuracy, *run.held_out_loss)
        if (
            not fits
            or not 1 <= run.ranks <= MOST_RANKS
            or not are_numbers(numbers)
            or any(min(each) < 0 for each in run.elements)
        ):
            raise DamagedRecordError("its description has an impossible fault-free resume")


def array_shapes(baseline: CheckpointBaseline, values: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Expected shapes of the arrays of a row; raises ``DamagedRecordError``."""
    end, steps, evaluations = values["end"], values["steps_run"], values["evaluations"]
    strategy = next((target.strategy for target in baseline.targets if target.name == values["trial"].target), "")
    ranks = next((run.ranks for run in baseline.resumes if run.strategy == strategy), 0)
    followed = end in FOLLOWED
    most = baseline.steps - baseline.step
    if end not in ENDS or not ranks or not (1 <= steps <= most if followed else steps == 0):
        raise DamagedRecordError("has an impossible end or length")
    if not (1 <= evaluations <= MOST_EVALUATIONS if followed else evaluations == 0):
        raise DamagedRecordError("has an impossible number of evaluations")
    counts = (evaluations, len(baseline.layers))
    return {
        "losses": steps, "metric": steps, "accuracy": evaluations, "held_out_loss": evaluations, "nonfinite": counts,
        "extreme": counts, "changed": (ranks, *counts),
    }  # fmt: skip


def check_row(row: CheckpointRow, baseline: CheckpointBaseline) -> None:
    """Raise ``DamagedRecordError`` if a row has impossible counts."""
    if not row.evaluations:
        return
    elements = baseline.resume(baseline.target(row.trial.target).strategy).elements
    too_many = any((counts > counted).any() for counts, counted in zip(row.changed, elements, strict=True))
    if (row.nonfinite < 0).any() or (row.extreme < 0).any() or (row.changed < -1).any() or too_many:
        raise DamagedRecordError("has impossible counts")


CHECKPOINT_STUDY = Kind(
    name="checkpoint-study",
    application_id=0x556E7363,  # "Unsc"
    schema_version=3,
    spec=CheckpointSpec,
    baseline=CheckpointBaseline,
    row=CheckpointRow,
    runner=LazyFunction("unsilent.studies.checkpoint.runner:CheckpointRunner"),
    check_baseline=check_baseline,
    check_row=check_row,
    shapes=array_shapes,
    record_readers={FLOOR: parse_noise_floor},
    shared_baseline_fields=("targets", "step", "steps"),
    analyse=LazyFunction("unsilent.studies.checkpoint.analysis:analyse", CheckpointAnalysisOptions),
    report=LazyFunction("unsilent.studies.checkpoint.report:report"),
    compare=LazyFunction("unsilent.studies.checkpoint.report:compare_stores"),
    builtin_values={"workload": TRAININGS},
    command="checkpoint study",
    command_help=ABOUT,
    analysis_options=CheckpointAnalysisOptions,
    further_option_classes=(FloorOptions,),
    resolve_spec=make_checkpoint_spec,
    run=LazyFunction("unsilent.studies.checkpoint.study:run_checkpoint_study"),
    dry_run=DryRun(
        fault_free_seconds=lambda baseline: max(run.seconds for run in baseline.resumes),
        notes=LazyFunction("unsilent.studies.checkpoint.study:dry_run_notes"),
    ),
    example_arguments="train-resnet --trials 20",
)


class CheckpointStore(Store[CheckpointSpec, CheckpointBaseline, CheckpointRow]):
    """An open store of a checkpoint study."""

    kind = CHECKPOINT_STUDY
