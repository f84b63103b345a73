"""Reads the traces of a job, whether they are profiler traces or an operation table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.strictjson import fields_by_name
from unsilent.timeline.job import Job

if TYPE_CHECKING:
    from unsilent.timeline.kineto import Recording


def load_job(paths: Sequence[str | Path]) -> Job:
    """The job that the given traces recorded, on one clock.

    Raises ``UsageError`` if they cannot be read.
    """
    if any(Path(path).suffix == ".parquet" for path in paths):
        if len(paths) > 1:
            raise UsageError(
                f"{len(paths)} traces were given; expected one operation table (.parquet), or profiler traces alone"
            )
        from unsilent.timeline.tables import read_operation_table

        return read_operation_table(paths[0])
    from unsilent.timeline.kineto import read_traces

    return job_of_recording(read_traces(paths))


def job_of_recording(recording: Recording) -> Job:
    """The recorded job on one clock, with the dependencies between its operations."""
    from unsilent.timeline.clocks import align_clocks
    from unsilent.timeline.edges import cut_waits, make_edges

    clocks = align_clocks(recording.operations, recording.anchors)
    before = recording.operations
    bounds = np.searchsorted(before.rank, np.arange(before.rank[-1] + 2 if len(before) else 1))

    def on_one_clock(rank: int, times: NDArray[np.float64]) -> NDArray[np.float64]:
        rows = slice(bounds[rank], bounds[rank + 1])
        moved = clocks.start[rows] - before.start[rows]  # constant before the first and after the last one
        return np.asarray(times + np.interp(times, before.start[rows], moved))

    times = {rank: on_one_clock(rank, of) for rank, of in recording.step_times.items()}
    gradients = {rank: of._replace(ready=on_one_clock(rank, of.ready)) for rank, of in recording.gradients.items()}
    memory = {
        rank: np.column_stack([on_one_clock(rank, rows[:, 0]), rows[:, 1:]]) for rank, rows in recording.memory.items()
    }
    parts = {rank: of._replace(times=on_one_clock(rank, of.times)) for rank, of in recording.parts.items()}
    end = before.end
    for rank in np.unique(before.rank):  # with their begins: operations that began when another one ended still do
        rank_rows = slice(bounds[rank], bounds[rank + 1])
        end[rank_rows] = on_one_clock(rank, end[rank_rows])
    operations = replace(before, start=clocks.start, duration=np.maximum(end - clocks.start, 0))
    operations, launches = cut_waits(operations, recording.lanes, recording.launches)
    return Job(**{
        **fields_by_name(recording, "launches", "anchors"), "operations": operations,
        "edges": make_edges(operations, recording.lanes, launches), "notes": (*recording.notes, *clocks.notes),
        "step_times": times, "gradients": gradients, "memory": memory, "parts": parts,
    })  # fmt: skip
