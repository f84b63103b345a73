"""Defines the kind of campaign that ``unsilent pvf`` runs, and the checks of its stored records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_module import LazyFunction
from unsilent.campaigns.campaign_run import DryRun
from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.kinds import Kind, count_budgeted_trials
from unsilent.campaigns.options import EngineOptions
from unsilent.campaigns.store import Store
from unsilent.campaigns.stored_values import (
    MOST_NOTES,
    MOST_THREADS,
    MOST_TRIALS,
    DamagedRecordError,
    RemovedOptionError,
    parse_record,
)
from unsilent.faults.hardware import SHIPPED
from unsilent.faults.naming import parse_site
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.pvf_options import PvfAnalysisOptions, PvfReportOptions
from unsilent.studies.pvf.spec import STRATA, PvfBaseline, PvfBudget, PvfSpec, PvfTrialRow, make_pvf_spec
from unsilent.workloads.zoo import ZOO

if TYPE_CHECKING:
    from unsilent.campaigns.rounds import CellPlan

ABOUT = """Measure the parameter vulnerability factor (PVF): how often a corrupted parameter makes an output wrong.

Resumable: the same command continues where it stopped; more --trials extend it. Ends in a table and an HTML report.
"""
ESTIMATOR = LazyFunction("unsilent.outcomes.tallies:PvfEstimator")
MOST_SAMPLES = 10**7
MOST_FLIPS = 1000
LEAST_SHARE = 1e-30
_CODES = bytes(Outcome)


def check_spec(spec: PvfSpec) -> None:
    """Raise ``DamagedRecordError`` if the settings have impossible numbers or unknown strata."""
    if spec.strata not in STRATA:
        raise RemovedOptionError(f"--strata {spec.strata}")
    if not 1 <= len(spec.flips) <= MOST_FLIPS or not 1 <= spec.threads <= MOST_THREADS:
        raise DamagedRecordError(
            "its spec lists no or too many numbers of flips, or has an impossible number of threads"
        )


def check_pvf_baseline(baseline: PvfBaseline) -> None:
    """Raise ``DamagedRecordError`` if the baseline has impossible sizes or invalid sites."""
    nothing = (not baseline.targets or not baseline.tensors) and not baseline.memory_parts
    if nothing or not baseline.samples:
        raise DamagedRecordError("its description names no target, tensor or sample")
    if min(baseline.samples) < 1 or sum(baseline.samples) > MOST_SAMPLES:
        raise DamagedRecordError("its description has an impossible number of samples")
    if baseline.right_answers and (len(baseline.right_answers), set(baseline.right_answers) | {"0", "1"}) != (
        sum(baseline.samples),
        {"0", "1"},
    ):
        raise DamagedRecordError("its description does not say of each sample whether its answer is right")
    if (scores := baseline.scores) is not None and (
        not math.isfinite(scores.highest - scores.lowest)
        or not scores.lowest < scores.highest
        or not scores.lowest <= scores.least <= scores.most <= scores.highest
        or not scores.lowest <= scores.mean <= scores.highest
    ):
        raise DamagedRecordError("its description has impossible scores")
    if not all(LEAST_SHARE <= t.share <= 1 + 1e-9 and t.bits_by_width for t in baseline.targets):
        raise DamagedRecordError("its description has a target without bits or with an impossible share")
    if len(baseline.notes) > MOST_NOTES:
        raise DamagedRecordError(f"its description has more than {MOST_NOTES} notes")
    if any(t.elements < 1 or t.width not in (8, 16, 32, 64) for t in baseline.tensors):
        raise DamagedRecordError("its description has a tensor of an impossible size")
    for tensor in baseline.tensors:
        try:
            parse_site(tensor.site)
        except UsageError as error:
            raise DamagedRecordError(f"its description has a tensor with an invalid site: {error}") from None


def pvf_array_shapes(baseline: PvfBaseline, values: Mapping[str, Any]) -> Mapping[str, int]:
    """Expected lengths of the arrays of a row."""
    return {"outcome_codes": sum(baseline.samples)}


def check_row(row: PvfTrialRow, baseline: PvfBaseline) -> None:
    """Raise ``DamagedRecordError`` if a row has impossible numbers or outcomes."""
    if row.incorrect_batches > len(baseline.samples) or math.isnan(row.severity):
        raise DamagedRecordError("has impossible numbers")
    check_codes(row.outcome_codes, baseline.samples)
    check_score_lost(row, baseline)


def check_score_lost(row: PvfTrialRow, baseline: PvfBaseline) -> None:
    """Raise ``DamagedRecordError`` if the lost score of a row is missing, unexpected or impossible."""
    if baseline.scores is None or math.isnan(row.score_lost):
        has_score = baseline.scores is not None and set(row.outcome_codes) != {Outcome.SPARED}
        if has_score or not math.isnan(row.score_lost):
            raise DamagedRecordError("lost of a score that the workload does not have, or nothing of one that it has")
        return
    least, most = baseline.scores.loss_limits
    if not least - 1e-9 * (most - least) <= row.score_lost <= most + 1e-9 * (most - least):
        raise DamagedRecordError("lost more of a score than there is")


def check_codes(codes: bytes, samples: Sequence[int]) -> None:
    """Raise ``DamagedRecordError`` unless every sample has a known outcome.

    Samples that were not evaluated must be whole batches, or, if only one batch was evaluated, a part of that batch.
    """
    if len(codes) != sum(samples) or codes.translate(None, _CODES):
        raise DamagedRecordError(f"does not have one known outcome for each of {sum(samples)} samples")
    if Outcome.SPARED in codes:
        ends = accumulate(samples)
        evaluated = [n - codes.count(Outcome.SPARED, end - n, end) for n, end in zip(samples, ends, strict=True)]
        batches = [(done, n) for done, n in zip(evaluated, samples, strict=True) if done]
        if not batches or (len(batches) > 1 and any(done < n for done, n in batches)):
            raise DamagedRecordError("marks all samples, or a part of one batch among several, as not evaluated")


def parse_round(text: str, spec: PvfSpec, description: PvfBaseline) -> list[CellPlan]:
    """Parse the stored plans of an interim look; raises ``DamagedRecordError``."""
    from unsilent.campaigns.rounds import MOST_LOOKS, CellPlan

    record = parse_record(list[CellPlan], text, "rounds")
    for plan in record:
        strata = {target.name for target in description.targets_at(plan.flips)}
        numbers = [
            *plan.pilot_trials.values(),
            *plan.wide_pilot_trials.values(),
            *plan.first_look_trials.values(),
            plan.look,
        ]
        if (
            not plan.pilot_trials
            or not set(plan.pilot_trials) <= strata
            or not set(plan.wide_pilot_trials) <= set(plan.pilot_trials)
            or not set(plan.first_look_trials) <= set(plan.pilot_trials)
        ):
            raise DamagedRecordError("its interim looks name targets that do not exist")
        if plan.first_look_trials and not set(plan.pilot_trials) == set(plan.first_look_trials) == set(
            plan.pilot_means
        ):
            raise DamagedRecordError("its interim looks omit a stratum of a target")
        if (
            plan.look > MOST_LOOKS
            or not all(0 <= n < MOST_TRIALS for n in numbers)
            or not all(0 <= n <= MOST_SAMPLES for n in (plan.pilot_samples, plan.wide_samples, plan.samples))
            or (plan.wide_pilot_trials and plan.wide_samples == plan.pilot_samples)
            or not all(0 <= c <= 1 for c in plan.pilot_means.values())
        ):
            raise DamagedRecordError("its interim looks have impossible numbers")
    return record


def planned_trials(store: PvfStore) -> int:
    """The number of planned trials: as decided by interim looks, otherwise as requested."""
    from unsilent.campaigns.rounds import latest_plans

    plans = latest_plans(store.records(ROUND))
    return sum(plan.total_trials for plan in plans.values()) if plans else count_budgeted_trials(store)


PVF = Kind(
    name="pvf",
    application_id=0x556E7369,  # "Unsi"
    spec=PvfSpec,
    baseline=PvfBaseline,
    row=PvfTrialRow,
    runner=LazyFunction("unsilent.studies.pvf.runner:TrialRunner"),
    max_samples=MOST_SAMPLES,
    check_spec=check_spec,
    check_baseline=check_pvf_baseline,
    check_row=check_row,
    shapes=pvf_array_shapes,
    schema_version=6,
    record_readers={ROUND: parse_round},
    shared_baseline_fields=("samples", "targets", "tensors"),
    analyse=LazyFunction("unsilent.studies.pvf.analysis:analyse", ESTIMATOR),
    report=LazyFunction("unsilent.studies.pvf.report:report_of_memory"),
    compare=LazyFunction("unsilent.studies.pvf.comparison_report:compare_stores"),
    builtin_values={"workload": ZOO, "accelerator": SHIPPED},
    replay=LazyFunction("unsilent.studies.pvf.replay:replay_pvf_trial"),
    replay_choices=("trace", "batch", "log"),
    count_planned_trials=planned_trials,
    command_help=ABOUT,
    budget=PvfBudget,
    analysis_options=PvfAnalysisOptions,
    report_options=PvfReportOptions,
    execution_options=EngineOptions,
    resolve_spec=make_pvf_spec,
    run=LazyFunction("unsilent.studies.pvf.study:run_pvf"),
    dry_run=DryRun(
        trial_numbers=LazyFunction("unsilent.studies.pvf.study:trial_numbers"),
        notes=LazyFunction("unsilent.studies.pvf.study:dry_run_notes"),
        has_open_number=LazyFunction("unsilent.studies.pvf.study:has_open_number"),
        expected_end=LazyFunction("unsilent.studies.pvf.study:expected_end_of_store"),
    ),
    example_arguments="digits-cnn --trials 500",
)


class PvfStore(Store[PvfSpec, PvfBaseline, PvfTrialRow]):
    """An open store of a PVF campaign."""

    kind = PVF
