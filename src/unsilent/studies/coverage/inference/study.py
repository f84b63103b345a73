"""Runs the study of detectors of inference: clean samples, faults, and the analysis of the store."""

from __future__ import annotations

from collections.abc import Iterator

from unsilent.campaigns.campaign_run import CampaignRun
from unsilent.campaigns.driver import run_trials
from unsilent.campaigns.python_function import campaign_function
from unsilent.campaigns.spec import TrialId
from unsilent.report.text import count_text
from unsilent.studies.coverage.inference.analysis import InferenceCoverageResult
from unsilent.studies.coverage.inference.kind import INFERENCE_COVERAGE
from unsilent.studies.coverage.inference.scoring import check_clean_samples
from unsilent.studies.coverage.inference.spec import (
    CALIBRATION,
    CLEAN_TARGETS,
    TEST,
    TIMING,
    InferenceCoverageBaseline,
    InferenceCoverageOptions,
)


def run_inference_coverage(run: CampaignRun) -> InferenceCoverageResult:
    """Run or resume a campaign, and compare the detectors; raises ``UsageError``."""
    with run.open_executor() as (executor, observer):
        baseline = executor.establish_baseline()
        assert isinstance(baseline, InferenceCoverageBaseline)
        available = min(baseline.clean_samples[part] for part in (CALIBRATION, TEST))
        check_clean_samples(run.spec.clean_samples, run.request[InferenceCoverageOptions].rate, available)
        run.store.bind_campaign(run.spec, baseline)
        run_trials(fault_free_trials(baseline), executor, run.store, observer)
        run.run_planned_trials(executor, observer)
    result: InferenceCoverageResult = run.analyse()
    return result


def dry_run_notes(run: CampaignRun, *_: object) -> Iterator[str]:
    """Notes for a dry run about the work that is done besides the trials."""
    samples = count_text(3 * run.spec.clean_samples, "clean sample")
    yield f"before the trials, {samples} would be judged, unless stored already"
    yield f"the time estimate is of trials that draw {run.spec.tries:,} faults; most trials draw far fewer"


def fault_free_trials(baseline: InferenceCoverageBaseline) -> Iterator[TrialId]:
    """The trials without faults: clean samples, and timing of the detectors."""
    for part in CLEAN_TARGETS:
        yield from (TrialId(part, None, k) for k in range(baseline.clean_trials[part]))
    yield TIMING


inference_coverage = campaign_function(
    INFERENCE_COVERAGE,
    InferenceCoverageResult,
    "Which detector finds which faults of an inference, with how many false alarms, how early, and what repairs answers.",
)
