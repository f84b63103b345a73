"""The folder that the first alarm of a run creates: `incident.json`, and a subfolder for each rank.

    incidents/STEP-RUNID/       STEP of the training: `first_step` plus the step of the run
        incident.json           by rank 0: alarms, verdicts, settings, versions, checkpoints; `fault_verdict` once there is one
        rankR/                  each optional
            rank.json           host, device, digests of generators' states, batch indices
            series.npz          series around the alarm
            batch.safetensors   the batch of the step
            state.safetensors   the state that the step begins with

Files may be hostile: they are read with limits on size and depth, and no content is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from unsilent.basics.errors import UsageError, content_errors, system_errors
from unsilent.basics.plainfiles import parse_json, read_plain, replace_file
from unsilent.basics.strictjson import as_json_values
from unsilent.events.event_files import LAST_STEP, check_range, parse_fields
from unsilent.events.event_files import MOST_RANKS as ALL_RANKS
from unsilent.events.event_kinds import Alarm, Verdict, since_text
from unsilent.recovery.fault_codes import UNDETERMINED_EXIT_CODE
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.report.text import listed

SCHEMA = 1
INCIDENT_FILE, RANK_FILE, SERIES_FILE = "incident.json", "rank.json", "series.npz"
BATCH_FILE, STATE_FILE = "batch.safetensors", "state.safetensors"
FOLDER = "incidents"
"""Folder next to the events, with a subfolder for each incident."""
MOST_BYTES = 2**22
"""Largest size of ``incident.json`` or ``rank.json`` in bytes."""
MOST_RANKS = 4096
"""Largest number of ranks whose folders are searched."""
_RANK = re.compile(r"rank(\d{1,6})", re.ASCII)
Record = TypeVar("Record", "Incident", "RankPart")


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that the process of rank 0 saved and verified.

    Attributes:
        path: File or folder of the checkpoint.
        step: Step of the training; None if the program did not give it.
        time: Time of saving, in seconds since 1970.
        manifest: Path of its manifest.
        files: ``xxh3_128`` of its files by name, from the manifest; only the first files if there are many.
    """

    path: str
    step: int | None = None
    time: float
    manifest: str
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Content of ``incident.json``: the first alarm of a run and its consequences.

    Attributes:
        folder: Folder of the record.
        run: Identifier of the run, the same in all ranks.
        step, suspect: Step and suspect of the first verdict; suspect -1: undetermined. Steps count from 0 in each run.
        first_step: Step of the training at which the run continued; 0 if it is unknown.
        reason, tensor: Evidence that the suspect was found by, and its series.
        host, device: Host and device of the suspect.
        world_size: Number of ranks.
        time: Time of the first verdict, in seconds since 1970.
        settings, versions: Settings of the monitor, and versions of packages.
        alarms: Alarms of rank 0, up to the first verdict.
        verdicts: The first verdicts so far.
        checkpoints: Last checkpoints that the process of rank 0 saved and verified.
        fault_verdict: Verdict on the kind of fault; None if it is not decided yet.
    """

    folder: Path = Path()
    schema: int = SCHEMA
    run: str
    step: int
    first_step: int = 0
    suspect: int
    reason: str
    tensor: str
    host: str
    device: str
    world_size: int
    time: float
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    alarms: tuple[Alarm, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    fault_verdict: FaultVerdict | None = None

    @property
    def since(self) -> str:
        """The place where the incident began, such as ``step 90, rank 1, fingerprint of fc.weight``."""
        return since_text(self.step, self.suspect, self.tensor or self.reason)

    @property
    def training_step(self) -> int:
        """Step of the first verdict, counted from the beginning of the training."""
        return self.first_step + self.step

    @property
    def ranks(self) -> list[int]:
        """The ranks with a subfolder."""
        return ranks_in(self.folder)


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """Content of ``rank.json`` of one rank.

    Attributes:
        folder: Folder of the record.
        rank, host, device: Number, host and device of the rank.
        device_facts: Facts from the system about the device, by name, without those that could not be read.
        generators: Digests of the states of random generators, by name, when the incident was recorded.
        batch_indices: Indices of the samples of the step, if the loop knows them.
        alarms: Alarms of this rank, up to the first verdict.
        series_steps: Numbers of the steps in ``series.npz``.
        state_step: The step that begins with the state in ``state.safetensors``; None if there is no such file.
        state_since: The earlier step from which steps were executed again, on the same device, to compute that state; None if the
            state is from the first execution.
        problems: Sentences on parts that could not be recorded, and why.
    """

    folder: Path = Path()
    schema: int = SCHEMA
    rank: int
    host: str
    device: str
    device_facts: Mapping[str, str] = field(default_factory=dict)
    generators: Mapping[str, str] = field(default_factory=dict)
    batch_indices: tuple[int, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    series_steps: tuple[int, ...] = ()
    state_step: int | None = None
    state_since: int | None = None
    problems: tuple[str, ...] = ()

    def file(self, name: str) -> Path | None:
        """The path of a file in the rank's subfolder; None if there is no such file."""
        path = self.folder / name
        return path if path.is_file() and not path.is_symlink() else None


