"""The study of faulty training runs: trials, the guard where it is asked for, and everything read from the store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np

from unsilent.argument_names import names_arguments
from unsilent.campaigns.driver import run_campaign, run_trials
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import Budget, ExecutionOptions, store_or_temporary
from unsilent.campaigns.replay import TrialReplay, replay_trial
from unsilent.campaigns.spec import TrialId
from unsilent.errors import UsageError
from unsilent.options import Asked
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.replicas import ReplicaStore, Switches
from unsilent.replicas.noise_floor_records import NoiseFloors, store_noise_floors, stored_floors
from unsilent.replicas.noise_floors import LEVEL, check_twin, run_noise_floors
from unsilent.report.text import count_text, upper_bound_text
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.judging import (
    EXAMPLES,
    TrainingJudge,
    backward_against_forward,
    convergence_limits,
    group_trials_by,
    groups_by_attribute,
    horizon_from_floor,
    make_trial_group,
    replica_spec,
)
from unsilent.studies.training.kind import TRAINING, TrainingStore
from unsilent.studies.training.necessary_conditions import condition_points, guard_result, necessary_condition_tables
from unsilent.studies.training.records import (
    ClassShare,
    ExampleCurve,
    JudgedTrial,
    TrainingPvfRow,
    TrainingResult,
    TrialCost,
)
from unsilent.studies.training.spec import (
    GUARDED_PREFIX,
    NOT_INJECTED,
    PHASES,
    ReferenceRunOptions,
    TrainingAnalysisOptions,
    TrainingBaseline,
    TrainingBudget,
    TrainingRow,
    TrainingSpec,
    make_training_spec,
    row_without_curves,
)

NAMELESS = "custom"
"""The name that a training of the user's has where none was given."""


@names_arguments
def training(
    workload: str,
    *,
    trials: int = 200,
    fault: str | Sequence[str] = (),
    accelerator: str | None = None,
    value: str | None = None,
    phase: str | Sequence[str] = PHASES,
    layer: str | Sequence[str] = ("*",),
    per: str | None = None,
    moment: str = "start",
    steps: int | None = None,
    horizon: int | None = None,
    replicas: int = 20,
    noise: str = "impl",
    floor: str | Path | None = None,
    threshold: Mapping[str, float] | Sequence[str] = (),
    confidence: float = 0.95,
    margin: float = 0.02,
    guard: bool = False,
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
) -> TrainingResult:
    """What faults in single steps do to a training: how each faulty run ends, compared with fault-free ones.

    Arguments are the options of ``unsilent training``, by the same names and with the same defaults.

    Args:
        workload: A built-in training, ``file.py:name`` or ``package.module:name``.
        options, data: Of the workload.
        trials: Faulty runs, of each target with ``per``.
        steps, init: Of a run, and the seed of the training itself.
        fault, accelerator, value, phase, layer, per, moment: Which faults are injected, and where.
        horizon, replicas, noise, floor: When a run counts as masked; the fault-free runs, and the file that
            keeps them (default none).
        threshold, confidence, margin: How runs are judged.
        guard: Run different trials again under the guard.
        store: File to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit. StoreError: the store cannot be used.
    """
    asked = Asked.from_call(TRAINING.option_classes, dict(locals()))
    spec, budget, reading = (
        make_training_spec(asked),
        asked[TrainingBudget],
        asked[TrainingAnalysisOptions],
    )
    compared, execution = asked[ReferenceRunOptions], asked[ExecutionOptions]
    execution.check()
    with (
        store_or_temporary(store) as path,
        store_or_temporary(floor, "floor.sqlite") as fault_free,
        TrainingStore(path, write=True) as opened,
    ):
        floors, spec = floors_and_horizon(spec, compared, fault_free, jobs, observer)
        with execution.open_executor(spec, observer) as running:
            return run_training(
                spec, budget, running, opened, floors, reading, guard=compared.guard, observer=observer,
                command=asked.command_line(
                    "training", TrainingBudget, TrainingSpec, TrainingAnalysisOptions, ReferenceRunOptions
                ),
            )  # fmt: skip


def floors_and_horizon(
    spec: TrainingSpec, compared: ReferenceRunOptions, path: Path, jobs: int | None, observer: Observer | None = None
) -> tuple[NoiseFloors, TrainingSpec]:
    """Both noise floors, from fault-free runs that ``path`` keeps, and the spec with the horizon that follows from them."""
    switches = Switches.parse(compared.noise)
    with ReplicaStore(path, write=True) as opened:
        floors = run_noise_floors(replica_spec(spec), opened, switches, compared.replicas, jobs=jobs, observer=observer)
    if compared.horizon is None:
        return floors, spec
    return floors, replace(spec, horizon=horizon_from_floor(floors.implementation, compared.horizon))


