"""``unsilent diff A B``: compare the results of two stored campaigns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Option, Request
from unsilent.cli.file_sorts import refuse_other_files
from unsilent.cli.paths import report_path, writable_page
from unsilent.cli.report import CANONICAL, check_canonical, options_for_store
from unsilent.command import RESULTS, Command, DisplayOptions, output_option
from unsilent.report.model import Report

NO_STORES = "two stores are needed; give the stores of two campaigns of the same kind"


@dataclass(frozen=True)
class DiffOptions:
    """Options of ``unsilent diff``."""

    first: Annotated[Path, Option("The store of a campaign (A).", "", metavar="STORE", missing_error=NO_STORES)]
    second: Annotated[Path, Option("Another store (B).", "", metavar="OTHER", missing_error=NO_STORES)]
    output: Annotated[
        Path | None, output_option("Path of the page to write.", "A-vs-B.html next to the first store")
    ] = None
    canonical: Annotated[bool, CANONICAL] = False


def options_of_stores(arguments: Sequence[str]) -> tuple[type, ...]:
    """Dataclasses of the analysis and report options for the stores among the words."""
    from unsilent.studies.campaign_kinds import first_kind

    kind = first_kind(arguments)
    return () if kind is None else (kind.analysis_options, kind.report_options)


def diff(request: Request) -> int:
    """Compare the results of two stored campaigns, as tables and an HTML page.

    Further options depend on the stores: see unsilent diff A B --help. The bytes of two checkpoints are compared by unsilent
    checkpoint diff.
    """
    from unsilent.cli.report_output import show_report

    options, display = request[DiffOptions], request[DisplayOptions]
    check_canonical(options.canonical, display)
    for path in (options.first, options.second):
        refuse_other_files(path, {
            "checkpoint": "unsilent checkpoint diff A B", "events": f"unsilent report {path}",
            "card": f"the command that unsilent report {path} shows, which makes a store of it, and compare stores",
        })  # fmt: skip
    page = writable_page(page_path(options.first, options.second, options.output), options.output)
    result = report_of_stores(options.first, options.second, request, options.canonical)
    show_report(result, page, display.as_json, display.plain, canonical=options.canonical)
    return 0


def report_of_stores(first: Path, second: Path, request: Request, canonical: bool) -> Report:
    """A report on the differences between two stores; raises ``UsageError`` if their kind cannot be compared."""
    from unsilent.campaigns.store import open_store
    from unsilent.studies.campaign_kinds import kind_of_store

    kind = kind_of_store(first)
    if kind.compare is None:
        raise UsageError(
            f"stores of unsilent {kind.command_words}, like {first}, cannot be compared; show each with unsilent report"
        )
    with (
        open_store(first, kind, canonical=canonical) as store_a,
        open_store(second, kind, canonical=canonical) as store_b,
    ):
        for each in (store_a, store_b):
            each.check_has_trials()
        chosen = [options_for_store(store_a, request, cls) for cls in (kind.analysis_options, kind.report_options)]
        return kind.compare(store_a, store_b, **chosen[0], **chosen[1])


def page_path(first: Path, second: Path, output: Path | None) -> Path:
    """The path of the page: the given one, or ``A-vs-B.html`` next to the first store.

    Raises the same errors as `report_path`.
    """
    if output is None:
        return report_path(first.with_name(f"{first.stem}-vs-{second.stem}.sqlite"), None)
    report_path(second, output)
    return report_path(first, output)


COMMAND = Command(
    "diff", RESULTS, "unsilent diff A.sqlite B.sqlite", (DiffOptions, DisplayOptions), diff,
    options_by_arguments=options_of_stores,
)  # fmt: skip
