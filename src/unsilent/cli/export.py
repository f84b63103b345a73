"""``unsilent export``: every trial of a campaign as a file or on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unsilent.cli import options as o


def export(
    store: o.StoreFile,
    output: Annotated[
        Path | None,
        typer.Option(
            *o.OUTPUT_FLAGS,
            help="File; .csv, .json, .jsonl or .parquet says the format.",
            show_default="JSON lines on stdout",
        ),
    ] = None,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="For comparison: sorted, without time, path, host and worker.")
    ] = False,
) -> int:
    """Export every trial of a campaign."""
    from unsilent.campaigns.export import export_store
    from unsilent.campaigns.store import Store
    from unsilent.studies.registered import kind_of

    with Store(store, kind_of(store)) as opened:
        export_store(opened, output, canonical=canonical)
    return 0
