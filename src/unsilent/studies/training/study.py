"""The study of faulty training runs: trials, the guard where it is asked for, and everything read from the store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np

from unsilent.campaigns.driver import run_campaign, run_trials
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import Budget, ExecutionOptions, kept
from unsilent.campaigns.replay import Replay, replay_trial, run_again
from unsilent.campaigns.spec import TrialId
from unsilent.errors import UsageError
from unsilent.options import Asked
from unsilent.outcomes.training import Thresholds, TrainingOutcome
from unsilent.replicas import ReplicaStore, Switches
from unsilent.report.text import counted
from unsilent.statistics.intervals import clopper_pearson
from unsilent.studies.training.conditions import conditions, points, saved
from unsilent.studies.training.handcrafted import EXAMPLE_CANDIDATES
from unsilent.studies.training.judging import (
    EXAMPLES,
    LEVEL,
    Judge,
    backward_against_forward,
    check_twin,
    group,
    grouped,
    groups_of,
    horizon_of,
    least_accuracies,
    run_floors,
)
from unsilent.studies.training.kind import TRAINING, Floors, TrainingStore, note_floors, stored_floors
from unsilent.studies.training.records import ClassShare, Cost, Curve, Judged, Part, TrainingResult
from unsilent.studies.training.spec import (
    GUARDED,
    MADE,
    NOT_INJECTED,
    PHASES,
    ComparisonOptions,
    Reading,
    TrainingBaseline,
    TrainingBudget,
    TrainingRow,
    TrainingSpec,
    bare,
    resolve,
)

NAMELESS = "custom"
"""The name that a training of the user's has where none was given."""


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
    jobs: int = 1,
    executor: str | None = None,
    ray: str | None = None,
    deadline: float | None = None,
    store: str | Path | None = None,
    observer: Observer | None = None,
) -> TrainingResult:
    """What faults in single steps do to a training: how each faulty run ends, compared with fault-free ones.

    Arguments are the options of ``unsilent training``, by the same names and with the same defaults.

    Args:
        workload: a built-in training, ``file.py:name`` or ``package.module:name``. options, data: of the workload.
        trials: faulty runs, of each target with ``per``. steps, init: of a run, and the seed of the training itself.
        fault, accelerator, value, phase, layer, per, moment: which faults are injected, and where.
        horizon, replicas, noise, floor: when a run counts as masked; the fault-free runs, and the file that keeps them (default
            none). threshold, confidence, margin: how runs are judged. guard: run different trials again under the guard.
        store: file to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit. StoreError: the store cannot be used.
    """
    asked = Asked.in_call(TRAINING.options, dict(locals()))
    spec, budget, reading = resolve(asked), asked.make(TrainingBudget), asked.make(Reading)
    compared, means = asked.make(ComparisonOptions), asked.make(ExecutionOptions)
    means.check()
    with kept(store) as path, kept(floor, "floor.sqlite") as fault_free, TrainingStore(path, write=True) as opened:
        floors, spec = find_floors(spec, compared, fault_free, jobs)
        with means.open(spec, observer) as running:
            return run_training(
                spec, budget, running, opened, floors, reading, observer=observer,
                command=asked.command("training", TrainingBudget, TrainingSpec, Reading, ComparisonOptions),
            )  # fmt: skip


def find_floors(
    spec: TrainingSpec, compared: ComparisonOptions, path: Path, jobs: int, observer: Observer | None = None
) -> tuple[Floors, TrainingSpec]:
    """Both noise floors, from fault-free runs that ``path`` keeps, and the spec with the horizon that follows from them."""
    switches = Switches.parse(compared.noise)
    with ReplicaStore(path, write=True) as opened:
        floors = run_floors(spec, opened, switches, compared.replicas, jobs=jobs, observer=observer)
    if compared.horizon is None:
        return floors, spec
    return floors, replace(spec, horizon=horizon_of(floors.implementation, compared.horizon))


def run_training(
    spec: TrainingSpec,
    budget: Budget,
    executor: Executor,
    store: TrainingStore,
    floors: Floors,
    reading: Reading,
    *,
    guard: bool = False,
    observer: Observer | None = None,
    command: str = "",
) -> TrainingResult:
    """Run (or resume) a campaign, with ``guard`` its different trials again under the guard, and read what was found.

    Raises ``UsageError`` where the floors are not of this training.
    """
    baseline = executor.describe()
    assert isinstance(baseline, TrainingBaseline)
    check_twin(baseline, floors)
    store.bind(spec, baseline)
    note_floors(store, floors)
    run_campaign(spec, budget, executor, store, observer=observer, command=command)
    if guard:
        judge = Judge(baseline, floors, reading.thresholds)
        different = [one.row.trial for one in map(judge.judge, drawn(store)) if one.different]
        run_trials([t._replace(target=GUARDED + t.target) for t in different], executor, store, observer)
    return read_training(store, reading)


