"""Reads traces of a job, of whatever sort they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unsilent.errors import UsageError
from unsilent.timeline.job import Job


def load_job(paths: Sequence[str | Path]) -> Job:
    """The job of these traces; raises ``UsageError`` for traces of no known sort."""
    if [Path(path).suffix for path in paths] == [".parquet"]:
        from unsilent.timeline.tables import read_operation_table

        return read_operation_table(paths[0])
    names = ", ".join(str(path) for path in paths[:3])
    raise UsageError(f"{names}: no traces of a known sort; expected one operation table (.parquet)")
