"""Reads each part of an incident's folder when a query needs it.

Problems with unreadable parts are returned as sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.detectors.series import Bools, Floats, load_recording
from unsilent.events.event_kinds import Alarm
from unsilent.events.incident_folder import (
    BATCH_FILE,
    SERIES_FILE,
    STATE_FILE,
    RankPart,
    read_incident,
    read_rank_part,
)
from unsilent.report.text import count_text
from unsilent.timeline.flight_recorder import Dump
from unsilent.triage import optional_parts
from unsilent.triage.log_errors import LoggedError, read_log_errors
from unsilent.triage.parts import (
    CONFIGURATION_FILE,
    EARLIER_CONFIGURATION_FILE,
    FLIGHT_FOLDER,
    LOG_FILE,
    REPORT_FILE,
    TIMELINE_FILE,
)
from unsilent.triage.tensor_summaries import RecordedTensors, read_recorded_tensors

T = TypeVar("T")
SeriesName = tuple[str, str, str]
"""Feature, tensor and statistic."""
MOST_RANKS = 64
"""Most ranks whose parts are read, the suspect first, so that a query takes seconds."""
MOST_STEP = 2**53


@dataclass(frozen=True, eq=False)
class RankSeries:
    """The recorded series of one rank.

    Attributes:
        steps: int64[n], increasing; for a step that was executed again, the first execution counts.
        names: Feature, tensor and statistic of m series.
        values: float64[n, m].
        seen: bool[n, m]; False if the value is meaningless.
    """

    steps: NDArray[np.int64]
    names: tuple[SeriesName, ...]
    values: Floats
    seen: Bools


Gathered = tuple[dict[int, T], tuple[str, ...]]
"""Parts that could be read, by rank, and a sentence for each rank or other part that could not."""
Optional = tuple[T | None, tuple[str, ...]]
"""Content of an optional part, and a sentence if it cannot be read; neither if the part does not exist."""


class Bundle:
    """The folder of an incident, with parts that are read when needed.

    Raises ``UsageError`` if ``incident.json`` cannot be read.

    Attributes:
        incident: Content of ``incident.json``; relative paths of checkpoints start from its folder.
    """

    def __init__(self, path: Path) -> None:
        incident = read_incident(path)
        self.incident = replace(incident, checkpoints=tuple(
            replace(saved, path=str(incident.folder / saved.path), manifest=str(incident.folder / saved.manifest))
            for saved in incident.checkpoints
        ))  # fmt: skip
        self._read: dict[tuple[str, int | str], Any] = {}

    @property
    def folder(self) -> Path:
        """Folder of the incident."""
        return self.incident.folder

    def parts(self, rank: int | None = None) -> Gathered[RankPart]:
        """The content of ``rank.json`` of each rank, or of one rank."""
        return self._gather("part", lambda number: read_rank_part(self.folder, number), rank)

    def series(self, rank: int | None = None) -> Gathered[RankSeries]:
        """The series of each rank, or of one rank."""
        return self._gather("series", self._series_of, rank)

    def batches(self, rank: int | None = None) -> Gathered[RecordedTensors]:
        """The recorded batch of each rank, or of one rank."""
        return self._gather("batch", lambda number: self._tensors_of(number, BATCH_FILE), rank)

    def states(self, rank: int | None = None) -> Gathered[RecordedTensors]:
        """The recorded training state of each rank, or of one rank."""
        return self._gather("state", lambda number: self._tensors_of(number, STATE_FILE), rank)

    def alarms(self) -> list[Alarm]:
        """All alarms that can be read, without duplicates, ordered by step."""
        parts, _ = self.parts()
        of_parts = [alarm for part in parts.values() for alarm in part.alarms]
        others = [alarm for alarm in self.incident.alarms if alarm.rank not in parts]
        return sorted([*of_parts, *others], key=lambda alarm: (alarm.step, alarm.rank))

    def report(self) -> Optional[str]:
        """The report of a person who watched the run, as text."""
        return self._optional(REPORT_FILE, optional_parts.read_report)

    def times(self) -> Optional[optional_parts.RecordedTimes]:
        """Seconds of the parts of each recorded step."""
        return self._optional(TIMELINE_FILE, optional_parts.read_times)

    def configuration(self) -> Optional[Mapping[str, Any]]:
        """Settings of the job."""
        return self._optional(CONFIGURATION_FILE, optional_parts.read_configuration)

    def earlier_configuration(self) -> Optional[Mapping[str, Any]]:
        """Settings of an earlier job."""
        return self._optional(EARLIER_CONFIGURATION_FILE, optional_parts.read_configuration)

    def dumps(self) -> Gathered[Dump]:
        """The dump of the flight recorder of each rank."""
        folder = self.folder / FLIGHT_FOLDER
        try:
            names = (
                sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
            )
        except OSError as error:
            return {}, (f"cannot read {folder}: {error.strerror}",)
        named = [name for name in names if optional_parts.DUMP_NAME.fullmatch(name)][: optional_parts.MOST_DUMPS]
        read = [self._optional(f"{FLIGHT_FOLDER}/{name}", optional_parts.read_dump) for name in named]
        read_dumps = {dump.rank: dump for dump, _ in read if dump is not None}
        return dict(sorted(read_dumps.items())), tuple(text for _, missing in read for text in missing)

    def logs(self) -> Gathered[tuple[LoggedError, ...]]:
        """Lines that look like errors in the log of each rank.

        If no rank has a log, both results are empty.
        """
        read = {rank: self._optional(f"rank{rank}/{LOG_FILE}", read_log_errors) for rank in self._ranks()}
        errors_by_rank = {rank: errors for rank, (errors, _) in read.items() if errors is not None}
        missing = [text for _, texts in read.values() for text in texts]
        absent = self.incident.world_size - len(self.incident.ranks) + len(read) - len(errors_by_rank) - len(missing)
        if errors_by_rank and absent > 0:
            missing.append(f"there is no {LOG_FILE} of {absent:,} of {count_text(self.incident.world_size, 'rank')}")
        if errors_by_rank and (left := len(self.incident.ranks) - len(read)):
            missing.append(f"the logs of {count_text(left, 'more rank')} were not read")
        return errors_by_rank, tuple(missing)

    def has_telemetry(self) -> bool:
        """Whether any data for queries can be read, besides optimizer settings and recorded verdicts."""
        gathered = (self.parts, self.dumps, self.logs)
        single = (self.times, self.configuration)
        return (
            bool(self.incident.checkpoints) or any(read()[0] for read in gathered) or any(read()[0] for read in single)
        )

    def _optional(self, name: str, read: Callable[[Path], T]) -> Optional[T]:
        path = self.folder / name
        if ("", name) not in self._read:
            try:
                if path.is_symlink() or path.parent.is_symlink():
                    raise UsageError(f"{path} is a link; copy its file there")
                self._read["", name] = read(path) if path.exists() else None
            except UsageError as error:
                self._read["", name] = error
        value = self._read["", name]
        return (None, (str(value),)) if isinstance(value, UsageError) else (value, ())

    def _ranks(self) -> list[int]:
        """Ranks whose parts are read, at most `MOST_RANKS`."""
        ranks = sorted(self.incident.ranks, key=lambda rank: (rank != self.incident.suspect, rank))[:MOST_RANKS]
        return sorted(ranks)

    def _gather(self, noun: str, read: Callable[[int], T], rank: int | None) -> Gathered[T]:
        present: Sequence[int] = self.incident.ranks if rank is None else [rank]
        ranks = self._ranks() if rank is None else [rank]
        result: dict[int, T] = {}
        missing = []
        for number in ranks:
            if (noun, number) not in self._read:
                try:
                    self._read[noun, number] = read(number)
                except UsageError as error:
                    self._read[noun, number] = error
            if isinstance(value := self._read[noun, number], UsageError):
                missing.append(f"rank {number}: {value}")
            else:
                result[number] = value
        if left := len(present) - len(ranks):
            missing.append(f"the parts of {count_text(left, 'more rank')} were not read")
        if rank is None and (absent := self.incident.world_size - len(present)) > 0:
            missing.append(
                f"there is no part of {absent:,} of {count_text(self.incident.world_size, 'rank')} in {self.folder}"
            )
        return result, tuple(missing)

    def _file(self, rank: int, name: str) -> tuple[RankPart, Path]:
        """The content of a rank's ``rank.json``, and the path of one of its files.

        Raises ``UsageError`` if one is missing.
        """
        parts, missing = self.parts(rank)
        if rank not in parts:
            raise UsageError(missing[0].partition(": ")[2])
        if (file := parts[rank].file(name)) is None:
            why = "; ".join(parts[rank].problems[:1])
            raise UsageError(f"there is no {name} in {parts[rank].folder}{why and f' ({why})'}")
        return parts[rank], file

    def _series_of(self, rank: int) -> RankSeries:
        part, file = self._file(rank, SERIES_FILE)
        recording = load_recording(file)
        if len(part.series_steps) != len(recording.seconds):
            raise UsageError(
                f"{file} has {len(recording.seconds)} steps, and rank.json {len(part.series_steps)}; one is of another record"
            )
        if not all(0 <= step <= MOST_STEP for step in part.series_steps):
            raise UsageError(f"rank.json of {file} has numbers of steps that no training has")
        steps, rows = np.unique(np.array(part.series_steps, np.int64), return_index=True)
        names = tuple((str(name[0]), str(name[1]), str(name[2])) for name in recording.series)
        return RankSeries(steps, names, recording.values[rows], recording.seen[rows])

    def _tensors_of(self, rank: int, name: str) -> RecordedTensors:
        return read_recorded_tensors(self._file(rank, name)[1])
