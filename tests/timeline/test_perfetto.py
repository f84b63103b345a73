"""The archive for Perfetto holds what was recorded, rank by rank, with a manifest of its format."""

from __future__ import annotations

import json
import zipfile

import pytest

from timeline.ddp_jobs import ddp_job
from unsilent.basics.errors import UsageError
from unsilent.timeline.diagnosis import critical_path
from unsilent.timeline.perfetto import MANIFEST, write_perfetto


def test_every_operation_of_both_runs_is_there(tmp_path):
    job = ddp_job(2, 3)
    operations = job.operations
    critical = {link.operation for link in critical_path(job, 1)}
    runs = {
        "recorded": (operations.start, operations.duration),
        "replayed": (2 * operations.start, 2 * operations.duration),
    }
    write_perfetto(tmp_path / "job.zip", job, runs, critical)
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        files = json.loads(archive.read(MANIFEST))["perfetto_manifest"]
        assert files["version"] == 1
        assert [one["path"] for one in files["files"]] == archive.namelist()[1:]
        traces = {name: json.loads(archive.read(name))["traceEvents"] for name in archive.namelist()[1:]}
    assert len(traces) == 4
    assert len({one["machine"]["name"] for one in files["files"]}) == 4
    spans = [event for trace in traces.values() for event in trace if event["ph"] == "X"]
    assert len(spans) == 2 * len(operations)
    assert sum("critical path" in event["args"] for event in spans) == 2 * len(critical)
    recorded = [event for event in traces["recorded/rank-1.json"] if event["ph"] == "X"]
    of_rank = operations.rank == 1
    assert [event["ts"] for event in recorded] == pytest.approx(1e6 * operations.start[of_rank], abs=1e-3)
    assert {event["pid"] for event in recorded} != {event["pid"] for event in traces["replayed/rank-1.json"]}


def test_a_file_of_something_else_is_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    job = ddp_job(2, 2)
    with pytest.raises(UsageError, match="is not a .zip file"):
        write_perfetto(tmp_path / "notes.txt", job, {"recorded": (job.operations.start, job.operations.duration)})
    assert (tmp_path / "notes.txt").read_text() == "mine"
