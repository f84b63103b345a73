"""Campaigns of ``unsilent pvf`` as a registered kind: what is checked of a store of theirs, which may come from anyone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.kinds import Kind, size
from unsilent.campaigns.options import EngineOptions
from unsilent.campaigns.reading import MOST_NOTES, MOST_THREADS, MOST_TRIALS, Damaged, parsed
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.store import Store
from unsilent.errors import UsageError
from unsilent.faults.naming import parse_site
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.question import PvfReading
from unsilent.report.model import Report
from unsilent.studies.pvf.spec import CampaignSpec, PvfBaseline, PvfBudget, TrialRow, resolve
from unsilent.workloads.zoo import ZOO

if TYPE_CHECKING:
    from unsilent.campaigns.replay import Replay
    from unsilent.campaigns.rounds import CellPlan
    from unsilent.studies.pvf.records import PvfResult

ABOUT = """Measure the parameter vulnerability factor (PVF): how often a corrupted parameter makes an output wrong.

Resumable: the same command continues where it stopped; more --trials extend it. Ends in a table and an HTML report.
"""
MOST_SAMPLES = 10**7
MOST_FLIPS = 1000
LEAST_SHARE = 1e-30
_CODES = bytes(Outcome)


def check_spec(spec: CampaignSpec) -> None:
    """Raise ``Damaged`` for impossible numbers."""
    if not 1 <= len(spec.flips) <= MOST_FLIPS or not 1 <= spec.threads <= MOST_THREADS:
        raise Damaged("its spec has no number of flips or too many, or an impossible number of threads")


def check_description(baseline: PvfBaseline) -> None:
    """Raise ``Damaged`` for impossible sizes, and for sites that there cannot be."""
    if not baseline.targets or not baseline.tensors or not baseline.samples:
        raise Damaged("its description names no target, tensor or sample")
    if min(baseline.samples) < 1 or sum(baseline.samples) > MOST_SAMPLES:
        raise Damaged("its description has an impossible number of samples")
    if not all(LEAST_SHARE <= t.share <= 1 + 1e-9 and t.bits_by_width for t in baseline.targets):
        raise Damaged("its description has a target without a share")
    if len(baseline.notes) > MOST_NOTES:
        raise Damaged("its description has more notes than a campaign makes")
    if any(t.elements < 1 or t.width not in (8, 16, 32, 64) for t in baseline.tensors):
        raise Damaged("its description has a tensor of an impossible size")
    for tensor in baseline.tensors:
        try:
            parse_site(tensor.site)
        except UsageError as error:
            raise Damaged(f"its description has a tensor of no site: {error}") from None


def shapes(baseline: PvfBaseline, values: Mapping[str, Any]) -> Mapping[str, int]:
    """One outcome a sample."""
    return {"codes": sum(baseline.samples)}


def check_row(row: TrialRow, baseline: PvfBaseline) -> None:
    """Raise ``Damaged`` for outcomes that there are not."""
    if row.incorrect_batches > len(baseline.samples) or math.isnan(row.severity):
        raise Damaged("has impossible numbers")
    check_codes(row.codes, baseline.samples)


def check_codes(codes: bytes, samples: Sequence[int]) -> None:
    """Raise ``Damaged`` unless there is an outcome for each sample, and batches are spared whole."""
    if len(codes) != sum(samples) or codes.translate(None, _CODES):
        raise Damaged(f"has outcomes that do not fit {sum(samples)} samples")
    if Outcome.SPARED in codes:
        ends = list(accumulate(samples))
        left = [codes.count(Outcome.SPARED, end - n, end) - n for n, end in zip(samples, ends, strict=True)]
        if not any(left) or any(rest not in (0, -n) for rest, n in zip(left, samples, strict=True)):
            raise Damaged("spares all batches, or part of one")


def read_round(text: str, spec: CampaignSpec, description: PvfBaseline) -> list[CellPlan]:
    """What a look decided; raises ``Damaged``."""
    from unsilent.campaigns.rounds import CellPlan

    record = parsed(list[CellPlan], text, "rounds")
    strata = {target.name for target in description.targets}
    for plan in record:
        numbers = [*plan.start.values(), *plan.first.values(), plan.look]
        if not plan.start or not set(plan.start) <= strata or not set(plan.first) <= set(plan.start):
            raise Damaged("its rounds speak of targets that there are not")
        if plan.first and not set(plan.start) == set(plan.first) == set(plan.centre):
            raise Damaged("its rounds leave out a stratum")
        if not all(0 <= n < MOST_TRIALS for n in numbers) or not all(0 <= c <= 1 for c in plan.centre.values()):
            raise Damaged("its rounds have impossible numbers")
    return record


def planned_trials(store: PvfStore) -> int:
    """Trials of all strata, as far as is known: what looks decided, else what was asked."""

    from unsilent.campaigns.rounds import current

    plans = current(store.records(ROUND))
    return sum(plan.size for plan in plans.values()) if plans else size(store)


def analyse(store: PvfStore, **choices: Any) -> PvfResult:
    """What a campaign found; ``choices``: those of a `Question`."""
    from unsilent.outcomes.tallies import Question
    from unsilent.studies.pvf.analysis import analyse

    return analyse(store, Question(**choices))


def report(result: PvfResult, fit_per_bit: float | None = None) -> Report:
    """What is shown of it; raises ``UsageError`` where a rate is given for values of a run."""
    from unsilent.studies.pvf.analysis import check_rate
    from unsilent.studies.pvf.report import report

    return report(result, None if fit_per_bit is None else check_rate(fit_per_bit, result.transient))


def compare(one: PvfStore, other: PvfStore, **choices: Any) -> Report:
    """What is shown of two."""
    from unsilent.outcomes.tallies import Question
    from unsilent.studies.pvf.comparison import compare
    from unsilent.studies.pvf.comparison_report import comparison_report

    return comparison_report(compare(one, other, Question(**choices)))


def replay(store: PvfStore, trial: TrialId, *given: Any, **choices: Any) -> Replay[TrialRow]:
    """A trial again, and how its fault spread."""
    from unsilent.studies.pvf.replay import replay_trial

    return replay_trial(store, trial, *given, **choices)


PVF = Kind(
    name="pvf",
    application=0x556E7369,  # "Unsi"
    spec=CampaignSpec,
    baseline=PvfBaseline,
    row=TrialRow,
    check_spec=check_spec,
    check_baseline=check_description,
    check_row=check_row,
    shapes=shapes,
    records={ROUND: read_round},
    fixed=("samples", "targets", "tensors"),
    analyse=analyse,
    report=report,
    report_choices=("fit_per_bit",),
    compare=compare,
    builtin={"workload": ZOO},
    replay=replay,
    replay_choices=("trace", "batch", "log"),
    size=planned_trials,
    about=ABOUT,
    budget=PvfBudget,
    reading=PvfReading,
    means=EngineOptions,
    resolve=resolve,
)


class PvfStore(Store[CampaignSpec, PvfBaseline, TrialRow]):
    """An open store of such a campaign."""

    kind = PVF
