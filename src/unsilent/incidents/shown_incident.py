"""Report of an incident: verdicts, alarms, ranks, checkpoints, and series around the alarm."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.basics.sizes import human_bytes
from unsilent.basics.strictjson import fields_by_name
from unsilent.detectors.series import LOSS, Series, load_recording
from unsilent.events.event_kinds import Alarm, join_names
from unsilent.events.incident_folder import (
    BATCH_FILE,
    SERIES_FILE,
    STATE_FILE,
    Incident,
    RankPart,
    read_incident,
    read_rank_part,
)
from unsilent.events.run_report import (
    ALARM_COLOUR,
    INTRODUCTIONS,
    MOST_DRAWN,
    alarm_table,
    setting_facts,
    verdict_table,
)
from unsilent.report.curves import line_series, line_style
from unsilent.report.model import Column, Heading, Plot, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import listed, time_text
from unsilent.report.theme import figure, vertical_line

MOST_SHOWN = 8
"""Most series of a rank, and most ranks, that are shown if none were requested."""
LAST_TIME = 2.5e11
"""Seconds since 1970 (in the year 9892) of the last time that can be shown."""
NEAR = 5
"""Steps before and after the alarm whose values a terminal shows if none were requested."""
SERIES_TEXT = "A line marks the alarm. A gap is a value that is not finite. Steps executed again have several values."
RANKS_TEXT = "What was recorded of each rank. Device facts: what the system reports of the device."
SERIES_COLUMNS = (
    Column.text("series"), Column.count("rank"), Column.count("step"), Column("value", "number"),
)  # fmt: skip


@dataclass(frozen=True)
class ShownSeries:
    """A recorded series of a rank.

    Attributes:
        points: Step and value for each step in which the series was read.
    """

    rank: int
    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, repr=False)
class ShownIncident(Shown):
    """An incident with the readable parts of its ranks, and the series to show.

    ``steps`` is the range of steps that the user selected.
    """

    incident: Incident
    parts: tuple[RankPart, ...]
    series: tuple[ShownSeries, ...]
    problems: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None

    def report(self) -> Report:
        """Report on the incident, with the series as its table for programs."""
        incident = self.incident
        settings = setting_facts({**incident.settings, **incident.versions})
        return Report(
            "unsilent/incident/1", "incident show", f"Incident of step {incident.step:,}", self.headline,
            Table.of(self.rows, SERIES_COLUMNS), findings=tuple(self._findings()), sections=tuple(self._sections()),
            facts=(("recorded", _time(incident.time)), ("run", incident.run), *settings),
            further_json=self._json(),
        )  # fmt: skip

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each value of each series."""
        return [
            {"series": line.name, "rank": line.rank, "step": step, "value": value}
            for line in self.series
            for step, value in line.points
        ]

    @property
    def headline(self) -> str:
        """The place where the incident began, and its kind of fault."""
        incident, verdict = self.incident, self.incident.fault_verdict
        where = f" ({', '.join(filter(None, (incident.host, incident.device, incident.reason)))})"
        code = f" ({verdict.code})" if verdict and verdict.code else ""
        kind = f"kind of fault: {verdict.kind}{code}" if verdict else "what kind of fault it was is not decided"
        training = f", which is step {incident.training_step} of the training" if incident.first_step else ""
        return f"{incident.since[:1].upper()}{incident.since[1:]}{training}{where}; {kind}"

    def _findings(self) -> Iterator[str]:
        verdict = self.incident.fault_verdict
        yield from filter(None, (verdict.reason, verdict.action) if verdict else ())
        if missing := self.incident.world_size - len(self.incident.ranks):
            yield f"the records of {missing:,} of {self.incident.world_size:,} ranks are not in this folder"
        yield from self.problems
        for part in self.parts:
            yield from (f"rank {part.rank}: {problem}" for problem in part.problems)

    def _sections(self) -> Iterator[Section]:
        if verdicts := verdict_table(self.incident.verdicts):
            yield Section("Verdicts", INTRODUCTIONS["Verdicts"], (verdicts,))
        of_parts = [alarm for part in self.parts for alarm in part.alarms]
        known = {part.rank for part in self.parts}
        alarms = sorted([*of_parts, *(alarm for alarm in self.incident.alarms if alarm.rank not in known)], key=_place)
        if table := alarm_table(alarms, len(alarms)):
            yield Section("Alarms", "The alarms of each rank up to the first verdict.", (table,))
        if self.series:
            near = [row for row in self.rows if self.steps or abs(row["step"] - self.incident.step) <= NEAR]
            table = Table.of(near, SERIES_COLUMNS, terminal_rows=60, on_page=False)
            yield Section("Series", SERIES_TEXT, (table, *self._plots()))
        ranks = (
            Column.count("rank"), Column.text("host"), Column.text("device"), Column.text("device facts", _facts_text),
            Column.text("state", lambda part: _size_text(part, STATE_FILE), 1),
            Column.text("batch", lambda part: _size_text(part, BATCH_FILE), 1),
        )  # fmt: skip
        if self.parts:
            yield Section("Ranks", RANKS_TEXT, (Table.of(self.parts, ranks),))
        columns = (
            Column.text("checkpoint", "path"), Column.count("step"), Column.text("saved", lambda saved: _time(saved.time)),
            Column.text("manifest", priority=1),
        )  # fmt: skip
        if checkpoints := self.incident.checkpoints:
            text = "Checkpoints that rank 0 saved and verified before the incident."
            yield Section("Checkpoints", text, (Table.of(checkpoints, columns),))

    def _plots(self) -> Iterator[Heading | Plot]:
        for number, name in enumerate(dict.fromkeys(line.name for line in self.series)):
            of_name = [line for line in self.series if line.name == name]
            lines = [
                line_series(
                    f"rank {line.rank}", [(step, value if abs(value) < MOST_DRAWN else None) for step, value in line.points],
                    line_style(place), [f"rank {line.rank}, step {step:,}: {value:.6g}" for step, value in line.points],
                )
                for place, line in enumerate(of_name)
            ]  # fmt: skip
            shapes = [vertical_line(self.incident.step, ALARM_COLOUR, 1, dash="dot")]
            drawn = figure(lines, 260, xaxis={"title": {"text": "step, counted from 0"}}, shapes=shapes)
            yield Heading(name)
            yield Plot(f"series-{number}", name, drawn)

    def _json(self) -> dict[str, Any]:
        incident = self.incident
        alarms = [[alarm.to_json() for alarm in part.alarms] for part in self.parts]
        parts = [{**fields_by_name(part, "folder"), "alarms": a} for part, a in zip(self.parts, alarms, strict=True)]
        return {
            **fields_by_name(incident, "schema"), "since": incident.since, "training_step": incident.training_step,
            "ranks": parts, "problems": self.problems, "alarms": [alarm.to_json() for alarm in incident.alarms],
            "verdicts": [verdict.to_json() for verdict in incident.verdicts],
        }  # fmt: skip


