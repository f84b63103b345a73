"""Runs the study of faulty training runs: trials, guarded trials, and the analysis of the store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.campaigns.campaign_run import CampaignRun
from unsilent.campaigns.driver import run_trials
from unsilent.campaigns.python_function import campaign_function
from unsilent.campaigns.replay import replay_trial
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.trial_replay import TrialReplay
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.replicas.noise_floor_records import NoiseFloors, store_noise_floors, stored_floors
from unsilent.replicas.noise_floors import FLOOR, LEVEL, check_twin, measure_noise_floors, noise_floor_note
from unsilent.report.text import count_text, upper_bound_text
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.judging import (
    EXAMPLES,
    TrainingJudge,
    backward_against_forward,
    convergence_limits,
    flip_flop_rates,
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
    ReferenceRunOptions,
    TrainingAnalysisOptions,
    TrainingBaseline,
    TrainingRow,
    row_without_curves,
)
from unsilent.workloads.base import UNNAMED


def run_training(run: CampaignRun) -> TrainingResult:
    """Measure the noise floors, run or resume a campaign, and analyse its store."""
    compared, spec = run.request[ReferenceRunOptions], replica_spec(run.spec)
    floors = measure_noise_floors(run, spec, compared.noise, compared.replicas, compared.floor)
    if compared.horizon is not None:
        run = replace(run, spec=replace(run.spec, horizon=horizon_from_floor(floors.implementation, compared.horizon)))
    return run_with_floors(run, floors)


def run_with_floors(run: CampaignRun, floors: NoiseFloors) -> TrainingResult:
    """Run or resume a campaign with given noise floors, and analyse its store.

    With ``--guard``, trials that ended different run again under the guard. Raises ``UsageError`` if the floors belong to another
    training.
    """
    store, reading = run.store, run.request[TrainingAnalysisOptions]
    with run.open_executor() as (executor, observer):
        baseline = executor.establish_baseline()
        assert isinstance(baseline, TrainingBaseline)
        check_twin(baseline.name, baseline.losses, floors)
        store.bind_campaign(run.spec, baseline)
        store_noise_floors(store, floors)
        run.run_planned_trials(executor, observer)
        if run.request[ReferenceRunOptions].guard:
            judge = TrainingJudge(baseline, floors, reading.thresholds)
            different = [judged.row.trial for judged in map(judge.judge, sampled_rows(store)) if judged.is_different]
            run_trials([t._replace(target=GUARDED_PREFIX + t.target) for t in different], executor, store, observer)
    return read_training(store, reading)


def dry_run_notes(run: CampaignRun, *_: object) -> Iterator[str]:
    """Notes for a dry run about the work that is done besides the trials."""
    options = run.request[ReferenceRunOptions]
    yield noise_floor_note(options.replicas)
    if options.guard:
        yield "trials that differ from the golden run beyond noise run again under the guard"
        yield "the time estimate does not include runs under the guard"


def sampled_rows(store: TrainingStore) -> Iterator[TrainingRow]:
    """The rows of trials in which a fault was injected, without those under the guard."""
    sampled = (row for row in store.rows() if not row.trial.target.startswith(GUARDED_PREFIX))
    return (row for row in sampled if row.end_reason != NOT_INJECTED)


def required_noise_floors(store: TrainingStore) -> NoiseFloors:
    """Both noise floors of a store; raises ``UsageError`` if one is missing."""
    floors = stored_floors(store)
    if floors is None:
        raise UsageError(
            f"{store.path} lacks a noise floor (it needs fault-free replicas of implementation noise and of other seeds); "
            "run again the command that made it, which adds the missing runs"
        )
    return floors


def read_training(store: TrainingStore, reading: TrainingAnalysisOptions) -> TrainingResult:
    """The result of a store.

    Raises ``UsageError`` if the store has no trial or lacks a noise floor.
    """
    # Long because the result has many fields, each on its own line.
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
        judged = judge.judge(row)
        name = str(judged.outcome)
        trials.append(judged)
        if len(curves.setdefault(name, [])) < EXAMPLES and row.steps_run:
            curves[name].append(judge.example_curve(row, judged))
    if not trials:
        raise UsageError(f"{store.path} has no trial yet; run again the command that made it")
    guarded = {
        row.unguarded_trial(): row_without_curves(row)
        for row in store.rows(omit_arrays=("losses", "metric"))
        if row.trial.target.startswith(GUARDED_PREFIX)
    }
    confidence = reading.confidence
    where = condition_points(trials, baseline)
    seconds, cpu_seconds = store.total_session_seconds()
    shown = [c for some in curves.values() for c in some]
    return TrainingResult(
        workload=_training_name(baseline.name, spec.workload),
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
        flip_flops=flip_flop_rates(trials, baseline, confidence),
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


def _training_name(name: str, workload: str) -> str:
    """The name of the training; file and function if it has no name."""
    path, colon, function = workload.rpartition(":")
    return name if name != UNNAMED else PurePath(path).name + colon + function


def _notes(spared: Sequence[TrainingRow], judge: TrainingJudge) -> Iterator[str]:
    if spared:
        yield (
            f"{count_text(len(spared), 'trial')} ran without a fault, because the operation to corrupt does not run in every "
            f"step: {spared[0].error}"
        )
    if not judge.has_step_accuracy:
        yield "Steps of this training report no accuracy, so degradation is judged by held-out accuracy alone (low-test)."


def _classes(trials: Sequence[JudgedTrial], confidence: float) -> tuple[ClassShare, ...]:
    """The share of every class; a class that did not occur has an upper limit."""
    counts = Counter(trial.outcome for trial in trials)
    different = Counter(trial.outcome for trial in trials if trial.is_different)
    return tuple(
        ClassShare(
            str(outcome), counts[outcome], different[outcome], clopper_pearson(counts[outcome], len(trials), confidence)
        )
        for outcome in TrainingOutcome
    )


def _parts(
    trials: Sequence[JudgedTrial], baseline: TrainingBaseline, floors: NoiseFloors, reading: TrainingAnalysisOptions
) -> tuple[TrainingPvfRow, ...]:
    """The training PVF of each target: the share of trials that end in a convergence failure."""
    confidence = reading.confidence
    limits = convergence_limits(baseline.test_accuracy, floors, reading.margin)
    targets = {target.name: target for target in baseline.targets}
    parts = []
    for group in group_trials_by(trials, lambda trial: trial.row.trial.target, confidence):
        target = targets[group.name]
        mine = [trial for trial in trials if trial.row.trial.target == group.name]
        failures = [sum(has_not_converged(trial, least) for trial in mine) for least in limits]
        shares = (clopper_pearson(count, group.n, confidence) for count in failures)
        parts.append(
            TrainingPvfRow(group.name, target.memory_kind, target.part, target.elements, group.n, failures[0], *shares)
        )
    order = list(targets)
    return tuple(sorted(parts, key=lambda part: order.index(part.target)))


def has_not_converged(trial: JudgedTrial, least: float) -> bool:
    """Whether a run died, lost its finite loss, or ended below ``least`` in held-out accuracy."""
    return not trial.row.test_accuracy >= least


def cost(trials: Sequence[JudgedTrial], baseline: TrainingBaseline) -> TrialCost:
    """The mean cost of a trial, relative to a full run."""
    rows = [trial.row for trial in trials]
    seconds = float(np.mean([row.seconds for row in rows]))
    return TrialCost(
        steps=float(np.mean([row.steps_run for row in rows])) / baseline.steps,
        steps_without_early_end=float(np.mean([baseline.steps - row.injection.step for row in rows])) / baseline.steps,
        seconds=seconds / baseline.golden_seconds,
        per_hour=3600 / seconds if seconds else math.inf,
        end_reasons=dict(Counter(row.end_reason for row in rows)),
    )


def replay_training_trial(
    store: TrainingStore, trial: TrialId, confirmed: Mapping[str, str | None], options: Collection[tuple[str, str]] = ()
) -> TrialReplay[TrainingRow]:
    """Run a stored trial again; see `unsilent.campaigns.replay.replay_trial`.

    A trial under the guard has no class.
    """
    result, floors = replay_trial(store, trial, confirmed, options), stored_floors(store)
    if floors is None or trial.target.startswith(GUARDED_PREFIX):
        return result
    return replay_with_outcome(result, TrainingJudge(store.baseline, floors, Thresholds()))


def replay_with_outcome(result: TrialReplay[TrainingRow], judge: TrainingJudge) -> TrialReplay[TrainingRow]:
    """A replay with the class of its trial and a description of what was injected."""
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


training = campaign_function(
    TRAINING,
    TrainingResult,
    "What faults in single steps do to a training: how each faulty run ends, compared with fault-free ones.",
    further=(FLOOR,),
)
