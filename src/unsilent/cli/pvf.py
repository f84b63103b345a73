"""``unsilent pvf WORKLOAD``: a campaign command with gates for continuous integration and with cards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from unsilent.basics.errors import UsageError
from unsilent.basics.options import OUTPUT_PANEL, Option, Request
from unsilent.cli.campaign import CampaignVerb
from unsilent.command import ConfigOptions, DisplayOptions, ProgressOptions
from unsilent.outcomes.pvf_options import PvfReportOptions
from unsilent.studies.pvf.kind import PVF
from unsilent.studies.pvf.spec import PvfBaseline

if TYPE_CHECKING:
    from unsilent.campaigns.campaign_run import CampaignRun
    from unsilent.campaigns.executors import Executor
    from unsilent.studies.pvf.card import PvfCard
    from unsilent.studies.pvf.records import Gate


@dataclass(frozen=True)
class PvfCommandOptions:
    """Further options of ``unsilent pvf``, which other campaign commands lack."""

    assertion: Annotated[tuple[str, ...], Option(
        "Exit with 1 if the upper limit of a target is above this bound, like "
        "'top_mlp<=0.01'.", OUTPUT_PANEL, "assert", is_repeatable=True)] = ()  # fmt: skip
    find: Annotated[Path | None, Option(
        "With --config CARD.json: the folder to search for the files of the card's campaign; their content identifies them.",
        OUTPUT_PANEL)] = None  # fmt: skip


class PvfVerb(CampaignVerb):
    """The command ``unsilent pvf``."""

    further_option_classes = (PvfCommandOptions,)

    def check(self, request: Request, spec: Any) -> None:
        from unsilent.studies.pvf.analysis import check_rate

        self.gates(request)
        if request[PvfCommandOptions].find is not None and self.card_of_config(request) is None:
            raise UsageError("--find is only used with a card: --config CARD.json")
        rate = request[PvfReportOptions].fit_per_bit
        if rate is not None:
            check_rate(rate, spec.is_transient)

    def gates(self, request: Request) -> list[Gate]:
        """The gates that the result must pass; raises ``UsageError``."""
        from unsilent.studies.pvf.records import Gate

        return [Gate.parse(text) for text in request[PvfCommandOptions].assertion]

    def card_of_config(self, request: Request) -> tuple[PvfCard, Path] | None:
        """The card given by ``--config`` and its path; None without a card."""
        from unsilent.studies.pvf.card import is_card, read_card

        path = request[ConfigOptions].config
        return None if path is None or not is_card(path) else (read_card(path), path)

    @contextmanager
    def make_executor(self, campaign: CampaignRun, observer: Any) -> Iterator[Executor]:
        from unsilent.studies.pvf.card_files import comparison_text

        with super().make_executor(campaign, observer) as executor:
            if shared := self.card_of_config(campaign.request):
                baseline = cast("PvfBaseline", executor.establish_baseline())
                text = comparison_text(shared[0], str(shared[1]), campaign.spec, baseline)
                print(f"unsilent: {text}", file=sys.stderr)
            for gate in self.gates(campaign.request):
                gate.check(campaign.spec, cast("PvfBaseline", executor.establish_baseline()))
            yield executor

    def show(self, request: Request, result: Any, page: Path, path: Path) -> int:
        from unsilent.cli.report_output import show_report
        from unsilent.studies.pvf.report import report

        gates, display = self.gates(request), request[DisplayOptions]
        failures = [line for gate in gates for line in gate.failures(result)]
        output = report(result, request[PvfReportOptions].fit_per_bit)
        show_report(output, page, display.as_json, display.plain, {"Store": path}, failed_assertions=failures)
        for line in (*(f"assertion failed: {failure}" for failure in failures), *result.imprecise_rows):
            print(f"unsilent: {line}", file=sys.stderr)
        if gates and not failures and not request[ProgressOptions].quiet:
            print(f"unsilent: assertions hold: {', '.join(gate.text for gate in gates)}", file=sys.stderr)
        return 1 if failures or result.imprecise_rows else 0


COMMAND = PvfVerb(PVF).command
