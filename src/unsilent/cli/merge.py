"""``unsilent merge STORE STORE… -o OUT``: join stores of one campaign from several machines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Option, Request
from unsilent.cli.file_sorts import STORE_WANTED, refuse_other_files
from unsilent.cli.tables import show_lines
from unsilent.command import RESULTS, Command, DisplayOptions, output_option

NO_STORES = "no stores were named; give stores of one campaign, and --output for the store to create"


@dataclass(frozen=True)
class MergeOptions:
    """Options of ``unsilent merge``."""

    stores: Annotated[tuple[Path, ...], Option(
        "Stores of one campaign.", "", metavar="STORE", missing_error=NO_STORES, is_repeatable=True)] = ()  # fmt: skip
    output: Annotated[
        Path | None, output_option("The store to create, or an existing store of the same campaign to extend.")
    ] = None

    def __post_init__(self) -> None:
        if self.output is None:
            raise UsageError("no --output was given; name the store to create, or an existing one to extend")


def merge(request: Request) -> int:
    """Join stores of one campaign into one store.

    A trial that several stores hold is written once; its result must be the same in all of them. Nothing is written if the stores
    hold different campaigns, or different results for a trial.
    """
    from unsilent.campaigns.merging import merge_stores
    from unsilent.studies.campaign_kinds import kind_of_store

    options, display = request[MergeOptions], request[DisplayOptions]
    assert options.output is not None
    for store in options.stores:
        refuse_other_files(store, STORE_WANTED)
    merged = merge_stores(options.output, list(options.stores), kind_of_store(options.stores[0]))
    if display.as_json:
        print(json.dumps(merged.to_json(), indent=2))
    else:
        show_lines(*str(merged).splitlines(), plain=display.plain)
    return 0


COMMAND = Command(
    "merge", RESULTS, "unsilent merge a.sqlite b.sqlite -o all.sqlite", (MergeOptions, DisplayOptions), merge,
)  # fmt: skip
