"""Writes logs, configurations, step times and flight recorder dumps of a simulated incident."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from unsilent.detectors.series import Floats
from unsilent.incidents.planted_job import RATE
from unsilent.incidents.planted_workloads import BATCH
from unsilent.timeline.stragglers import PARTS
from unsilent.triage.farm.causes import rate_factor
from unsilent.triage.farm.planned import PlannedIncident
from unsilent.triage.farm.simulated_job import CHECKPOINT_INTERVAL, SimulatedJob, starts_again
from unsilent.triage.farm.watch import Watch
from unsilent.triage.parts import (
    CONFIGURATION_FILE,
    EARLIER_CONFIGURATION_FILE,
    FLIGHT_FOLDER,
    LOG_FILE,
    TIMELINE_FILE,
)

TIMELINE_STEPS, FLIGHT_ENTRIES, LOG_INTERVAL = 24, 16, 10
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [{host}]:29500"
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
)
"""Errors of gloo in ranks that wait for a rank whose process ended or which does not arrive."""


def write_optional_parts(
    planned: PlannedIncident, folder: Path, is_twin: bool, job: SimulatedJob, watch: Watch, seconds: Floats
) -> None:
    """Write the optional parts of a simulated incident's folder.

    ``seconds`` are the times of all steps, float64[ranks, steps, parts].
    """
    present, earlier = _configurations(planned, is_twin)
    _write_json(folder / CONFIGURATION_FILE, present)
    _write_json(folder / EARLIER_CONFIGURATION_FILE, earlier)
    for rank in range(planned.world_size):
        lines = "\n".join(_log(planned, rank, is_twin, job, watch))
        (folder / f"rank{rank}" / LOG_FILE).write_text(f"{lines}\n", encoding="utf-8")
    if planned.world_size == 1:
        return
    done = len(watch.rows)
    first = max(0, done - TIMELINE_STEPS)
    _write_json(folder / TIMELINE_FILE, {
        "schema": 1, "parts": PARTS, "ranks": [*range(planned.world_size)], "steps": [*range(first, done)],
        "seconds": seconds[:, first:].tolist(),
    })  # fmt: skip
    (folder / FLIGHT_FOLDER).mkdir(exist_ok=True)
    elements = sum(parameter.numel() for parameter in job.replicas[0].model.parameters())
    for rank in range(planned.world_size):
        has_stopped = planned.family == "stopped" and not is_twin
        if has_stopped and planned.kind == "killed process" and rank == planned.rank:
            continue
        waits = has_stopped and rank != planned.rank
        _write_json(folder / FLIGHT_FOLDER / f"rank{rank}.json", _flight(done, waits, elements))


def _configurations(planned: PlannedIncident, is_twin: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations of the job and of an earlier job, with harmless differences besides the cause."""
    planned_changes: list[dict[str, Any]] = []
    if not is_twin and planned.kind == "learning rate by plan":
        planned_changes = [{"step": planned.step, "learning_rate_factor": rate_factor(planned)}]
    if not is_twin and planned.kind == "other data for all":
        planned_changes = [{"step": planned.step, "data": "digits, inverted"}]
    present: dict[str, Any] = {
        "run_name": f"digits-{planned.seed % 997}", "workload": planned.workload, "world_size": planned.world_size,
        "data": "digits", "batch_size": BATCH, "seed": planned.seed, "optimizer": {"name": "Adam", "learning_rate": RATE},
        "planned_changes": planned_changes, "checkpoint_interval": CHECKPOINT_INTERVAL, "loader_workers": 4,
    }  # fmt: skip
    earlier = present | {"run_name": f"digits-{(planned.seed + 1) % 997}", "loader_workers": 2}
    if not is_twin and planned.family == "configuration":
        if planned.kind == "learning rate":
            present = present | {"optimizer": {"name": "Adam", "learning_rate": RATE * rate_factor(planned)}}
        if planned.kind == "seed":
            present = present | {"seed": planned.seed + 1}
    return present, earlier


def _log(planned: PlannedIncident, rank: int, is_twin: bool, job: SimulatedJob, watch: Watch) -> list[str]:
    """Lines of the log of a rank."""
    losses = [float(row[rank, -1]) for row in watch.rows]
    lines = [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(losses) if step % LOG_INTERVAL == 0]
    before = sum(step % LOG_INTERVAL == 0 for step in range(planned.step))
    if starts_again(planned):
        lines.insert(before, f"step {planned.step}: started again from a checkpoint")
    if job.has_failed_to_save and rank == 0:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"checkpoints/{planned.step}.safetensors")
        lines.insert(before, f"step {planned.step}: checkpoint not saved: {type(error).__name__}: {error}")
    if planned.family == "stopped" and not is_twin and rank != planned.rank:
        lines.append(
            CLOSED.format(host=f"10.0.0.{planned.rank + 1}") if planned.kind == "killed process" else TIMED_OUT
        )
    return lines


def _flight(done: int, waits: bool, elements: int) -> dict[str, Any]:
    """A flight recorder dump of the last collectives, one per step, in torch's format for gloo.

    Args:
        done: Number of completed steps.
        waits: Whether the rank waits in the collective of the next step.
    """
    last = done + waits
    numbers = range(max(1, last - FLIGHT_ENTRIES + 1), last + 1)
    entries = [
        {
            "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[elements]], "is_p2p": False,
            "op_id": number, "output_dtypes": ["Float"], "output_sizes": [[elements]], "p2p_seq_id": 0, "pg_id": 0,
            "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "record_id": number - 1,
            "retired": number <= done, "state": "scheduled", "time_created_ns": number * 10**8,
            "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0, "timeout_ms": 1_800_000,
        }
        for number in numbers
    ]  # fmt: skip
    status = {
        "last_completed_collective": str(done), "last_enqueued_collective": str(last), "last_started_collective": "-1",
    }  # fmt: skip
    return {
        "comm_lib_version": "", "entries": entries, "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": status}, "version": "2.10",
    }  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
