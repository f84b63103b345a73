"""Simulates a job and writes the folder of its incident."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unsilent.detectors.series import Floats, Recording
from unsilent.events.event_kinds import Alarm, Verdict
from unsilent.events.incident_folder import BATCH_FILE, SERIES_FILE, STATE_FILE, Incident, RankPart, write_record
from unsilent.monitor.attribution import UNDETERMINED, Suspect
from unsilent.monitor.incident_writer import STEPS_AFTER, STEPS_BEFORE, training_state
from unsilent.monitor.reporter import NO_ALARM
from unsilent.recovery.tensor_files import host_copy, write_tensors
from unsilent.timeline.stragglers import PARTS
from unsilent.triage.farm.optional_parts import write_optional_parts
from unsilent.triage.farm.planned import PlannedIncident
from unsilent.triage.farm.simulated_job import SimulatedJob
from unsilent.triage.farm.watch import DEVICE, SETTINGS, Watch, host_of, tensor_of
from unsilent.version import __version__

MEANS = {"loader": 0.002, "forward": 0.03, "early backward": 0.025, "late backward": 0.03, "optimizer": 0.005}
SPREAD, NOISY = 0.05, 4.0
"""Spread of the logarithms, and the factor by which it is larger in all ranks of a job with noisy times."""
LOADER = PARTS.index("loader")


def drawn_seconds(planned: PlannedIncident, steps: int, is_twin: bool) -> Floats:
    """Random seconds of each part of a step, float64[ranks, steps, parts].

    They are log-normal with equal means on all ranks, unless the cause changes them.
    """
    rng = np.random.default_rng([planned.seed, 2])
    noise = SPREAD * rng.standard_normal((steps, planned.world_size, len(PARTS))).transpose(1, 0, 2)
    factors = np.ones_like(noise)
    if not is_twin:
        if planned.kind == "noisy time":
            noise[:, planned.step :] *= NOISY
        elif planned.kind == "slow loader":
            factors[planned.rank, planned.step :, LOADER] = 3 + 17 * planned.draws[2]
        elif planned.kind == "slow rank":
            factors[planned.rank, planned.step :, LOADER + 1 :] = 1.3 + 1.2 * planned.draws[2]
    result: Floats = np.array([MEANS[part] for part in PARTS]) * factors * np.exp(noise)
    return result


NOTICED_AFTER = (2, 10)
"""Range of steps after a cause (which healthy jobs also have) until somebody notices it without an alarm."""
CHECKPOINTS = "checkpoints"
"""Folder of checkpoints in the folder of the incident, whose record names them by relative paths."""


@dataclass(frozen=True, eq=False)
class Moment:
    """A recorded step, with the state at its begin and the batch of each rank."""

    step: int
    states: list[Any]
    batches: list[Any]


def simulate(planned: PlannedIncident, folder: Path, is_twin: bool, step: int | None = None) -> int:
    """Simulate an incident, write its folder, and return the step that is recorded.

    Equal plans give equal incidents.

    Args:
        is_twin: Whether to leave out the cause.
        step: Step that is recorded; ``None``: the step of the first alarm after the cause began, or a later one.
    """
    job = SimulatedJob(planned, is_twin, folder / CHECKPOINTS)
    watch = Watch(job, planned.step)
    stops = planned.family == "stopped" and not is_twin
    noticed = step if step is not None else planned.step + _notice_delay(planned)
    recorded, last, has_begun = None, noticed + STEPS_AFTER, False
    while job.step < last:
        job.begin()
        watch.begin()
        is_open = job.step >= planned.step and not has_begun
        states = [host_copy(_state(replica.model, replica.optimizer)) for replica in job.replicas] if is_open else []
        job.compute()
        batches = [[{"images": replica.batch.images, "labels": replica.batch.labels}] for replica in job.replicas]
        if stops and job.step == planned.step:
            recorded = Moment(job.step, states, batches)
            break
        is_alarm = watch.read() and step is None
        if is_open and (is_alarm or job.step == noticed):
            recorded = Moment(job.step, states, batches)
        if is_alarm and not has_begun:
            has_begun, last = True, job.step + STEPS_AFTER
        job.update()
        watch.end()
    assert recorded is not None
    _write(planned, folder, is_twin, job, watch, recorded)
    return recorded.step


def _notice_delay(planned: PlannedIncident) -> int:
    if planned.family == "stopped":
        return 0
    return int(np.random.default_rng([planned.seed, 1]).integers(*NOTICED_AFTER))


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The training state as the monitor records it, without the states of random generators."""
    return {**training_state(model, [optimizer]), "generators": {}}


def _write(
    planned: PlannedIncident, folder: Path, is_twin: bool, job: SimulatedJob, watch: Watch, moment: Moment
) -> None:
    """Write all files of the incident's folder except checkpoints."""
    step, done = moment.step, len(watch.rows)
    alarms = [alarm for alarm in watch.alarms if alarm.step <= step]
    seconds = drawn_seconds(planned, step + STEPS_AFTER + 1, is_twin)
    write_record(folder, _incident(planned, job, step, alarms, watch.first_suspect))
    first = max(0, step + 1 - STEPS_BEFORE)
    ends = np.cumsum(seconds.sum(2).max(0))[first:done]
    rows = np.stack(watch.rows)[first:]
    for rank in range(planned.world_size):
        rank_folder = folder / f"rank{rank}"
        is_killed = planned.kind == "killed process" and rank == planned.rank and not is_twin
        write_record(rank_folder, RankPart(
            rank=rank, host=host_of(rank), device=DEVICE, alarms=tuple(alarm for alarm in alarms if alarm.rank == rank),
            series_steps=tuple(range(first, done)), state_step=None if is_killed else step,
        ))  # fmt: skip
        values = rows[:, rank]
        Recording(watch.series, values, np.ones(values.shape, np.bool_), ends - ends[0]).save(rank_folder / SERIES_FILE)
        if not is_killed:
            write_tensors(rank_folder / BATCH_FILE, moment.batches[rank])
            write_tensors(rank_folder / STATE_FILE, moment.states[rank])
    write_optional_parts(planned, folder, is_twin, job, watch, seconds[:, :done])


def _incident(
    planned: PlannedIncident, job: SimulatedJob, step: int, alarms: list[Alarm], first_suspect: Suspect | None
) -> Incident:
    raised = [alarm for alarm in alarms if alarm.level == "alarm"]  # nothing is recorded on a warning
    suspect = first_suspect if raised and first_suspect else Suspect(UNDETERMINED, NO_ALARM)
    tensor, time = tensor_of(raised, suspect), float(step)
    host, device = (host_of(suspect.rank), DEVICE) if suspect.rank >= 0 else ("", "")
    verdict = Verdict(
        time=time, rank=0, step=raised[0].step if raised else step, suspect=suspect.rank, reason=suspect.reason, action="log",
        outcome="logged" if raised else "recorded", host=host, device=device, tensor=tensor,
        ranks=tuple(sorted({alarm.rank for alarm in raised})),
    )  # fmt: skip
    return Incident(
        run=f"{planned.seed:08x}", step=step, suspect=suspect.rank, reason=suspect.reason, tensor=tensor, host=host,
        device=device, world_size=planned.world_size, time=time, settings=SETTINGS,
        versions={"unsilent": __version__, "torch": torch.__version__, "python": platform.python_version()},
        alarms=tuple(alarm for alarm in alarms if alarm.rank == 0), verdicts=(verdict,),
        checkpoints=tuple(checkpoint for checkpoint in job.saved if checkpoint.step is not None and checkpoint.step <= step),
    )  # fmt: skip
