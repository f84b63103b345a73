"""``unsilent report``: show the results of a stored campaign, a card or a monitored training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import OUTPUT_PANEL, Option, Request, options_of
from unsilent.cli.card import card_paths, show_card, write_card
from unsilent.cli.file_sorts import refuse_other_files, sort_of_file
from unsilent.cli.paths import report_path, writable_page
from unsilent.command import RESULTS, Command, DisplayOptions, output_option
from unsilent.report.model import Report

CANONICAL = Option(
    "With --json: leave out time, paths and versions, so that two reports can be compared.", OUTPUT_PANEL
)
NO_STORE = "no store was named; give the store of a campaign, a card, or events of a monitored training"


@dataclass(frozen=True)
class StoredReportOptions:
    """Options of ``unsilent report`` for every file."""

    store: Annotated[Path, Option(
        "A campaign store, a card, or events of a monitored training.", "", missing_error=NO_STORE)]  # fmt: skip
    output: Annotated[
        Path | None, output_option("Path of the page, card, figure or table to write.", "next to the store")
    ] = None
    figure: Annotated[str | None, Option(
        "Write only this figure, for a paper: -o FILE.svg, FILE.pdf or FILE.png. A wrong name lists the figures of the report.",
        OUTPUT_PANEL, metavar="<name>")] = None  # fmt: skip
    table: Annotated[bool, Option(
        "Write only the main table, for a paper: -o FILE.tex, FILE.md, or FILE.csv with the columns for machines.",
        OUTPUT_PANEL)] = False  # fmt: skip
    canonical: Annotated[bool, CANONICAL] = False


@dataclass(frozen=True)
class CardOptions:
    """Options of ``unsilent report`` for stores of ``unsilent pvf``."""

    card: Annotated[
        bool,
        Option("Instead of the report page, write a card to share: STORE.card.json and STORE.card.html.", OUTPUT_PANEL),
    ] = False


def options_of_store(arguments: Sequence[str]) -> tuple[type, ...]:
    """Dataclasses of the further options of a report, for the store among the words."""
    from unsilent.studies.campaign_kinds import first_kind
    from unsilent.studies.pvf.kind import PVF

    kind = first_kind(arguments)
    if kind is None:
        return ()
    return kind.analysis_options, kind.report_options, *((CardOptions,) if kind is PVF else ())


def report(request: Request) -> int:
    """Show the results of a stored campaign as a table and an HTML page, without running a trial.

    Further options depend on the store: see unsilent report STORE --help. Options that the command of the campaign gave need not
    be repeated. A card is shown if its checksum is right. Of the events of a monitored training, the last run is shown. Two
    stores are compared by unsilent diff.
    """
    from unsilent.cli.report_output import show_report

    options, display = request[StoredReportOptions], request[DisplayOptions]
    store, output, canonical = options.store, options.output, options.canonical
    check_canonical(canonical, display)
    sort = sort_of_file(store)
    refuse_other_files(
        store, {"checkpoint": f"unsilent checkpoint inspect {store}", "injection": f"unsilent replay-injection {store}"}
    )
    if options.figure is not None or options.table:
        write_part(request, options, sort)
        return 0
    if sort == "card":
        if output is not None or canonical:
            raise UsageError(
                "a card contains no trials, so its numbers cannot be computed again: leave out --output and --canonical"
            )
        show_card(store, display.as_json, display.plain)
        return 0
    if sort == "events":
        page = writable_page(report_path(store / "events.jsonl" if store.is_dir() else store, output), output)
        show_report(report_of_events(store), page, display.as_json, display.plain, canonical=canonical)
        return 0
    card = card_paths(store, output) if request[CardOptions].card else None
    page = None if card else writable_page(report_path(store, output), output)
    result = report_of_store(store, request, canonical, card)
    files = dict(zip(("Card", "Page"), card or (), strict=False))
    show_report(result, page, display.as_json, display.plain, files, canonical=canonical)
    return 0


def write_part(request: Request, options: StoredReportOptions, sort: str) -> None:
    """Write one figure or the main table to a file, and print its path."""
    from unsilent.render.figure_file import write_figure
    from unsilent.render.table_file import write_table

    option, endings = ("--table", ".tex .md .csv") if options.figure is None else ("--figure", ".svg .pdf .png")
    others = [name for name in ("as_json", "plain", "canonical", "card") if name in request.options]
    request.refuse_given([*others, *(["table"] if options.figure else [])], f"{option} writes that file alone")
    if options.output is None:
        first, second, third = (f"FILE{ending}" for ending in endings.split())
        raise UsageError(f"{option} needs the file to write; give -o {first}, {second} or {third}")
    readers = {"card": report_of_card, "events": report_of_events}
    result = (
        readers[sort](options.store) if sort in readers else report_of_store(options.store, request, canonical=False)
    )
    if options.figure is None:
        print(f"Table: {write_table(result, options.output)}")
    else:
        print(f"Figure: {write_figure(result, options.figure, options.output)}")


def check_canonical(canonical: bool, display: DisplayOptions) -> None:
    """Raise ``UsageError`` for ``--canonical`` without ``--json``."""
    if canonical and not display.as_json:
        raise UsageError("--canonical is only used with --json: leave out --canonical")


def report_of_card(path: Path) -> Report:
    """The report on a card."""
    from unsilent.studies.pvf import card

    return card.report(card.read_card(path))


def report_of_events(path: Path) -> Report:
    """The report on the last run in the events of a monitored training."""
    from unsilent.events import run_report
    from unsilent.events.event_files import iterate_events

    return run_report.report(iterate_events(path), str(path), shlex.join(["unsilent", "report", str(path)]))


def report_of_store(path: Path, request: Request, canonical: bool, card: tuple[Path, Path] | None = None) -> Report:
    """The report on a store of any kind.

    ``card`` are paths to which a card of the store and its page are written.
    """
    from unsilent.campaigns.store import open_store
    from unsilent.studies.campaign_kinds import kind_of_store

    kind = kind_of_store(path)
    with open_store(path, kind, canonical=canonical) as store:
        reading = options_for_store(store, request, kind.analysis_options)
        if card:
            write_card(path, reading, *card)
        return kind.report(store.analyse(**reading), **options_for_store(store, request, kind.report_options))


def options_for_store(store: Any, request: Request, cls: type[Any]) -> dict[str, Any]:
    """The options of a class by field: those given now, else those of the command in the store."""
    from unsilent.campaigns.stored_command import stored_options

    fields = options_of(cls)
    given_here = {name: value for name, value in request.given_values.items() if name in fields}
    return dict(vars(replace(stored_options(store, cls), **given_here)))


COMMAND = Command(
    "report", RESULTS, "unsilent report STORE.sqlite", (StoredReportOptions, DisplayOptions), report,
    options_by_arguments=options_of_store,
)  # fmt: skip
