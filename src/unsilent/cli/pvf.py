"""``unsilent pvf WORKLOAD``: what it adds to other campaigns: precision, gates for continuous integration, failures in time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from unsilent.cli.campaign import CampaignVerb
from unsilent.command import DisplayOptions, ProgressOptions
from unsilent.options import OUTPUT_PANEL, Asked, Option
from unsilent.outcomes.pvf_options import PvfReportOptions
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.pvf.spec import PvfBaseline, PvfBudget

if TYPE_CHECKING:
    from unsilent.campaigns.campaign_run import CampaignRun
    from unsilent.campaigns.executors import Executor
    from unsilent.studies.pvf.records import Gate


@dataclass(frozen=True)
class PvfCommandOptions:
    """What is made of the result."""

    assertion: Annotated[tuple[str, ...], Option(
        "Exit with 1 if the upper limit of a target is above this bound, like "
        "'top_mlp<=0.01'.", OUTPUT_PANEL, "assert", is_repeatable=True)] = ()  # fmt: skip


class PvfVerb(CampaignVerb):
    """``unsilent pvf``."""

    further_option_classes = (PvfCommandOptions,)
    example_arguments = "digits-cnn --trials 500"

    def check(self, asked: Asked, spec: Any) -> None:
        from unsilent.studies.pvf.analysis import check_rate

        self.gates(asked)
        rate = asked[PvfReportOptions].fit_per_bit
        if rate is not None:
            check_rate(rate, spec.is_transient)

    def gates(self, asked: Asked) -> list[Gate]:
        """What must hold; raises ``UsageError``."""
        from unsilent.studies.pvf.records import Gate

        return [Gate.parse(text) for text in asked[PvfCommandOptions].assertion]

    def trial_numbers_by_stratum(self, asked: Asked, spec: Any, result: Any) -> Mapping[tuple[str, int | None], range]:
        if asked[PvfBudget].precision is None:
            return super().trial_numbers_by_stratum(asked, spec, result)
        most = self.kind.resolve_budget(asked).trial_numbers(None)
        return {(target.group or target.name, flips): most for target in result.targets for flips in spec.flips}

    def dry_run_notes(self, asked: Asked) -> Iterator[str]:
        if asked[PvfBudget].precision is not None:
            yield "a pilot decides how many trials each target gets, usually far fewer than the maximum numbers in the table"

    def has_open_number_of_trials(self, asked: Asked) -> bool:
        return asked[PvfBudget].precision is not None

    def plan_notes(self, spec: Any, baseline: Any, path: Path) -> Iterator[str]:
        from unsilent.studies.pvf.analysis import samples_of_trials
        from unsilent.studies.pvf.kind import PvfStore
        from unsilent.studies.pvf.records import samples_text
        from unsilent.studies.pvf.row_scopes import StoredTrials

        if spec.samples is not None:
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

    @contextmanager
    def make_executor(self, campaign: CampaignRun, observer: Any) -> Iterator[Executor]:
        with super().make_executor(campaign, observer) as executor:
            for gate in self.gates(campaign.asked):
                gate.check(campaign.spec, cast("PvfBaseline", executor.establish_baseline()))
            yield executor

    def show(self, asked: Asked, result: Any, page: Path, path: Path) -> int:
        from unsilent.cli.report_output import show_report
        from unsilent.studies.pvf.report import report

        gates, display = self.gates(asked), asked[DisplayOptions]
        failures = [line for gate in gates for line in gate.failures(result)]
        output = report(result, asked[PvfReportOptions].fit_per_bit)
        show_report(output, page, display.as_json, display.plain, {"Store": path}, failed_assertions=failures)
        for line in (*(f"assertion failed: {failure}" for failure in failures), *result.imprecise_rows):
            print(f"unsilent: {line}", file=sys.stderr)
        if gates and not failures and not asked[ProgressOptions].quiet:
            print(f"unsilent: assertions hold: {', '.join(gate.text for gate in gates)}", file=sys.stderr)
        return 1 if failures or result.imprecise_rows else 0


COMMAND = PvfVerb(PVF).command
