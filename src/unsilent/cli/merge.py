"""``unsilent merge STORE STORE… -o OUT``: joins stores of one campaign that were made on several machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unsilent.cli import options as o


def merge(
    stores: Annotated[list[Path], typer.Argument(help="Stores of one campaign.", show_default=False)],
    output: Annotated[
        Path, typer.Option(*o.OUTPUT_FLAGS, help="The store to make, or one of the same campaign to extend.")
    ],
    as_json: o.Json = False,
) -> int:
    """Join stores of one campaign: trials that several hold are taken once, and must have ended the same.

    Nothing is written when the stores hold different campaigns, or one trial with different ends.
    """
    from unsilent.campaigns.merging import merge_stores
    from unsilent.studies.registered import kind_of

    merged = merge_stores(output, stores, kind_of(stores[0]))
    print(json.dumps(merged.to_json(), indent=2) if as_json else merged)
    return 0
