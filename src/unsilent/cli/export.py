"""``unsilent export``: every trial of a campaign as a file or on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unsilent.cli import typer_options as o


def export(
    store: o.StoreFile,
    output: Annotated[
        Path | None,
        typer.Option(
            *o.OUTPUT_FLAGS,
            help="Output file. Its ending sets the format: .csv, .json, .jsonl or .parquet. [default: JSON lines on stdout]",
            show_default=False,
        ),
    ] = None,
    canonical: Annotated[
        bool,
        typer.Option(
            "--canonical",
            help="Sort the trials and leave out time, path, host and worker, so that two exports can be compared.",
        ),
    ] = False,
) -> int:
    """Export every trial of a campaign."""
    from unsilent.campaigns.export import export_store
    from unsilent.campaigns.store import Store
    from unsilent.studies.campaign_kinds import kind_of_store

    with Store(store, kind_of_store(store)) as opened:
        export_store(opened, output, canonical=canonical)
    return 0
