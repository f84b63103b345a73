"""``unsilent merge STORE STORE… -o OUT``: joins stores of one campaign that were made on several machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unsilent.cli import typer_options as o
from unsilent.cli.tables import show_lines


def merge(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE", help="Stores of one campaign.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option(*o.OUTPUT_FLAGS, help="The store to create, or an existing store of the same campaign to extend."),
    ],
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Join stores of one campaign into one store.

    A trial that several stores hold is written once; its result must be the same in all of them. Nothing is written if the
    stores hold different campaigns, or different results for a trial.
    """
    from unsilent.campaigns.merging import merge_stores
    from unsilent.studies.campaign_kinds import kind_of_store

    merged = merge_stores(output, stores, kind_of_store(stores[0]))
    if as_json:
        print(json.dumps(merged.to_json(), indent=2))
    else:
        show_lines(*str(merged).splitlines(), plain=plain)
    return 0
