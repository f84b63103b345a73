"""``unsilent KIND``: run a campaign of a registered kind, from its options to its report."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.basics.errors import Interrupted
from unsilent.basics.options import OUTPUT_PANEL, Option, Request, options_of
from unsilent.campaigns.campaign_run import CampaignRun, open_executor_of_options
from unsilent.campaigns.kinds import Kind
from unsilent.cli.paths import default_store, report_path
from unsilent.command import MEASURE, Command, ConfigOptions, DisplayOptions, ProgressOptions, output_option

if TYPE_CHECKING:
    from unsilent.campaigns.executors import Executor
    from unsilent.cli.progress import Display


@dataclass(frozen=True)
class CampaignOutputOptions:
    """Options for the store and the report of a campaign."""

    store: Annotated[
        Path | None,
        Option(
            "File that stores the trials.", OUTPUT_PANEL, default_text="unsilent-VERB-….sqlite in the current folder"
        ),
    ] = None
    output: Annotated[Path | None, output_option("Where to write the HTML page.", "next to the store")] = None
    dry_run: Annotated[
        bool, Option("Show what would run and how long it would take at most. No trial runs.", OUTPUT_PANEL)
    ] = False


OUTPUT_CLASSES = (CampaignOutputOptions, DisplayOptions, ProgressOptions, ConfigOptions)


class CampaignVerb:
    """The command that runs campaigns of a kind.

    Kinds with further options or outputs have a subclass. ``further_option_classes`` are dataclasses of options that only the
    command line has.
    """

    further_option_classes: tuple[type, ...] = ()

    def __init__(self, kind: Kind[Any, Any, Any]) -> None:
        self.kind = kind
        self.options = (*kind.option_classes, *self.further_option_classes, kind.report_options, *OUTPUT_CLASSES)

    @property
    def command(self) -> Command:
        """The `Command` of the kind."""
        name = self.kind.command_words
        workload = "WORKLOAD" if "workload" in options_of(self.kind.spec) else ""
        example = f"unsilent {name} {self.kind.example_arguments or workload}".rstrip()
        return Command(name, MEASURE, example, self.options, self.main, help_text=self.kind.command_help)

    def main(self, request: Request) -> int:
        """Run the command and return its exit code."""
        from unsilent.campaigns.store import open_store
        from unsilent.cli.dry_run import dry_run

        kind = self.kind
        spec = kind.checked_spec(request)
        self.check(request, spec)
        output, late = request[CampaignOutputOptions], {name: request.value(name) for name in kind.late_fields}
        path = output.store or Path(default_store(kind.name, {**spec.identity(), **late}))
        page = report_path(path, output.output)
        if output.dry_run:
            return dry_run(self.kind, self.campaign(request, spec), path)
        with open_store(path, kind, write=True) as store:
            try:
                result = kind.run(self.campaign(request, spec, store))
            except KeyboardInterrupt:
                stored = "finished trials are stored" if store.has_trials else "no trial was stored yet"
                raise Interrupted(f"interrupted; {stored}, run the same command again to continue") from None
        return self.show(request, result, page, path)

    def check(self, request: Request, spec: Any) -> None:
        """Raise ``UsageError`` for options that do not fit, before any file is opened."""

    def campaign(self, request: Request, spec: Any, store: Any = None) -> CampaignRun:
        """The campaign to run, with progress display and a store for fault-free runs in the current folder."""
        return CampaignRun(
            self.kind,
            request,
            spec,
            store,
            self.kind.command_line(request),
            lambda noun: self.display(request, noun),
            self.make_executor,
            lambda path, spec: nullcontext(path or Path(default_store("noise", spec.identity()))),
        )

    def make_executor(self, campaign: CampaignRun, observer: Any) -> AbstractContextManager[Executor]:
        """The executor of the campaign's trials."""
        return open_executor_of_options(campaign, observer)

    def display(self, request: Request, noun: str) -> Display:
        """The progress display.

        ``noun`` is the name of the counted things.
        """
        from unsilent.cli.progress import make_observer

        display_options = request[DisplayOptions]
        return make_observer(
            quiet=request[ProgressOptions].quiet, plain=display_options.plain or display_options.as_json, noun=noun
        )

    def show(self, request: Request, result: Any, page: Path, path: Path) -> int:
        """Print the report and write its page."""
        from unsilent.cli.report_output import show_report

        display = request[DisplayOptions]
        report = self.kind.report(result, **vars(request[self.kind.report_options]))
        show_report(report, page, display.as_json, display.plain, {"Store": path})
        return 0
