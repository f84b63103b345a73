"""PVF, the *parameter* vulnerability factor: P(incorrect output | corruption of that parameter), estimated as D / N.

Source: Jiao et al., arXiv 2405.01741 (the acronym also means program vulnerability factor, which is something else).
"Incorrect" is judged against the golden output. This module asks the campaign and hands back records; what they are
computed from is in `unsilent.studies.pvf.analysis`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from unsilent.argument_names import names_arguments
from unsilent.campaigns import Budget, TrialId, WorkerSettings, run_campaign
from unsilent.campaigns.driver import MOST_PLANNED, run_trials
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer, Silent
from unsilent.campaigns.options import EngineOptions, store_or_temporary
from unsilent.errors import UsageError
from unsilent.options import Asked
from unsilent.outcomes.pvf_options import PvfAnalysisOptions
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.report.text import count_text
from unsilent.sizes import rough_duration_text
from unsilent.studies.pvf.analysis import analyse
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.precision import Precision, PrecisionPlanner
from unsilent.studies.pvf.records import PvfResult
from unsilent.studies.pvf.spec import PvfBaseline, PvfBudget, PvfSpec, make_pvf_spec

if TYPE_CHECKING:
    from unsilent.faults import FaultModel
    from unsilent.workloads.base import InferenceWorkload


TRIALS_FOR_DURATION = 16
"""Trials of each target that its time is estimated from."""


def run_pvf_campaign(
    spec: PvfSpec,
    budget: Budget,
    executor: Executor,
    store: PvfStore,
    question: PvfEstimator,
    observer: Observer | None = None,
    *,
    precision: Precision | None = None,
    command: str = "",
) -> PvfResult:
    """Run (or resume) a campaign and answer the question from its store; ``precision``: until all rows have it."""
    planner = None if precision is None else PrecisionPlanner(precision, question, budget.trials)
    if spec.is_enumerated:
        estimate_duration(spec, budget, executor, store, observer or Silent())
    run_campaign(spec, budget, executor, store, planner=planner, observer=observer, command=command)
    result = analyse(store, question)
    if planner is None or not planner.imprecise_rows:
        return result
    rows = ", ".join(planner.imprecise_rows)
    return replace(
        result,
        imprecise_rows=(
            f"--trials {budget.trials} is not enough for {precision}: the intervals of these rows are wider: {rows}; "
            "raise --trials",
        ),
    )


def estimate_duration(spec: PvfSpec, budget: Budget, executor: Executor, store: PvfStore, watcher: Observer) -> None:
    """Say how long all faults will take, from a few trials of each target; refuse what is more than can be stored."""
    baseline = cast(PvfBaseline, executor.establish_baseline())
    total = sum(t.slots for t in baseline.targets)
    if total > MOST_PLANNED:
        plain = total * baseline.golden_seconds
        raise UsageError(
            f"--exhaustive would run {total:,} trials (at most about {rough_duration_text(plain)} of CPU time), "
            f"but at most {MOST_PLANNED:,} are allowed; "
            "narrow it with --at or --fault bitflip:bits=30, or sample with --rel 20%"
        )
    store.bind_campaign(spec, baseline)
    begun = time.perf_counter()
    part, parts = budget.shard
    first = [
        TrialId(t.name, spec.flips[0], k)
        for t in baseline.targets
        for k in range(part - 1, t.slots, parts)[:TRIALS_FOR_DURATION]
    ]
    new = run_trials(first, executor, store, watcher)
    if new:
        each = (time.perf_counter() - begun) / new
        left = total // parts - len(first)
        watcher.say(
            f"{count_text(total, 'fault')}: about {rough_duration_text(max(0, left) * each)} left, {1e3 * each:.2g} ms per fault "
            f"(measured on {new})"
        )


@names_arguments
def pvf(
    workload: str | InferenceWorkload,
    *,
    trials: int | None = None,
    ci: float | str | None = None,
    rel: float | str | None = None,
    strata: str | None = None,
    shard: str | Sequence[int] = (1, 1),
    exhaustive: bool = False,
    samples: int | str | None = None,
    faults: str | Path | None = None,
    faults_as: str | None = None,
    flips: int | str | Sequence[int] | None = None,
    fault: str | FaultModel = "bitflip",
    at: str | Sequence[str] = ("param:*",),
    per: str = "component",
    law: str = "per-element",
    unit: str | None = None,
    confidence: float = 0.95,
    judge: str | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str | None = None,
    threads: int = 1,
    options: Mapping[str, object] | Sequence[str] = (),
    data: str | Path | None = None,
    weights: str | Path | None = None,
    jobs: int | None = None,
    executor: str | None = None,
    ray: str | None = None,
    deadline: float | None = None,
    engine: str = "auto",
    memory: int | str | None = None,
    store: str | Path | None = None,
    observer: Observer | None = None,
) -> PvfResult:
    """Parameter vulnerability of a workload: a PVF with its interval for every component, layer and number of flips.

    Arguments are the options of ``unsilent pvf``, by the same names and with the same defaults.

    Args:
        workload: A live workload (run in this process) or what the command line takes (run in worker
            processes, so that a crash or a hang is an outcome).
        trials: Per target and number of flips (default 1000), or the most there may be where ``ci`` or
            ``rel`` is given.
        ci, rel: Run until every row's interval has this half-width, or this one relative to its estimate.
        strata: ``bits`` draws within classes of bits (default where a precision is asked of single flips), ``none``.
        shard: Part I of N, as ``(2, 4)`` or ``"2/4"``.
        exhaustive: Every single bit flip there is.
        samples: How many samples each trial evaluates, drawn from one batch, or ``"all"``; default all, or with
            ``ci`` or ``rel`` what a pilot finds cheapest.
        faults: A file of given faults, each tried once, instead of drawn ones.
        faults_as: Its format, where it does not say so.
        flips: Faults per trial, default one.
        at: Where faults are injected: globs over parameters, or over what one evaluation computes (``op:*``,
            ``input:*``, ``kv:*``).
        per: What a target is: ``component``, ``layer``, ``tensor`` or ``bit``.
        law: ``per-element`` draws uniformly over elements, ``per-tensor`` over tensors first.
        unit: What one incorrect output is counted on, ``sample`` (default for parameters) or ``batch``
            (default else).
        options, data, weights: For a named workload, what ``--with``, ``--data`` and ``--weights`` give it.
        jobs: Worker processes of a named workload; default one less than there are cores, fewer if memory is short.
        executor, ray, deadline: Where a named workload runs, and seconds after which a trial hangs.
        engine: ``auto`` runs only what a fault changes, ``plain`` everything; rows are the same, bit for bit.
        memory: What all workers may hold for that, in bytes or as text (``"2GB"``); default a quarter of what
            is free.
        store: File to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit; the golden run is not finite or not repeatable.
        StoreError: the store cannot be used.
    """
    arguments = dict(locals())
    _check_arguments(workload, judge)
    live = not isinstance(workload, str)
    arguments["workload"] = workload if isinstance(workload, str) else workload.name
    asked = Asked.from_call(PVF.option_classes, arguments)
    question, wanted, worker_settings = (
        asked[PvfEstimator],
        asked[PvfBudget],
        asked[EngineOptions],
    )
    spec, budget = make_pvf_spec(asked), wanted.resolve()
    command = (asked.python_call if live else asked.command_line)("pvf", PvfBudget, PvfSpec, PvfAnalysisOptions)
    with ExitStack() as stack:
        running = stack.enter_context(_executor(spec, workload, worker_settings, observer))
        opened = stack.enter_context(PvfStore(stack.enter_context(store_or_temporary(store)), write=True))
        return run_pvf_campaign(
            spec, budget, running, opened, question, observer, precision=wanted.precision, command=command
        )


def _check_arguments(workload: object, judge: object) -> None:
    if not isinstance(workload, str) and not hasattr(workload, "batches"):
        raise UsageError(
            f"pvf needs a workload, found {type(workload).__name__}; wrap a model and inputs: unsilent.Workload(model, batches)"
        )
    if judge is not None and not isinstance(judge, str):
        raise UsageError(
            "judge= takes a name like 'topk:k=3'; pass a judge object or a function to the Workload instead"
        )


def _executor(
    spec: PvfSpec, workload: str | InferenceWorkload, worker_settings: EngineOptions, observer: Observer | None
) -> Executor:
    worker_settings.check()
    if isinstance(workload, str):
        return worker_settings.open_executor(spec, observer)
    if worker_settings.jobs not in (None, 1):
        raise UsageError(
            "a workload object runs in this process, so jobs must be 1; name it as 'file.py:name' to use more jobs"
        )
    return live_executor(spec, workload, observer, worker_settings.worker_settings)


def live_executor(
    spec: PvfSpec,
    workload: InferenceWorkload,
    observer: Observer | None = None,
    worker_settings: WorkerSettings | None = None,
) -> Executor:
    """Runs trials of a live workload, in this process."""
    from unsilent.campaigns.inline import InlineExecutor
    from unsilent.studies.pvf.runner import TrialRunner

    return InlineExecutor(
        spec,
        lambda progress, worker_settings: TrialRunner(spec, workload, progress, worker_settings),
        observer,
        worker_settings,
    )
