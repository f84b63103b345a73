"""Runs the study of corrupted checkpoints: noise floors, trials, and the analysis of the store."""

from __future__ import annotations

from unsilent.campaigns.campaign_run import CampaignRun
from unsilent.campaigns.python_function import campaign_function
from unsilent.replicas import ReplicaSpec
from unsilent.replicas.noise_floor_records import store_noise_floors
from unsilent.replicas.noise_floors import FLOOR, measure_noise_floors, noise_floor_note
from unsilent.studies.checkpoint.analysis import CheckpointResult
from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY
from unsilent.studies.checkpoint.spec import CheckpointSpec, FloorOptions


def run_checkpoint_study(run: CampaignRun) -> CheckpointResult:
    """Measure the noise floors, run or resume a campaign, and judge its trials.

    The noise floors are measured on the training in one process.
    """
    options = run.request[FloorOptions]
    floors = measure_noise_floors(run, replica_spec(run.spec), "impl", options.replicas, options.floor)
    with run.open_executor() as (executor, observer):
        run.run_planned_trials(executor, observer)
    store_noise_floors(run.store, floors)
    result: CheckpointResult = run.analyse()
    return result


def dry_run_notes(run: CampaignRun, *_: object) -> list[str]:
    """Notes for a dry run about the work that is done besides the trials."""
    return [noise_floor_note(run.request[FloorOptions].replicas)]


def replica_spec(spec: CheckpointSpec) -> ReplicaSpec:
    """The settings of the fault-free runs that the noise floors are measured on."""
    return ReplicaSpec(spec.workload, spec.options, spec.data, spec.init, spec.steps)


checkpoint_study = campaign_function(
    CHECKPOINT_STUDY,
    CheckpointResult,
    "What corrupted checkpoints do to the trainings that resume from them.",
    further=(FLOOR,),
)