def read_shown(
    folder: Path, glob: str | None = None, rank: int | None = None, steps: tuple[int, int] | None = None
) -> ShownIncident:
    """The incident in a folder, with the series that a pattern selects. Raises ``UsageError``.

    Args:
        folder: Folder of the incident, or of the job.
        glob: Pattern of the names of series; ``None``: series of the tensors that alarms name.
        rank: Rank of the series; ``None``: series of all ranks, or of the first ones.
        steps: First and last step to show.
    """
    incident = read_incident(folder)
    parts: list[RankPart] = []
    series: list[ShownSeries] = []
    problems: list[str] = []
    for number in incident.ranks if rank is None else [rank]:
        try:
            parts.append(part := read_rank_part(incident.folder, number))
            if rank is not None or len(parts) <= MOST_SHOWN:
                series += _series_of(part, incident, glob, steps)
        except UsageError as error:
            if rank is not None:
                raise
            problems.append(str(error))
    if glob is not None and not series:
        raise UsageError(f"no series in {incident.folder} matches {glob!r}; names are such as {_some_names(parts)}")
    return ShownIncident(incident, tuple(parts), tuple(series), tuple(problems), steps)


def _series_of(
    part: RankPart, incident: Incident, glob: str | None, steps: tuple[int, int] | None
) -> Iterator[ShownSeries]:
    if (file := part.file(SERIES_FILE)) is None:
        return
    recording = load_recording(file)
    if len(part.series_steps) != len(recording.seconds):
        raise UsageError(
            f"{file} has {len(recording.seconds)} steps, and rank.json {len(part.series_steps)}; one of them is of another record"
        )
    entries, tensors = list(enumerate(recording.series)), {alarm.tensor for alarm in (*part.alarms, *incident.alarms)}
    if glob is None:
        chosen = [n for n, entry in entries if entry.tensor in tensors or entry.feature == LOSS][:MOST_SHOWN]
    else:
        chosen = [n for n, entry in entries if fnmatch.fnmatchcase(_name(entry), glob)]
    first, last = steps or (0, 2**62)
    for number in chosen:
        columns = recording.values[:, number].tolist(), recording.seen[:, number].tolist()
        points = zip(part.series_steps, *columns, strict=True)
        selected = tuple((step, value) for step, value, seen in points if seen and first <= step <= last)
        yield ShownSeries(part.rank, _name(recording.series[number]), selected)


def _name(series: Series) -> str:
    """Feature, tensor and statistic of a series, safe to print."""
    return escape_unprintable(join_names(*map(str, series[:3])))


def _some_names(parts: Sequence[RankPart]) -> str:
    files = (file for part in parts if (file := part.file(SERIES_FILE)))
    names = [_name(entry) for file in files for entry in load_recording(file).series]
    return listed(dict.fromkeys(names), 5) or "none, as there are no series"


def _place(alarm: Alarm) -> tuple[int, int]:
    return alarm.step, alarm.rank


def _facts_text(part: RankPart) -> str:
    return "; ".join(f"{name} {value}" for name, value in part.device_facts.items())


def _size_text(part: RankPart, name: str) -> str:
    file = part.file(name)
    return human_bytes(file.stat().st_size) if file else ""


def _time(seconds: float) -> str:
    if not 0 <= seconds < LAST_TIME:
        return f"{seconds:g} s"  # not written by a monitor
    return time_text(seconds)
