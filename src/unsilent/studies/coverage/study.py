"""Runs the study of detection rules: the golden run, faults, fault-free runs, and the analysis of the store."""

from __future__ import annotations

from collections.abc import Iterator

from unsilent.campaigns.campaign_run import CampaignRun
from unsilent.campaigns.driver import run_trials
from unsilent.campaigns.python_function import campaign_function
from unsilent.campaigns.spec import TrialId
from unsilent.report.text import count_text
from unsilent.studies.coverage.analysis import CoverageResult
from unsilent.studies.coverage.kind import COVERAGE
from unsilent.studies.coverage.scoring import current_digest, named_rules
from unsilent.studies.coverage.spec import (
    CLEAN,
    GOLDEN,
    CleanTarget,
    CoverageAnalysisOptions,
    CoverageBaseline,
    CoverageBudget,
)


def run_coverage(run: CampaignRun) -> CoverageResult:
    """Run or resume a campaign, and apply all rules to its recordings; raises ``UsageError``."""
    budget, options = run.request[CoverageBudget], run.request[CoverageAnalysisOptions]
    with run.open_executor() as (executor, observer):
        baseline = executor.establish_baseline()
        assert isinstance(baseline, CoverageBaseline)
        run.store.bind_campaign(run.spec, baseline)
        run_trials([GOLDEN], executor, run.store, observer)
        run.run_planned_trials(executor, observer)
        run_trials(fault_free_trials(budget, options, baseline), executor, run.store, observer)
    result: CoverageResult = run.analyse()
    return result


def dry_run_notes(run: CampaignRun, *_: object) -> Iterator[str]:
    """Notes for a dry run about the work that is done besides the trials."""
    budget = run.request[CoverageBudget]
    runs = budget.clean_runs + 3 * budget.changed_runs
    yield f"after the trials, up to {count_text(runs, 'fault-free run')} would run, unless stored already"
    yield "the time estimate does not include fault-free runs; a trial draws faults until one is of its class"


def fault_free_trials(
    budget: CoverageBudget, options: CoverageAnalysisOptions, baseline: CoverageBaseline
) -> Iterator[TrialId]:
    """The fault-free trials, with and without a planted change, for the current rules."""
    digest, steps = current_digest(named_rules()), budget.clean_steps or baseline.steps
    for kind in (CLEAN, *baseline.changes):
        count = budget.clean_runs if kind == CLEAN else budget.changed_runs
        target = CleanTarget(kind, steps, *options.intervals, digest)
        yield from (TrialId(target.name, None, k) for k in range(count))


coverage = campaign_function(
    COVERAGE,
    CoverageResult,
    "Which rule detects which faults of a training, with how many false alarms, how late and at what cost.",
)
