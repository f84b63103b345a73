"""Makes incidents from trainings in two real processes under the real monitor, with planted anomalies."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from unsilent.basics.errors import UnsilentError
from unsilent.events.incident_folder import FOLDER, find_incident, read_incident
from unsilent.incidents.plant import VARIETIES, WORKLOADS, plant
from unsilent.incidents.plant import PlantedIncident as PlantedAnomaly
from unsilent.incidents.planted_job import run_planted
from unsilent.recovery import step_replay
from unsilent.recovery.fault_codes import FaultKind
from unsilent.triage.farm.naming import REAL
from unsilent.triage.farm.planned import (
    INCIDENT_FOLDER,
    TWIN_FOLDER,
    PlannedIncident,
    folder_of,
    unfinished_folder,
    write_planned,
)
from unsilent.triage.farm.record import NOTICED_AFTER

if TYPE_CHECKING:
    from unsilent.campaigns.observer import Observer

T = TypeVar("T")
RealIncident = tuple[PlannedIncident, PlantedAnomaly]
KINDS: tuple[FaultKind, ...] = (*VARIETIES, "benign")
"""Kinds of faults, used in turn; two of seven are benign."""
RANKS = 2
SECONDS = 120.0
"""Most seconds for the start of a gang, and for an incident."""


def real_incidents(count: int, seed: int, first_number: int) -> list[RealIncident]:
    """The planned real incidents of a collection, equal for equal seeds."""
    result = []
    for number in range(count):
        rng = np.random.default_rng([seed, number, len(REAL)])
        anomaly = plant(
            KINDS[number % len(KINDS)], world_size=RANKS, seed=int(rng.integers(2**31)), workload=str(rng.choice(WORKLOADS))
        )  # fmt: skip
        rank = -1 if anomaly.kind == "checkpoint" or anomaly.variety == "learning rate" else anomaly.rank
        draws = (*anomaly.draws, float(rng.random()))
        result.append((PlannedIncident(
            first_number + number, f"{REAL}{anomaly.kind}", anomaly.variety, anomaly.workload, RANKS, rank, anomaly.step,
            anomaly.seed, draws,
        ), anomaly))  # fmt: skip
    return result


def make_real(folder: Path, missing: Sequence[RealIncident], observer: Observer | None) -> None:
    """Make the missing real incidents and their twins.

    Raises ``UnsilentError`` if a process ends early; complete incidents remain.
    """

    def progress() -> None:
        if observer is not None:
            done = sum(folder_of(folder, planned.number).exists() for planned, _ in missing)
            observer.loading("real incidents", done, len(missing))

    run_gang(RANKS, _make_all, (folder, missing), SECONDS * (1 + len(missing)), progress)


def run_gang(
    ranks: int,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    seconds: float,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Call a function with the rank and the arguments in each of several new processes.

    Raises ``UnsilentError`` if one ends early or they take longer than this many seconds.
    """
    context, end = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as meeting_folder:
        meeting = str(Path(meeting_folder, "meeting"))
        gang = [context.Process(target=_in_gang, args=(n, ranks, meeting, work, arguments)) for n in range(ranks)]
        try:
            for process in gang:
                process.start()
            while any(process.is_alive() for process in gang) and not any(process.exitcode for process in gang):
                if time.monotonic() > end:
                    raise UnsilentError(f"{ranks} processes took longer than {seconds:.0f} s; run it again to go on")
                gang[0].join(0.5)
                progress()
            if any(process.exitcode for process in gang):
                raise UnsilentError("a process ended early, with what it has printed above; run it again to go on")
        finally:
            for process in gang:
                process.kill()
                process.join()


def _in_gang(rank: int, ranks: int, meeting: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    step_replay.SECONDS = 1.0
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    work(rank, *arguments)
    if ranks > 1:
        dist.destroy_process_group()


def _make_all(rank: int, folder: Path, missing: Sequence[RealIncident]) -> None:
    for planned, anomaly in missing:
        unfinished = folder / unfinished_folder(folder, planned.number).name if rank == 0 else folder
        unfinished = Path(_of_first_rank(str(unfinished)))
        incident = unfinished / "job"
        _run(anomaly, rank, incident)
        if not _of_first_rank((incident / FOLDER).exists()):
            delay = int(np.random.default_rng([planned.seed, 1]).integers(*NOTICED_AFTER))
            _run(anomaly, rank, incident, noticed=planned.step + delay)
        step = _of_first_rank(read_incident(incident).step if rank == 0 else 0)
        _run(anomaly, rank, unfinished / "twin job", has_anomaly=False, noticed=step)
        if rank == 0:
            for job, name in ((incident, INCIDENT_FOLDER), (unfinished / "twin job", TWIN_FOLDER)):
                find_incident(job).rename(unfinished / name)
                shutil.rmtree(job)
            write_planned(unfinished, planned)
            unfinished.rename(folder_of(folder, planned.number))


def _run(anomaly: PlantedAnomaly, rank: int, job: Path, **how: Any) -> None:
    """Run one training on all ranks, with a monitor that writes into an empty folder."""
    if rank == 0:
        shutil.rmtree(job, ignore_errors=True)
        job.mkdir()
    dist.barrier()
    run_planted(anomaly, rank, events=job / "events.jsonl", **how)
    dist.barrier()


def _of_first_rank(value: T) -> T:
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]