def find_incident(path: Path) -> Path:
    """The incident's folder: the path itself, or the only incident in a job's folder.

    Raises ``UsageError`` if there is none or more than one.
    """
    if (path / INCIDENT_FILE).exists() or not path.is_dir():
        return path
    above = path if path.name == FOLDER else path / FOLDER
    with system_errors(f"cannot read {above}", "check the path"):
        incidents = sorted(folder for folder in above.iterdir() if is_incident(folder)) if above.is_dir() else []
    if len(incidents) == 1:
        return incidents[0]
    if incidents:
        raise UsageError(
            f"{path} has {len(incidents)} incidents; give one of {listed((str(folder) for folder in incidents), 8)}"
        )
    raise UsageError(
        f"there is no incident in {path}; expected a folder with {INCIDENT_FILE}, or one that holds an incident in {FOLDER}/; "
        "if no alarm wrote one, make it with unsilent triage collect"
    )


def is_incident(folder: Path) -> bool:
    """Whether a folder is not a link and contains the record of an incident."""
    return _is_real_folder(folder) and (folder / INCIDENT_FILE).exists()


def read_incident(path: Path) -> Incident:
    """Read the incident in a folder; see `find_incident`.

    Raises ``UsageError`` if the record is invalid.
    """
    folder = find_incident(path)
    return replace(_read(Incident, folder / INCIDENT_FILE), folder=folder)


def ranks_in(folder: Path) -> list[int]:
    """The ranks with a subfolder in an incident's folder."""
    try:
        names = [part.name for part in folder.iterdir() if _RANK.fullmatch(part.name) and _is_real_folder(part)]
    except OSError:
        return []
    return sorted(int(name[4:]) for name in names)[:MOST_RANKS]


def read_rank_part(folder: Path, rank: int) -> RankPart:
    """Read the part of one rank.

    Raises ``UsageError`` if it is missing or invalid.
    """
    part_folder = folder / f"rank{rank}"
    if not _is_real_folder(part_folder):
        raise UsageError(
            f"{folder} has no part of rank {rank}; it has those of ranks {listed(map(str, ranks_in(folder)), 8) or 'none'}"
        )
    return replace(_read(RankPart, part_folder / RANK_FILE), folder=part_folder)


def write_record(folder: Path, record: Incident | RankPart) -> None:
    """Write ``incident.json`` or ``rank.json`` atomically.

    Raises ``OSError``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: value for name, value in vars(record).items() if name != "folder" and value is not None}
    for name in ("alarms", "verdicts"):
        if name in values:
            values[name] = [event.to_json() for event in values[name]]
    name = INCIDENT_FILE if isinstance(record, Incident) else RANK_FILE
    content = json.dumps(as_json_values(values), indent=1, ensure_ascii=False, allow_nan=False)
    replace_file(folder / name, content.encode(errors="replace") + b"\n")


def add_fault_verdict(folder: Path, verdict: FaultVerdict) -> None:
    """Write the verdict on the kind of fault into ``incident.json``, in place of an earlier one.

    Raises ``UsageError`` if the record cannot be read or written.
    """
    incident = replace(read_incident(folder), fault_verdict=verdict)
    with system_errors(f"cannot write {folder / INCIDENT_FILE}", "check the folder and its disk"):
        write_record(folder, incident)


def not_executed_verdict(alarm: Verdict | Incident, exit_code: int = UNDETERMINED_EXIT_CODE) -> FaultVerdict:
    """The undetermined verdict on an alarm whose step was not executed again."""
    return FaultVerdict(
        kind="undetermined", step=alarm.step, rank=alarm.suspect, host=alarm.host, device=alarm.device,
        reason=f"{alarm.reason}; the step was not executed again", exit_code=exit_code,
    )  # fmt: skip


def _read(kind: type[Record], path: Path) -> Record:
    if path.is_symlink():
        raise UsageError(f"{path} is a link; expected a file of its own; give the folder that a monitor wrote")
    content = read_plain(path, MOST_BYTES)
    advice = "mend or remove it, or give a folder that a monitor wrote"
    with content_errors(f"{path} is no record of an incident", advice):
        values = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError("expected an object")
        if (schema := values.get("schema")) != SCHEMA:
            raise ValueError(f"its schema is {str(schema)[:40]!r}, and this version reads {SCHEMA}")
        values.pop("folder", None)
        record = parse_fields(kind, values)
        if isinstance(record, Incident):
            _check_numbers(record)
        return record


def _check_numbers(incident: Incident) -> None:
    """Raise ``ValueError`` if steps, ranks or exit codes are impossible."""
    check_range("first_step", incident.first_step, 0, LAST_STEP)
    check_range("world_size", incident.world_size, 1, ALL_RANKS)
    check_range("step", incident.step, 0, LAST_STEP)
    check_range("suspect", incident.suspect, -1, ALL_RANKS)
    if (verdict := incident.fault_verdict) is not None:
        check_range("step", verdict.step, 0, LAST_STEP)
        check_range("rank", verdict.rank, -1, ALL_RANKS)
        check_range("exit_code", verdict.exit_code, 0, 255)


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
