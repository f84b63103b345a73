"""Makes a folder of incidents in several processes, and continues an interrupted one.

    farm.json               name, seed, numbers of incidents, versions
    NNNNN/planned.json      the cause and its place; no query reads it
    NNNNN/incident/         the folder of the incident
    NNNNN/twin/             the same run without the cause, recorded at the same step
    labels.jsonl            a line for each incident: the finding of each query, and its grade

A folder with a number is complete, as it gets its name once all its content exists.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.options import check_count
from unsilent.basics.plainfiles import parse_json, read_plain, replace_file
from unsilent.triage.bundle import Bundle
from unsilent.triage.farm.grading import label_collection
from unsilent.triage.farm.planned import (
    INCIDENT_FOLDER,
    MOST_BYTES,
    PLANNED_FILE,
    TWIN_FOLDER,
    PlannedIncident,
    folder_of,
    planned_incidents,
    read_planned,
    unfinished_folder,
    write_planned,
)
from unsilent.version import __version__

if TYPE_CHECKING:
    from unsilent.campaigns.observer import Observer

FARM_FILE = "farm.json"
SCHEMA, MOST_INCIDENTS = 1, 99_999


@dataclass(frozen=True)
class MadeIncident:
    """An incident of a collection, with its numbers of alarms.

    Attributes:
        alarms, twin_alarms: Number of alarms that were raised, and in the run without the cause.
    """

    planned: PlannedIncident
    folder: Path
    alarms: int
    twin_alarms: int


def make_collection(
    folder: Path, count: int, seed: int, real: int = 0, workers: int = 1, observer: Observer | None = None
) -> list[MadeIncident]:
    """Make and grade the incidents that the folder lacks, and return all of its incidents.

    Args:
        count: Number of simulated incidents.
        seed: Seed of all random choices.
        real: Number of incidents of two real processes under the real monitor, which follow the simulated ones.
        workers: Number of processes that simulate; incidents do not depend on it.

    Raises:
        UsageError: The folder has another collection, or cannot be written.
    """
    check_count("--incidents", count, 0, MOST_INCIDENTS)
    check_count("--real", real, 0, MOST_INCIDENTS - count)
    check_count("--seed", seed, 0, 2**32 - 1)
    check_count("--workers", workers, 1, 1024)
    if not count + real:
        raise UsageError("no incidents were asked for; give --incidents 600, or --real 100")
    from unsilent.triage.farm.real_job import make_real, real_incidents

    _begin(folder, {"seed": seed, "count": count, "real": real})
    planned = planned_incidents(count, seed)
    _simulate_all(
        folder, [incident for incident in planned if not folder_of(folder, incident.number).exists()], workers, observer
    )
    if missing := [
        incident for incident in real_incidents(real, seed, count) if not folder_of(folder, incident[0].number).exists()
    ]:
        make_real(folder, missing, observer)
    label_collection(folder, workers)
    return read_collection(folder)


def read_collection(folder: Path) -> list[MadeIncident]:
    """All incidents of a collection, ordered by number.

    Raises ``UsageError`` if one cannot be read.
    """
    read_plain(folder / FARM_FILE, MOST_BYTES)
    numbers = sorted(entry.name for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir())
    return [
        MadeIncident(
            read_planned(folder / name / PLANNED_FILE), folder / name,
            *(len(Bundle(folder / name / part).alarms()) for part in (INCIDENT_FOLDER, TWIN_FOLDER)),
        )
        for name in numbers
    ]  # fmt: skip


def _begin(folder: Path, options: dict[str, int]) -> None:
    """Write ``farm.json``, or check that an existing one has the same options."""
    path = folder / FARM_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            import torch

            if any(folder.iterdir()):
                raise UsageError(f"{folder} has files and no {FARM_FILE}; give a folder that is empty or new")
            versions = {"unsilent": __version__, "torch": torch.__version__, "python": platform.python_version()}
            values = {"schema": SCHEMA, "name": folder.absolute().name, **options, "versions": versions}
            replace_file(path, (json.dumps(values, indent=1) + "\n").encode())
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; check the folder and its disk") from None
    try:
        there: Any = parse_json(read_plain(path, MOST_BYTES))
        known = {name: there[name] for name in ("schema", *options)}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not that of a collection: {first_line(error)[:200]}; give another folder"
        ) from None
    if known != {"schema": SCHEMA, **options}:
        options_text = ", ".join(f"{name} {str(value)[:20]}" for name, value in known.items())
        wanted = ", ".join(f"{name} {value}" for name, value in options.items())
        raise UsageError(f"{folder} has a collection of {options_text}; asked for was {wanted}; give another folder")


def _simulate_all(folder: Path, missing: Sequence[PlannedIncident], workers: int, observer: Observer | None) -> None:
    """Simulate the missing incidents; complete ones remain after an interrupt."""
    if not missing:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(missing)), context, _begin_worker) as pool:
        futures = [pool.submit(simulate_pair, folder, incident) for incident in missing]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if observer is not None:
                    observer.loading("incidents", done, len(missing))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin_worker() -> None:
    """Let a worker ignore Ctrl-C, so that it finishes its incident."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def simulate_pair(folder: Path, planned: PlannedIncident) -> None:
    """Make a simulated incident and its twin, the same run without the cause."""
    from unsilent.triage.farm.record import simulate

    unfinished = unfinished_folder(folder, planned.number)
    write_planned(unfinished, planned)
    step = simulate(planned, unfinished / INCIDENT_FOLDER, is_twin=False)
    simulate(planned, unfinished / TWIN_FOLDER, is_twin=True, step=step)
    unfinished.rename(folder_of(folder, planned.number))