def run_training(
    spec: TrainingSpec,
    budget: Budget,
    executor: Executor,
    store: TrainingStore,
    floors: NoiseFloors,
    reading: TrainingAnalysisOptions,
    *,
    guard: bool = False,
    observer: Observer | None = None,
    command: str = "",
) -> TrainingResult:
    """Run (or resume) a campaign, with ``guard`` its different trials again under the guard, and read what was found.

    Raises ``UsageError`` where the floors are not of this training.
    """
    baseline = executor.establish_baseline()
    assert isinstance(baseline, TrainingBaseline)
    check_twin(baseline.name, baseline.losses, floors)
    store.bind_campaign(spec, baseline)
    store_noise_floors(store, floors)
    run_campaign(spec, budget, executor, store, observer=observer, command=command)
    if guard:
        judge = TrainingJudge(baseline, floors, reading.thresholds)
        different = [one.row.trial for one in map(judge.judge, sampled_rows(store)) if one.is_different]
        run_trials([t._replace(target=GUARDED_PREFIX + t.target) for t in different], executor, store, observer)
    return read_training(store, reading)


def sampled_rows(store: TrainingStore) -> Iterator[TrainingRow]:
    """The trials of the campaign itself: not those under the guard, and those alone that were corrupted."""
    own = (row for row in store.rows() if not row.trial.target.startswith(GUARDED_PREFIX))
    return (row for row in own if row.end_reason != NOT_INJECTED)


def required_noise_floors(store: TrainingStore) -> NoiseFloors:
    """Both noise floors; raises ``UsageError`` where one is missing."""
    floors = stored_floors(store)
    if floors is None:
        raise UsageError(
            f"{store.path} lacks a noise floor (it needs fault-free replicas of implementation noise and of other seeds); "
            "run the command that made it again, which adds the missing runs"
        )
    return floors


def read_training(store: TrainingStore, reading: TrainingAnalysisOptions) -> TrainingResult:
    """Everything from the store alone; raises ``UsageError`` where it has no trial or lacks a floor."""
    baseline, spec, floors = store.baseline, store.spec, required_noise_floors(store)
    judge = TrainingJudge(baseline, floors, reading.thresholds)
    trials: list[JudgedTrial] = []
    spared: list[TrainingRow] = []
    curves: dict[str, list[ExampleCurve]] = {}
    for row in store.rows():
        if row.end_reason == NOT_INJECTED:
            spared.append(row)
        if row.trial.target.startswith(GUARDED_PREFIX) or row.end_reason == NOT_INJECTED:
            continue
        one = judge.judge(row)
        name = str(one.outcome)
        trials.append(one)
        if len(curves.setdefault(name, [])) < EXAMPLES and row.steps_run:
            curves[name].append(judge.example_curve(row, one))
    if not trials:
        raise UsageError(f"{store.path} has no trial yet; run the command that made it again")
    guarded = {
        row.unguarded_trial(): row_without_curves(row)
        for row in store.rows(omit_arrays=("losses", "metric"))
        if row.trial.target.startswith(GUARDED_PREFIX)
    }
    confidence = reading.confidence
    where = condition_points(trials, baseline)
    seconds, cpu_seconds = store.total_session_seconds()
    shown = [c for own in curves.values() for c in own]
    return TrainingResult(
        workload=_named(baseline.name, spec.workload),
        command=store.largest_budget()[1],
        spec=spec.to_json(),
        campaign=baseline.campaign,
        store=str(store.path),
        steps=baseline.steps,
        samples=baseline.samples,
        parameters=baseline.parameters,
        optimizers=baseline.optimizers,
        golden_test=baseline.test_accuracy,
        golden_seconds=baseline.golden_seconds,
        confidence=confidence,
        thresholds=reading.thresholds,
        floors=floors,
        level=LEVEL,
        n=len(trials),
        classes=_classes(trials, confidence),
        all_trials=make_trial_group("all", trials, confidence),
        groups=groups_by_attribute(trials, baseline, confidence),
        contrasts=tuple(backward_against_forward(trials, confidence)),
        curves=tuple(sorted(shown, key=lambda c: list(TrainingOutcome).index(TrainingOutcome(c.outcome)))),
        conditions=necessary_condition_tables(trials, where, confidence),
        points=where,
        parts=_parts(trials, baseline, floors, reading) if spec.per is not None else (),
        margin=reading.margin,
        cost=cost(trials, baseline),
        guard=guard_result(trials, guarded, confidence),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        versions=baseline.versions,
        info=baseline.info,
        notes=(*baseline.notes, *_notes(spared, judge)),
        golden_losses=baseline.losses,
    )


