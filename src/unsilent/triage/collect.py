"""Writes the folder of an incident from the files that a job left, also if no alarm recorded one."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import open_plain, parse_json, read_plain
from unsilent.basics.yaml_text import load_yaml
from unsilent.events.incident_folder import (
    FOLDER,
    INCIDENT_FILE,
    Incident,
    SavedCheckpoint,
    find_incident,
    is_incident,
    ranks_in,
    read_incident,
    write_record,
)
from unsilent.report.text import count_text, listed
from unsilent.triage import job_files, parts
from unsilent.triage.collected import CHECKPOINTS, Collected, CollectedPart
from unsilent.triage.log_errors import last_step
from unsilent.triage.optional_parts import DEEPEST, MOST_CONFIGURATION, read_dump, settings_of

MOST_CHECKPOINTS = 8
"""Most checkpoints of a job that are collected, the last ones."""
LONGEST_PATH = 1024


def collect(
    job: Path, output: Path, step: int | None = None, earlier: Path | None = None, report: str | None = None
) -> Collected:
    """Write the folder of an incident.

    Args:
        job: Folder of a job, or of an incident in one.
        output: Folder to write, which must be empty or not exist.
        step: Step of the incident if no alarm gives it; by default the last one that a trace or a log names.
        earlier: File with the settings of an earlier job.
        report: Report in words on what somebody saw, or a file with it.

    Raises:
        UsageError: A folder or a file is missing or unsuitable, or a step is given for an incident that has one.
    """
    recorded, root = _recorded_incident(job)
    if recorded is not None and step is not None:
        raise UsageError(f"--step is {step}, and {recorded} says which step it is; leave --step out")
    _check_output(root, output)
    files, reports = job_files.files_below(root), dict(_given_parts(report, earlier))
    collection = _Collection(root, output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        incident = collection.copy_incident(recorded) if recorded is not None else None
        for part, content in reports.items():
            (output / part.name).write_bytes(content)
        collected = (*reports, *collection.from_job(files))
        incident = incident or _new_incident(collection, collection.last_step if step is None else step)
        saved = {
            saved_checkpoint.path: saved_checkpoint
            for saved_checkpoint in (*incident.checkpoints, *collection.checkpoints)
        }
        incident = replace(incident, folder=output, checkpoints=tuple(saved.values()))
        write_record(output, incident)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}; check the folder and its disk") from None
    return Collected(job, output, incident, recorded is None, collected)


def _recorded_incident(job: Path) -> tuple[Path | None, Path]:
    """The recorded incident of a job, or None without one, and the folder of the job."""
    if not job.is_dir():
        raise UsageError(f"{job} is no folder; give that of a job")
    if is_incident(job):
        return job, job.absolute().parent.parent if job.absolute().parent.name == FOLDER else job
    has_incident = (job / FOLDER).is_dir() and any(is_incident(entry) for entry in (job / FOLDER).iterdir())
    return find_incident(job) if has_incident else None, job


def _check_output(root: Path, output: Path) -> None:
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(root)):
        raise UsageError(f"{output} lies in {root}, which is not changed; give -o a folder elsewhere")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} is not empty; give -o a folder that is empty or not there")


def _new_incident(collection: _Collection, step: int) -> Incident:
    ranks = max([collection.world_size, *(rank + 1 for rank in ranks_in(collection.output))])
    return Incident(
        run="", step=step, suspect=-1, reason="collected, not raised by an alarm", tensor="", host="", device="",
        world_size=ranks, time=time.time(), settings={}, versions={},
    )  # fmt: skip


class _Collection:
    """Copies parts of a job to the folder of an incident, and notes the steps and ranks that they name.

    Attributes:
        last_step: Last step that a trace or a log names; 0 if there is none.
        world_size: Number of ranks found, at least 1.
        checkpoints: Checkpoints with manifests.
    """

    def __init__(self, root: Path, output: Path) -> None:
        self.root, self.output = root, output
        self.last_step, self.world_size = 0, 1
        self.checkpoints: list[SavedCheckpoint] = []

    def copy_incident(self, recorded: Path) -> Incident:
        """Copy all plain files of a recorded incident and of its folders."""
        incident = read_incident(recorded)
        folders = [entry for entry in recorded.iterdir() if entry.is_dir() and not entry.is_symlink()]
        for path in (*recorded.iterdir(), *(file for entry in folders for file in entry.iterdir())):
            if path.is_file() and not path.is_symlink() and path.name != INCIDENT_FILE:
                target = self.output / path.relative_to(recorded)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        return incident

    def from_job(self, files: list[Path]) -> Iterator[CollectedPart]:
        """Collect the optional parts of an incident from the files of the job."""
        takers: dict[str, Callable[[list[Path]], tuple[str, str]]] = {
            parts.TIMELINE_FILE: self._take_traces, parts.FLIGHT_FOLDER: self._take_dumps, parts.LOG_FILE: self._take_logs,
            CHECKPOINTS: self._take_manifests, parts.CONFIGURATION_FILE: self._take_configuration,
        }  # fmt: skip
        for name, take in takers.items():
            try:
                source, problem = take(files)
            except UsageError as error:
                source, problem = "", str(error)
            yield CollectedPart(name, source, problem)

    def _take_traces(self, files: list[Path]) -> tuple[str, str]:
        if not (traces := job_files.traces_in(files)):
            return "", ""
        from unsilent.timeline.load import load_job
        from unsilent.timeline.stragglers import PARTS, has_like_parts, part_seconds

        job = load_job(traces)
        if not has_like_parts(job):
            return (
                "",
                f"steps in {traces[0].parent} are not alike on all ranks; run: unsilent timeline {traces[0].parent}",
            )
        seconds = part_seconds(job).astype(object)
        seconds[seconds != seconds] = None  # NaN: a rank has no such part
        values = (1, PARTS, [*map(int, job.ranks)], [*map(int, job.steps)], seconds.tolist())
        content = json.dumps(dict(zip(parts.TIMELINE_KEYS, values, strict=True)), allow_nan=False)
        (self.output / parts.TIMELINE_FILE).write_text(content)
        self._saw(max(job.steps, default=0), job.world_size)
        return str(traces[0].parent), ""

    def _take_dumps(self, files: list[Path]) -> tuple[str, str]:
        taken, problems = list[str](), list[str]()
        for rank, path in sorted(job_files.dumps_in(files).items()):
            try:
                read_dump(path)
            except UsageError as error:
                problems.append(str(error))
                continue
            (self.output / parts.FLIGHT_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(path, self.output / parts.FLIGHT_FOLDER / f"rank{rank}.json")
            taken.append(str(path))
            self._saw(0, rank + 1)
        return listed(taken, 1), listed(problems, 1)

    def _take_logs(self, files: list[Path]) -> tuple[str, str]:
        logs = job_files.logs_in(files)
        unnamed, problem = logs.pop(None, []), ""
        if unnamed and not logs and len(unnamed) == 1:
            logs, problem = {0: unnamed}, f"{unnamed[0].name} names no rank, and was taken for the log of rank 0"
        elif unnamed:
            problem = f"{count_text(len(unnamed), 'log')} without a rank in the name, such as {unnamed[0].name}"
        for rank, paths in sorted((rank, paths) for rank, paths in logs.items() if rank is not None):
            rank_folder = self.output / f"rank{rank}"
            rank_folder.mkdir(exist_ok=True)
            (rank_folder / parts.LOG_FILE).write_bytes(b"\n".join(map(_tail, paths))[-parts.MOST_LOG :])
            self._saw(last_step(rank_folder / parts.LOG_FILE) or 0, rank + 1)
        return listed((str(path) for paths in logs.values() for path in paths), 1), problem

    def _take_manifests(self, files: list[Path]) -> tuple[str, str]:
        from unsilent.checkpoints.manifest import read_manifest

        problems, saved = list[str](), list[SavedCheckpoint]()
        for checkpoint, path in job_files.manifests_in(files).items():
            try:
                manifest, written = read_manifest(path), path.stat().st_mtime
            except UsageError as error:
                problems.append(str(error))
                continue
            name, of = str(checkpoint.absolute()), str(path.absolute())
            saved.append(SavedCheckpoint(path=name, manifest=of, step=manifest.step, time=written))
        saved.sort(key=lambda checkpoint: (-1 if checkpoint.step is None else checkpoint.step, checkpoint.time))
        self.checkpoints = saved[-MOST_CHECKPOINTS:]
        return listed((checkpoint.path for checkpoint in self.checkpoints), 1), listed(problems, 1)

    def _take_configuration(self, files: list[Path]) -> tuple[str, str]:
        if (path := job_files.configuration_in(files)) is None:
            return "", ""
        (self.output / parts.CONFIGURATION_FILE).write_bytes(_configuration_content(path))
        return str(path), ""

    def _saw(self, step: int, ranks: int) -> None:
        self.last_step, self.world_size = max(self.last_step, step), max(self.world_size, ranks)


def _given_parts(report: str | None, earlier: Path | None) -> Iterator[tuple[CollectedPart, bytes]]:
    """The user's report and the configuration of an earlier job, each with its content.

    Raises ``UsageError`` if one cannot be read.
    """
    if report is not None:
        is_file = len(report) < LONGEST_PATH and "\n" not in report and Path(report).is_file()
        content = read_plain(report, parts.MOST_TEXT) if is_file else report.encode(errors="replace")
        if len(content) > parts.MOST_TEXT:
            raise UsageError(f"--report has {len(content):,} bytes; at most {parts.MOST_TEXT:,} are read; give less")
        yield CollectedPart(parts.REPORT_FILE, report if is_file else "--report"), content
    if earlier is not None:
        yield CollectedPart(parts.EARLIER_CONFIGURATION_FILE, str(earlier)), _configuration_content(earlier)


def _configuration_content(path: Path) -> bytes:
    """Settings from a JSON or YAML file, as JSON.

    Raises ``UsageError`` if they cannot be read.
    """
    content = read_plain(path, MOST_CONFIGURATION)
    try:
        value = parse_json(content) if path.suffix == ".json" else load_yaml(content, str(path), DEEPEST)
        return json.dumps(settings_of(value), default=str).encode()
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"{path} holds no settings that can be read; give an object with named values") from None


def _tail(path: Path) -> bytes:
    with open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - parts.MOST_LOG))
        return file.read(parts.MOST_LOG)
