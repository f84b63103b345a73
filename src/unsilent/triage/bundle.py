"""The folder of an incident, read part by part when a query needs it. What cannot be read is a sentence, not an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.series import Bools, Floats, load_recording
from unsilent.errors import UsageError
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
from unsilent.triage.tensor_summaries import RecordedTensors, read_recorded_tensors

T = TypeVar("T")
SeriesName = tuple[str, str, str]
"""Feature, tensor and statistic."""
MOST_RANKS = 64
"""Whose parts are read, the suspect first: a query takes seconds."""
MOST_STEP = 2**53


@dataclass(frozen=True, eq=False)
class RankSeries:
    """Series of one rank.

    Attributes:
        steps: int64[n], increasing; a step that was executed again counts as it was the first time.
        names: Feature, tensor and statistic of m series.
        values: float64[n, m].
        seen: bool[n, m]; False: the value means nothing.
    """

    steps: NDArray[np.int64]
    names: tuple[SeriesName, ...]
    values: Floats
    seen: Bools


Gathered = tuple[dict[int, T], tuple[str, ...]]
"""What could be read, by rank, and a sentence for each rank, or other part, where it could not."""


class Bundle:
    """An incident. Raises ``UsageError`` where its first file cannot be read.

    Attributes:
        incident: What ``incident.json`` says; paths of checkpoints that are not absolute are those in its folder.
    """

    def __init__(self, path: Path) -> None:
        incident = read_incident(path)
        self.incident = replace(incident, checkpoints=tuple(
            replace(one, path=str(incident.folder / one.path), manifest=str(incident.folder / one.manifest))
            for one in incident.checkpoints
        ))  # fmt: skip
        self._read: dict[tuple[str, int], Any] = {}

    @property
    def folder(self) -> Path:
        """Of the incident."""
        return self.incident.folder

    def parts(self, rank: int | None = None) -> Gathered[RankPart]:
        """``rank.json`` of each rank, or of one."""
        return self._gather("part", lambda one: read_rank_part(self.folder, one), rank)

    def series(self, rank: int | None = None) -> Gathered[RankSeries]:
        """Series of each rank, or of one."""
        return self._gather("series", self._series_of, rank)

    def batches(self, rank: int | None = None) -> Gathered[RecordedTensors]:
        """The batch of each rank, or of one."""
        return self._gather("batch", lambda one: self._tensors_of(one, BATCH_FILE), rank)

    def states(self, rank: int | None = None) -> Gathered[RecordedTensors]:
        """The state of each rank, or of one."""
        return self._gather("state", lambda one: self._tensors_of(one, STATE_FILE), rank)

    def alarms(self) -> list[Alarm]:
        """Those of all ranks that can be read, each once, by step."""
        parts, _ = self.parts()
        of_parts = [one for part in parts.values() for one in part.alarms]
        others = [one for one in self.incident.alarms if one.rank not in parts]
        return sorted([*of_parts, *others], key=lambda one: (one.step, one.rank))

    def _gather(self, what: str, read: Callable[[int], T], rank: int | None) -> Gathered[T]:
        present: Sequence[int] = self.incident.ranks if rank is None else [rank]
        ranks = sorted(present, key=lambda one: (one != self.incident.suspect, one))[:MOST_RANKS]
        found: dict[int, T] = {}
        missing = []
        for one in sorted(ranks):
            if (what, one) not in self._read:
                try:
                    self._read[what, one] = read(one)
                except UsageError as error:
                    self._read[what, one] = error
            if isinstance(value := self._read[what, one], UsageError):
                missing.append(f"rank {one}: {value}")
            else:
                found[one] = value
        if left := len(present) - len(ranks):
            missing.append(f"the parts of {count_text(left, 'more rank')} were not read")
        if rank is None and (absent := self.incident.world_size - len(present)) > 0:
            missing.append(
                f"there is no part of {absent:,} of {count_text(self.incident.world_size, 'rank')} in {self.folder}"
            )
        return found, tuple(missing)

    def _file(self, rank: int, name: str) -> tuple[RankPart, Path]:
        """A file of a rank and its ``rank.json``. Raises ``UsageError`` where one is missing."""
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
        names = tuple((str(one[0]), str(one[1]), str(one[2])) for one in recording.series)
        return RankSeries(steps, names, recording.values[rows], recording.seen[rows])

    def _tensors_of(self, rank: int, name: str) -> RecordedTensors:
        return read_recorded_tensors(self._file(rank, name)[1])
