"""The study of corrupted checkpoints: noise floors, trials, and everything read from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unsilent.argument_names import names_arguments
from unsilent.campaigns.driver import run_campaign
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import Budget, ExecutionOptions, store_or_temporary
from unsilent.options import Asked
from unsilent.replicas import ReplicaSpec, ReplicaStore, Switches
from unsilent.replicas.noise_floor_records import NoiseFloors, store_noise_floors
from unsilent.replicas.noise_floors import run_noise_floors
from unsilent.studies.checkpoint.analysis import CheckpointResult, analyse
from unsilent.studies.checkpoint.kind import CHECKPOINT_STUDY, CheckpointStore
from unsilent.studies.checkpoint.spec import (
    CheckpointAnalysisOptions,
    CheckpointSpec,
    FloorOptions,
    make_checkpoint_spec,
)


@names_arguments
def checkpoint_study(
    workload: str,
    *,
    trials: int = 1000,
    shard: tuple[int, int] = (1, 1),
    strategy: str | Sequence[str] = ("single", "ddp"),
    ranks: int = 2,
    step: int | None = None,
    steps: int | None = None,
    section: str | Sequence[str] = ("weights", "first_moment", "second_moment"),
    fault: str = "bitflip",
    flips: Sequence[int] = (1, 10, 100),
    law: str = "per-element",
    loaded_by: str | Sequence[str] = ("all",),
    gap: float = 0.02,
    confidence: float = 0.95,
    replicas: int = 20,
    floor: str | Path | None = None,
    options: Mapping[str, object] | Sequence[str] = (),
    data: str | Path | None = None,
    seed: int = 0,
    init: int = 0,
    jobs: int | None = None,
    executor: str | None = None,
    ray: str | None = None,
    deadline: float | None = None,
    store: str | Path | None = None,
    observer: Observer | None = None,
) -> CheckpointResult:
    """What corrupted checkpoints do to the trainings that resume from them.

    Arguments are the options of ``unsilent checkpoint study``, by the same names and with the same defaults.

    Args:
        workload: A built-in training, ``file.py:name`` or ``package.module:name``.
        options, data: Of the workload.
        trials, shard: Of each target (strategy, section, way to load) and number of flips.
        strategy, ranks: How the training is distributed.
        step, steps, init: When the checkpoint is saved, how long the training is, and its seed.
        section, fault, flips, law, loaded_by: What is corrupted, and which ranks load it.
        gap, confidence: How resumes are judged.
        replicas, floor: Fault-free runs of each noise floor, and the file that keeps them (default none).
        store: File to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit. StoreError: the store cannot be used.
    """
    asked = Asked.from_call(CHECKPOINT_STUDY.option_classes, dict(locals()))
    spec, budget, reading, execution = (
        make_checkpoint_spec(asked),
        asked[Budget],
        asked[CheckpointAnalysisOptions],
        asked[ExecutionOptions],
    )
    execution.check()
    with (
        store_or_temporary(store) as path,
        store_or_temporary(floor, "floor.sqlite") as fault_free,
        CheckpointStore(path, write=True) as opened,
    ):
        floors = measure_floors(spec, replicas, fault_free, jobs, observer)
        with execution.open_executor(spec, observer) as running:
            return run_study(
                spec, budget, running, opened, floors, reading, observer=observer,
                command=asked.command_line(
                    "checkpoint study", Budget, CheckpointSpec, CheckpointAnalysisOptions, FloorOptions
                ),
            )  # fmt: skip


def run_study(
    spec: CheckpointSpec,
    budget: Budget,
    executor: Executor,
    store: CheckpointStore,
    floors: NoiseFloors,
    options: CheckpointAnalysisOptions,
    *,
    observer: Observer | None = None,
    command: str = "",
) -> CheckpointResult:
    """Run (or resume) a campaign and judge its trials by the floors; raises ``UsageError``."""
    run_campaign(spec, budget, executor, store, observer=observer, command=command)
    store_noise_floors(store, floors)
    return analyse(store, options)


def measure_floors(
    spec: CheckpointSpec, replicas: int, path: Path, jobs: int | None, observer: Observer | None = None
) -> NoiseFloors:
    """Both noise floors of the training in one process, from fault-free runs that ``path`` keeps."""
    with ReplicaStore(path, write=True) as opened:
        return run_noise_floors(
            replica_spec(spec), opened, Switches.parse("impl"), replicas, jobs=jobs, observer=observer
        )


def replica_spec(spec: CheckpointSpec) -> ReplicaSpec:
    """The fault-free runs that the noise floors are measured on."""
    return ReplicaSpec(spec.workload, spec.options, spec.data, spec.init, spec.steps)