def _named(name: str, workload: str) -> str:
    """Of the training; of one without a name, file and function."""
    path, colon, function = workload.rpartition(":")
    return name if name != NAMELESS else PurePath(path).name + colon + function


def _notes(spared: Sequence[TrainingRow], judge: TrainingJudge) -> Iterator[str]:
    if spared:
        yield (
            f"{count_text(len(spared), 'trial')} ran without a fault, because the operation to corrupt does not run in every "
            f"step: {spared[0].error}"
        )
    if not judge.has_step_accuracy:
        yield "Steps of this training report no accuracy, so degradation is judged by held-out accuracy alone (low-test)."


def _classes(trials: Sequence[JudgedTrial], confidence: float) -> tuple[ClassShare, ...]:
    """One for each class that there is, those that did not occur with their upper limits."""
    counts = Counter(one.outcome for one in trials)
    different = Counter(one.outcome for one in trials if one.is_different)
    return tuple(
        ClassShare(
            str(outcome), counts[outcome], different[outcome], clopper_pearson(counts[outcome], len(trials), confidence)
        )
        for outcome in TrainingOutcome
    )


def _parts(
    trials: Sequence[JudgedTrial], baseline: TrainingBaseline, floors: NoiseFloors, reading: TrainingAnalysisOptions
) -> tuple[TrainingPvfRow, ...]:
    """Training PVF: the share of trials of each target that end in a convergence failure."""
    confidence = reading.confidence
    limits = convergence_limits(baseline.test_accuracy, floors, reading.margin)
    targets = {target.name: target for target in baseline.targets}
    parts = []
    for own in group_trials_by(trials, lambda one: one.row.trial.target, confidence):
        target = targets[own.name]
        mine = [one for one in trials if one.row.trial.target == own.name]
        failures = [sum(has_not_converged(one, least) for one in mine) for least in limits]
        shares = (clopper_pearson(count, own.n, confidence) for count in failures)
        parts.append(
            TrainingPvfRow(own.name, target.memory_kind, target.part, target.elements, own.n, failures[0], *shares)
        )
    order = list(targets)
    return tuple(sorted(parts, key=lambda part: order.index(part.target)))


def has_not_converged(one: JudgedTrial, least: float) -> bool:
    """A convergence failure: the run died, lost its loss, or ended below ``least`` on held-out samples."""
    return not one.row.test_accuracy >= least


def cost(trials: Sequence[JudgedTrial], baseline: TrainingBaseline) -> TrialCost:
    """What trials cost, as shares of a full run."""
    rows = [one.row for one in trials]
    seconds = float(np.mean([row.seconds for row in rows]))
    return TrialCost(
        steps=float(np.mean([row.steps_run for row in rows])) / baseline.steps,
        steps_without_early_end=float(np.mean([baseline.steps - row.injection.step for row in rows])) / baseline.steps,
        seconds=seconds / baseline.golden_seconds,
        per_hour=3600 / seconds if seconds else math.inf,
        end_reasons=dict(Counter(row.end_reason for row in rows)),
    )


def replay_training_trial(
    store: TrainingStore, trial: TrialId, given: Mapping[str, str | None], options: Collection[tuple[str, str]] = ()
) -> TrialReplay[TrainingRow]:
    """Run a stored trial again; see `unsilent.campaigns.replay.replay_trial`. What ran under the guard has no class."""
    result, floors = replay_trial(store, trial, given, options), stored_floors(store)
    if floors is None or trial.target.startswith(GUARDED_PREFIX):
        return result
    return replay_with_outcome(result, TrainingJudge(store.baseline, floors, Thresholds()))


def replay_with_outcome(result: TrialReplay[TrainingRow], judge: TrainingJudge) -> TrialReplay[TrainingRow]:
    """The replay with its class, and what was injected."""
    row = result.stored_row
    curve = judge.example_curve(row, judge.judge(row))
    losses = ", ".join("not finite" if x is None else f"{x:.3g}" for x in curve.losses[:6])
    test = "not reached" if curve.test_accuracy is None else f"{100 * curve.test_accuracy:.2f} %"
    parts = (
        curve.outcome,
        f"{curve.trial_description}: wrote values up to {upper_bound_text(row.injected_max)}; the largest value before was "
        f"{row.reference_max:.3g}",
        f"losses from the step of the fault on: {losses} …; held-out accuracy at the end: {test}",
        f"ended: {row.end_reason}, after {count_text(row.steps_run, 'step')}{f' ({row.error})' if row.error else ''}",
    )
    data = {"class": curve.outcome, "golden": list(curve.golden)}
    return replace(result, trial_sentences=parts, further_json=data)
