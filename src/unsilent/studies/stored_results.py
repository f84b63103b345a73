"""Reads the results of stored campaigns and of monitored trainings."""

from __future__ import annotations

import os
from typing import cast

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.options import check_path
from unsilent.campaigns.store import open_store
from unsilent.campaigns.stored_command import stored_options
from unsilent.events.event_files import has_events
from unsilent.events.run_report import WatchedRun
from unsilent.report.shown import Shown
from unsilent.studies.campaign_kinds import kind_of_store


@names_arguments
def read_result(path: str | os.PathLike[str]) -> Shown:
    """Read the result of a stored campaign, or the last run in the events of a monitored training.

    Args:
        path: Store of any kind of campaign, file of events of a monitored training, or folder with such files of one job.

    Raises:
        UsageError: the store has too few trials for a result, or the events cannot be read.
        StoreError: the file is not a store, or cannot be used.
    """
    path = check_path("path", path)
    if has_events(path):
        return WatchedRun.read(path)
    kind = kind_of_store(path)
    with open_store(path, kind) as store:
        return cast("Shown", store.analyse(**vars(stored_options(store, kind.analysis_options))))