def drawn(store: TrainingStore) -> Iterator[TrainingRow]:
    """The trials of the campaign itself: not those under the guard or made by hand, and those alone that were corrupted."""
    own = (row for row in store.rows() if not row.trial.target.startswith((GUARDED, MADE)))
    return (row for row in own if row.reason != NOT_INJECTED)


def floors_of(store: TrainingStore) -> Floors:
    """Both noise floors; raises ``UsageError`` where one is missing."""
    floors = stored_floors(store)
    if floors is None:
        raise UsageError(
            f"{store.path} lacks a noise floor (it needs fault-free replicas of implementation noise and of other seeds); "
            "run the command that made it again, which runs what is missing"
        )
    return floors


def read_training(store: TrainingStore, reading: Reading) -> TrainingResult:
    """Everything from the store alone; raises ``UsageError`` where it has no trial or lacks a floor."""
    baseline, spec, floors = store.description, store.spec, floors_of(store)
    judge = Judge(baseline, floors, reading.thresholds)
    trials: list[Judged] = []
    spared: list[TrainingRow] = []
    curves: dict[str, list[Curve]] = {}
    made: dict[str, Curve] = {}
    for row in store.rows():
        if row.reason == NOT_INJECTED:
            spared.append(row)
        if row.trial.target.startswith(GUARDED) or row.reason == NOT_INJECTED:
            continue
        one = judge.judge(row)
        name = str(one.outcome)
        if row.trial.target.startswith(MADE):
            if row.trial.target == MADE + _asked(name):
                made.setdefault(name, judge.curve(row, one, made=True))
            continue
        trials.append(one)
        if len(curves.setdefault(name, [])) < EXAMPLES and row.steps_run:
            curves[name].append(judge.curve(row, one))
    if not trials:
        raise UsageError(f"{store.path} has no trial yet; run the command that made it again")
    guarded = {
        row.unguarded(): bare(row)
        for row in store.rows(without=("losses", "metric"))
        if row.trial.target.startswith(GUARDED)
    }
    confidence = reading.confidence
    where = points(trials, baseline)
    seconds, cpu_seconds = store.usage()
    shown = [*(c for own in curves.values() for c in own), *(c for name, c in made.items() if not curves.get(name))]
    return TrainingResult(
        workload=_named(baseline.name, spec.workload),
        command=store.budget()[1],
        spec=spec.to_json(),
        campaign=baseline.campaign,
        store=str(store.path),
        steps=baseline.steps,
        samples=baseline.samples,
        parameters=baseline.parameters,
        optimizers=baseline.optimizers,
        golden_test=baseline.test,
        golden_seconds=baseline.golden_seconds,
        confidence=confidence,
        thresholds=reading.thresholds,
        floors=floors,
        level=LEVEL,
        n=len(trials),
        classes=_classes(trials, confidence),
        whole=group("all", trials, confidence),
        groups=groups_of(trials, baseline, confidence),
        contrasts=tuple(backward_against_forward(trials, confidence)),
        curves=tuple(sorted(shown, key=lambda c: list(TrainingOutcome).index(TrainingOutcome(c.outcome)))),
        conditions=conditions(trials, where, confidence),
        points=where,
        parts=_parts(trials, baseline, floors, reading) if spec.per is not None else (),
        margin=reading.margin,
        cost=cost(trials, baseline),
        guard=saved(trials, guarded, confidence),
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


def _notes(spared: Sequence[TrainingRow], judge: Judge) -> Iterator[str]:
    if spared:
        yield f"{counted(len(spared), 'trial')} without a fault, as its operation does not run in each step: {spared[0].error}"
    if not judge.told_accuracy:
        yield "Steps of this training report no accuracy, so degradation is judged by held-out accuracy alone (low-test)."


def _asked(outcome: str) -> str:
    """What ``--example`` calls a class."""
    return "masked" if outcome.startswith("masked") else outcome


def _classes(trials: Sequence[Judged], confidence: float) -> tuple[ClassShare, ...]:
    """One for each class that there is, those that did not occur with their upper limits."""
    counts = Counter(one.outcome for one in trials)
    different = Counter(one.outcome for one in trials if one.different)
    return tuple(
        ClassShare(
            str(outcome), counts[outcome], different[outcome], clopper_pearson(counts[outcome], len(trials), confidence)
        )
        for outcome in TrainingOutcome
    )


def _parts(trials: Sequence[Judged], baseline: TrainingBaseline, floors: Floors, reading: Reading) -> tuple[Part, ...]:
    """Training PVF: the share of trials of each target that end in a convergence failure."""
    confidence = reading.confidence
    limits = least_accuracies(baseline.test, floors, reading.margin)
    targets = {target.name: target for target in baseline.targets}
    parts = []
    for own in grouped(trials, lambda one: one.row.trial.target, confidence):
        target = targets[own.name]
        mine = [one for one in trials if one.row.trial.target == own.name]
        failures = [sum(failed(one, least) for one in mine) for least in limits]
        shares = (clopper_pearson(count, own.n, confidence) for count in failures)
        parts.append(Part(own.name, target.what, target.part, target.elements, own.n, failures[0], *shares))
    order = list(targets)
    return tuple(sorted(parts, key=lambda part: order.index(part.target)))


def failed(one: Judged, least: float) -> bool:
    """A convergence failure: the run died, lost its loss, or ended below ``least`` on held-out samples."""
    return not one.row.test >= least


def cost(trials: Sequence[Judged], baseline: TrainingBaseline) -> Cost:
    """What trials cost, as shares of a full run."""
    rows = [one.row for one in trials]
    seconds = float(np.mean([row.seconds for row in rows]))
    return Cost(
        steps=float(np.mean([row.steps_run for row in rows])) / baseline.steps,
        bound=float(np.mean([baseline.steps - row.injection.step for row in rows])) / baseline.steps,
        seconds=seconds / baseline.golden_seconds,
        per_hour=3600 / seconds if seconds else math.inf,
        ends=dict(Counter(row.reason for row in rows)),
    )


def example(
    wanted: str, executor: Executor, store: TrainingStore, reading: Reading, observer: Observer | None = None
) -> Replay[TrainingRow]:
    """One instance of a class, run again; raises ``UsageError`` where neither a trial nor a fault made by hand ends so."""
    judge = Judge(store.description, floors_of(store), reading.thresholds)
    row = next((r for r in drawn(store) if _asked(str(judge.judge(r).outcome)) == wanted), None)
    tried = 0
    while row is None:
        if tried == len(EXAMPLE_CANDIDATES[wanted]):
            raise UsageError(
                f"no trial of {store.path} ends in {wanted}, and none of {tried} faults made by hand either; run more "
                "--trials, or another training"
            )
        trial = TrialId(MADE + wanted, None, tried)
        run_trials([trial], executor, store, observer)
        tried += 1
        made = store.row(trial)
        row = made if _asked(str(judge.judge(made).outcome)) == wanted else None
    return described(Replay(row, run_again(executor, row.trial)), judge, tried)


def replay_one(
    store: TrainingStore, trial: TrialId, given: Mapping[str, str | None], options: Collection[tuple[str, str]] = ()
) -> Replay[TrainingRow]:
    """Run a stored trial again; see `unsilent.campaigns.replay.replay_trial`. What ran under the guard has no class."""
    result, floors = replay_trial(store, trial, given, options), stored_floors(store)
    if floors is None or trial.target.startswith(GUARDED):
        return result
    return described(result, Judge(store.description, floors, Thresholds()))


def described(result: Replay[TrainingRow], judge: Judge, tried: int = 0) -> Replay[TrainingRow]:
    """The replay with its class, and what was injected; ``tried``: faults made by hand until one ended in that class."""
    row, by_hand = result.stored, result.stored.trial.target.startswith(MADE)
    curve = judge.curve(row, judge.judge(row))
    others = f", after {tried - 1} others that ended in another class" if tried else ""
    losses = ", ".join("not finite" if x is None else f"{x:.3g}" for x in curve.losses[:6])
    test = "not reached" if curve.test is None else f"{100 * curve.test:.2f} %"
    parts = (
        f"{curve.outcome} ({f'made by hand{others}' if by_hand else 'from the campaign'})",
        f"{curve.told}: wrote up to {row.injected_max:.3g} where {row.reference_max:.3g} was the largest",
        f"losses from that step on: {losses} …; held-out accuracy at the end: {test}",
        f"ended: {row.reason}, after {counted(row.steps_run, 'step')}{f' ({row.error})' if row.error else ''}",
    )
    data = {"class": curve.outcome, "made_by_hand": by_hand, "tried": tried, "golden": list(curve.golden)}
    return replace(result, told=parts, data=data)
