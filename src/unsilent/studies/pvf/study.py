"""Runs the PVF study: estimates P(incorrect output | corrupted parameter).

Source: Jiao et al., arXiv 2405.01741 (the acronym also means program vulnerability factor, which is something else).
"Incorrect" is judged against the golden output. This module runs the campaign and returns records, which
`unsilent.studies.pvf.analysis` computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unsilent.basics.errors import UsageError
from unsilent.basics.option_function import REQUIRED, Argument
from unsilent.basics.options import Request, options_of
from unsilent.basics.sizes import rough_duration_text
from unsilent.campaigns import Budget, TrialId, WorkerSettings
from unsilent.campaigns.campaign_run import CampaignRun, TrialNumbers, planned_trial_numbers
from unsilent.campaigns.driver import MOST_PLANNED, run_trials
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.expected_end import ExpectedEnd
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import EngineOptions
from unsilent.campaigns.python_function import campaign_function
from unsilent.campaigns.runner import WorkerJob
from unsilent.outcomes.tallies import PvfEstimator
from unsilent.report.text import count_text
from unsilent.studies.pvf.analysis import analyse, samples_of_trials
from unsilent.studies.pvf.kind import PVF, PvfStore
from unsilent.studies.pvf.precision import PrecisionPlanner
from unsilent.studies.pvf.records import PvfResult, samples_text
from unsilent.studies.pvf.row_scopes import StoredTrials
from unsilent.studies.pvf.spec import PvfBaseline, PvfBudget, PvfSpec

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload


TRIALS_FOR_DURATION = 16
"""Trials of each target from which the duration is estimated."""
FAULT = replace(Argument.of_option(options_of(PvfSpec)["fault"]), hint="str | FaultModel")
WORKLOAD = Argument(
    "workload",
    "str | InferenceWorkload",
    "A live workload (run in this process) or what the command line takes (run in worker processes, so that a crash or a hang "
    "is an outcome).",
    REQUIRED,
)


def run_pvf(run: CampaignRun) -> PvfResult:
    """Run or resume a campaign, until all rows are precise if a precision is requested."""
    question, precision = run.request[PvfEstimator], run.request[PvfBudget].precision
    budget = run.kind.resolve_budget(run.request)
    planner = None
    with run.open_executor() as (executor, observer):
        if precision is not None:
            planner = PrecisionPlanner(precision, question, budget.trials, executor.wall_seconds)
        if run.spec.is_enumerated:
            estimate_duration(run.spec, budget, executor, run.store, observer or Observer())
        run.run_planned_trials(executor, observer, planner)
        result = analyse(run.store, question)
    if planner is None or not planner.imprecise_rows:
        return result
    rows = ", ".join(planner.imprecise_rows)
    text = f"--trials {budget.trials} is not enough for {precision}: the intervals of these rows are wider: {rows}"
    return replace(result, imprecise_rows=(f"{text}; raise --trials",))


def estimate_duration(spec: PvfSpec, budget: Budget, executor: Executor, store: PvfStore, watcher: Observer) -> None:
    """Report how long all faults will take, from a few trials of each target.

    Raises ``UsageError`` if there are more trials than can be stored.
    """
    baseline = cast(PvfBaseline, executor.establish_baseline())
    total = sum(t.slots for t in baseline.targets)
    if total > MOST_PLANNED:
        plain = total * baseline.golden_seconds
        raise UsageError(
            f"--trials all would run {total:,} trials (at most about {rough_duration_text(plain)} of CPU time), but at most "
            f"{MOST_PLANNED:,} are allowed; narrow it with --at or --fault bitflip:bits=30, or sample with --rel 20%"
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


def trial_numbers(run: CampaignRun, baseline: PvfBaseline) -> TrialNumbers:
    """The numbers of the planned trials; the maximum if the campaign stops by precision."""
    if not has_open_number(run.request):
        return planned_trial_numbers(run, baseline)
    most = run.kind.resolve_budget(run.request).trial_numbers(None)
    return {(t.group or t.name, flips): most for flips in run.spec.flips for t in baseline.targets_at(flips)}


def has_open_number(options: Request) -> bool:
    """Whether the campaign stops by precision, so that its number of trials is not fixed."""
    return options[PvfBudget].precision is not None


def expected_end_of_store(run: CampaignRun, path: Path, executor: Executor) -> ExpectedEnd | None:
    """The expected end of a stored campaign; None if there is no store or its pilot is incomplete."""
    precision = run.request[PvfBudget].precision
    if precision is None or not path.exists() or not path.stat().st_size:
        return None
    most = run.kind.resolve_budget(run.request).trials
    planner = PrecisionPlanner(precision, run.request[PvfEstimator], most, executor.wall_seconds)
    with PvfStore(path) as store:
        return planner.expected_end(store)


def dry_run_notes(run: CampaignRun, baseline: PvfBaseline, path: Path) -> Iterator[str]:
    """Notes for a dry run about what a pilot decides, or has decided already."""
    if has_open_number(run.request):
        yield "a pilot decides how many trials each target gets, usually far fewer than the maximum numbers in the table"
    if run.spec.samples is not None:
        return
    per_trial, per_sample = 1e3 * baseline.trial_seconds, 1e3 * baseline.sample_seconds
    yield (
        "a pilot chooses how many samples a trial evaluates; it compares numbers by counted costs, "
        f"{per_trial:.2g} ms for a trial and {per_sample:.2g} ms for each of its samples"
    )
    if path.exists() and path.stat().st_size:
        with PvfStore(path) as store:
            stored = StoredTrials(store, "sample")
        if any(plan.first_look_trials for plan in stored.plans.values()):
            yield f"the pilot in {path} chose: samples of a trial {samples_text(samples_of_trials(stored))}"


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if the workload or judge is neither a name nor a suitable object."""
    workload, judge = arguments["workload"], arguments.get("judge")
    if not isinstance(workload, str) and not hasattr(workload, "batches"):
        raise UsageError(
            f"pvf needs a workload, found {type(workload).__name__}; wrap a model and inputs: unsilent.Workload(model, batches)"
        )
    if judge is not None and not isinstance(judge, str):
        raise UsageError(
            "judge= takes a name like 'topk:k=3'; pass a judge object or a function to the Workload instead"
        )


def live_executor(
    spec: PvfSpec,
    workload: InferenceWorkload,
    observer: Observer | None = None,
    worker_settings: WorkerSettings | None = None,
) -> Executor:
    """An executor that runs the trials of a live workload in this process."""
    from unsilent.campaigns.inline import InlineExecutor
    from unsilent.studies.pvf.runner import TrialRunner

    job = WorkerJob(partial(TrialRunner, workload=workload), spec, None, worker_settings or WorkerSettings())
    return InlineExecutor(job, observer)


pvf = campaign_function(
    PVF,
    PvfResult,
    "Parameter vulnerability of a workload: a PVF with its interval for every component, layer and number of flips.",
    live_executor=lambda workload, run, observer: live_executor(
        run.spec, workload, observer, run.request[EngineOptions].worker_settings
    ),
    check=check_arguments,
    further=(FAULT, WORKLOAD),
)
