"""``unsilent export``: write every trial of a campaign to a file or to stdout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.options import OUTPUT_PANEL, Option, Request
from unsilent.cli.file_sorts import STORE_WANTED, refuse_other_files
from unsilent.command import RESULTS, Command, output_option

NO_STORE = "no store was named; give the store of a campaign, like unsilent-pvf-….sqlite"


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``unsilent export``."""

    store: Annotated[Path, Option("A campaign store.", "", missing_error=NO_STORE)]
    output: Annotated[
        Path | None,
        output_option(
            "Output file. Its ending sets the format: .csv, .json, .jsonl or .parquet.", "JSON lines on stdout"
        ),
    ] = None
    canonical: Annotated[bool, Option(
        "Sort the trials and leave out time, path, host and worker, so that two exports can be compared.",
        OUTPUT_PANEL)] = False  # fmt: skip


def export(request: Request) -> int:
    """Export every trial of a campaign."""
    from unsilent.campaigns.export import export_store
    from unsilent.campaigns.store import Store
    from unsilent.studies.campaign_kinds import kind_of_store

    options = request[ExportOptions]
    refuse_other_files(options.store, STORE_WANTED)
    with Store(options.store, kind_of_store(options.store)) as opened:
        export_store(opened, options.output, canonical=options.canonical)
    return 0


COMMAND = Command("export", RESULTS, "unsilent export STORE.sqlite -o trials.csv", (ExportOptions,), export)
