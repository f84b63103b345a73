"""Writes a job as a zip file for Perfetto, with several runs of all ranks on one time axis.

The archive holds a Chrome trace for each rank of each run, and ``perfetto_manifest.json`` (version 1), which makes Perfetto
show them on one time axis: https://perfetto.dev/docs/reference/perfetto-manifest
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import replace_file
from unsilent.timeline.diagnosis import Link
from unsilent.timeline.job import KINDS, PHASES, Job
from unsilent.timeline.replay import Replay
from unsilent.timeline.step_split import Floats

MANIFEST = "perfetto_manifest.json"
Run = tuple[Floats, Floats]
"""Start and duration of every operation of a job, in seconds."""


def write_perfetto(path: Path, job: Job, runs: Mapping[str, Run], critical: Collection[int] = ()) -> None:
    """Write a zip file of one or several runs of a job for Perfetto.

    Args:
        path: Path of the zip file. If the file exists, it must be a zip file.
        runs: Times by the name of a run, for example ``recorded``.
        critical: Operations on a critical path, which are marked.

    Raises:
        UsageError: The file cannot be written, or exists and is not a zip file.
    """
    if path.exists() and not zipfile.is_zipfile(path):
        raise UsageError(f"{path} exists and is not a .zip file; give another name")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        names = [(run, rank, f"{run}/rank-{rank}.json") for run in runs for rank in job.ranks]
        archive.writestr(MANIFEST, json.dumps(manifest(names)))
        for number, (run, rank, name) in enumerate(names):
            trace = {
                "traceEvents": list(_events(job, rank, runs[run], number, f"{run}, rank {rank}", frozenset(critical)))
            }
            archive.writestr(name, json.dumps(trace))
    try:
        replace_file(path, buffer.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another name") from None


def write_runs(path: Path, job: Job, critical: Collection[Link]) -> None:
    """Write an archive with the recorded run of a job and its replay without unexplained gaps."""
    replay = Replay(job)
    start, end = replay.run(np.maximum(replay.durations, 0), np.zeros(len(replay.gaps)))
    operations = job.operations
    runs = {"recorded": (operations.start, operations.duration), "replayed without gaps": (start, end - start)}
    write_perfetto(path, job, runs, {link.operation for link in critical})


def manifest(files: Collection[tuple[str, int, str]]) -> dict[str, Any]:
    """The manifest that groups the files of an archive by run and rank on one clock.

    ``files`` holds the run, rank and name of each file.
    """
    entries = [
        {"path": name, "clocks": {"offset_ns": 0}, "machine": {"name": f"{run}, rank {rank}"}}
        for run, rank, name in files
    ]
    return {"perfetto_manifest": {"version": 1, "files": entries}}


def _events(
    job: Job, rank: int, run: Run, process: int, title: str, critical: frozenset[int]
) -> Iterator[dict[str, Any]]:
    operations, (start, duration) = job.operations, run
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    of_rank = np.flatnonzero(operations.rank == rank)
    for lane in np.unique(operations.lane[of_rank]):
        yield {
            "ph": "M",
            "pid": process,
            "tid": int(lane),
            "name": "thread_name",
            "args": {"name": job.lanes[lane].name},
        }
    for index in of_rank.tolist():
        further: dict[str, Any] = {"phase": PHASES[operations.phase[index]]}
        if operations.collective[index] >= 0:
            further |= {"collective": int(operations.collective[index]), "bytes": int(operations.size[index])}
        if index in critical:
            further["critical path"] = True
        yield {
            "ph": "X", "pid": process, "tid": int(operations.lane[index]), "name": operations.names[operations.name[index]],
            "cat": KINDS[operations.kind[index]] + (",critical" if index in critical else ""),
            "ts": round(1e6 * float(start[index]), 3), "dur": round(1e6 * float(duration[index]), 3), "args": further,
        }  # fmt: skip
