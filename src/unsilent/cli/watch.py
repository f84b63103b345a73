"""``unsilent watch EVENTS``: the state of a monitored job in the terminal, while it runs or afterwards."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.basics.errors import unknown_name_error
from unsilent.basics.options import OUTPUT_PANEL, Option, Request
from unsilent.basics.printable import escape_unprintable
from unsilent.basics.strictjson import as_json_values
from unsilent.cli.file_sorts import refuse_other_files
from unsilent.command import WATCH, Command, DisplayOptions

if TYPE_CHECKING:
    from collections import deque

    from rich.console import Console, RenderableType

    from unsilent.events.event_files import EventFile
    from unsilent.events.event_kinds import Event, StepSummary
    from unsilent.events.run_history import RankHistory, RunHistory

SCHEMA = "unsilent/watch/1"
CURVES = {"loss": "loss", "gradient-norm": "gradient_norm"}
"""Series that can be drawn, and their fields of a summary."""
REFRESH_SECONDS = 1.0
LINE_SECONDS = 10.0
"""Seconds between two lines on the state in plain mode."""
BARS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "×"
CURVE_ROOM = 66
"""Columns of the terminal that are kept for the rest of the table beside the curves."""
MOST_MESSAGES = 6
"""Most alarms, and most verdicts, below the table."""


NO_EVENTS = "no events were named; give the file that the job writes them to, or its folder"


@dataclass(frozen=True)
class WatchOptions:
    """Options of ``unsilent watch``."""

    events: Annotated[Path, Option(
        "Events of a monitored job: the file that the job was given (several ranks: the same name), or its folder.", "",
        missing_error=NO_EVENTS)]  # fmt: skip
    once: Annotated[
        bool,
        Option(
            "Show the present state and end, with exit code 1 if there was an alarm (also in a run that "
            "this one continues) or a rank is lost.",
            OUTPUT_PANEL,
        ),
    ] = False
    curve: Annotated[str, Option("What is drawn for each rank: loss or gradient-norm.", OUTPUT_PANEL)] = "loss"


def watch(request: Request) -> int:
    """Show the state of a monitored job in the terminal, until the job ends or Ctrl-C is pressed.

    The exit code is 1 if a rank is lost. For each rank: the step, a curve of the loss, the largest score, the health of the
    device, and the share of the time that the monitor took. Below them the last alarms and verdicts. --json acts as --once.
    """
    from rich.console import Console

    options, display = request[WatchOptions], request[DisplayOptions]
    if options.events.is_file():
        verbs = {"store": "unsilent report", "checkpoint": "unsilent checkpoint inspect"}
        refuse_other_files(options.events, {sort: f"{verb} {options.events}" for sort, verb in verbs.items()})
    once, curve, as_json, plain = options.once, options.curve, display.as_json, display.plain
    if curve not in CURVES:
        raise unknown_name_error("curve", curve, CURVES)
    job = JobEvents(options.events, waits=not (once or as_json))
    new = job.read_new()
    if as_json:
        files = [str(event_file.path) for event_file in job.files]
        lost = [{"rank": rank, "reason": reason} for rank, reason in job.lost.items()]
        values = {"schema": SCHEMA, "events": files, "lost": lost, **job.history.as_json()}
        print(json.dumps(as_json_values(values), indent=2))
    elif once:
        from unsilent.render.console import print_drawn

        console = Console()
        if plain:
            print_state(job.history, job.lost, console)
        else:
            print_drawn(console, view(job.history, job.lost, console.width, None, CURVES[curve]))
    else:
        try:
            if plain or not sys.stdout.isatty():
                follow_lines(job, new)
            else:
                follow_live(job, CURVES[curve])
        except KeyboardInterrupt:
            return 0
    return int(bool(job.lost) or ((once or as_json) and job.history.has_alarm))


class JobEvents:
    """The events of a job, read while they are written.

    Files of further ranks are added when they appear.

    Args:
        path: Path as for `find_event_files`.
        waits: Whether to accept a job that has written no events yet. Otherwise this is an error.

    Attributes:
        history: All events read so far.
        files: Files from which the events were read.
        lost: Reason, by rank, why a rank that has not ended no longer writes events.
        is_over: Whether no further event is expected.
    """

    def __init__(self, path: Path, waits: bool = False) -> None:
        from unsilent.events.run_history import RunHistory

        self._path, self._waits = path, waits
        self._files: dict[Path, EventFile] = {}
        self._file_of_rank: dict[int, Path] = {}
        self.history: RunHistory = RunHistory()
        self.lost: dict[int, str] = {}
        self.is_over = False

    @property
    def files(self) -> Sequence[EventFile]:
        """The event files, in the order in which they were found."""
        return list(self._files.values())

    def read_new(self) -> list[Event]:
        """The latest alarms, verdicts and failures since the previous call, in order of time.

        Raises ``UsageError`` if a file cannot be read.
        """
        from collections import deque

        from unsilent.events.lost_ranks import find_lost, gone_processes

        new: deque[Event] = deque(maxlen=1000)
        self._read_files(new)
        gone = gone_processes(self.history)
        if gone:  # its last event may have been written between the two
            self._read_files(new)
        written = {rank: path.stat().st_mtime for rank, path in self._file_of_rank.items()}
        self.lost, stands_still = find_lost(self.history, written, gone, time.time())
        self.is_over = stands_still or self.history.has_ended
        return sorted(new, key=lambda event: event.time)

    def _read_files(self, new: deque[Event]) -> None:
        from unsilent.events.event_files import EventFile, check_size, find_event_files
        from unsilent.events.event_kinds import StepSummary

        paths = find_event_files(self._path, may_be_none=self._waits)
        if not self._files:
            check_size(self._path, paths)
        for path in paths:
            self._files.setdefault(path, EventFile(path))
        for file in self.files:
            for event in file.read_new():
                self.history.add(event)
                self._file_of_rank[event.rank] = file.path
                if not isinstance(event, StepSummary):
                    new.append(event)


def follow_live(job: JobEvents, curve: str) -> None:
    """Redraw the state until the job ends."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(view(job.history, job.lost, console.width, console.height, curve), refresh=True)
            if job.is_over:
                return
            time.sleep(REFRESH_SECONDS)
            job.read_new()


def follow_lines(job: JobEvents, new: Sequence[Event]) -> None:
    """Print a line for each new event, and the headline at intervals, until the job ends."""
    from unsilent.events.event_kinds import Verdict

    headline_time = 0.0
    named: set[int] = set()
    while True:
        for event in new:
            if not (event.repeats_other_rank or (isinstance(event, Verdict) and event.repeats_alarm)):
                print(escape_unprintable(event))
        for rank, reason in job.lost.items():
            if rank not in named:
                print(escape_unprintable(reason))
        named = set(job.lost)
        if job.is_over or time.monotonic() - headline_time >= LINE_SECONDS:
            headline_time = time.monotonic()
            print(job.history.headline, flush=True)
        if job.is_over:
            return
        time.sleep(REFRESH_SECONDS)
        new = job.read_new()


# -- what is shown -------------------------------------------------------------------------------------------------------


def view(history: RunHistory, lost: Mapping[int, str], width: int, height: int | None, curve: str) -> RenderableType:
    """The state of a job as a table for the terminal.

    ``height`` is the number of lines of the terminal; ``None`` is unlimited.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from unsilent.events.run_report import most_alarmed
    from unsilent.report.text import count_text

    ranks = history.ranks
    messages = _messages(history)
    room = len(ranks) if height is None else max(4, height - 2 * (len(messages) + min(len(lost), MOST_MESSAGES)) - 5)
    shown_ranks = most_alarmed(ranks, room)
    name = curve.replace("_", " ")
    bars = max(8, width - CURVE_ROOM - max(0, len(name) - 10))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for head in ("rank", "step", name, "", "score", "health", "monitor", "last event"):
        table.add_column(head, justify="left" if head in ("", "health", "last event") else "right", no_wrap=True)
    for rank in shown_ranks:
        values = [getattr(summary, curve) for summary in rank.summaries]
        drawn = sparkline([value for value in values if value is not None], bars)
        step, value, score, health, cost, last = _cells(rank, curve)
        table.add_row(str(rank.rank), step, value, drawn, score, Text(health, _style(health)), cost, Text(last))
    parts: list[RenderableType] = [Text(history.headline, "bold red" if history.has_alarm else "bold")]
    parts += [Text(escape_unprintable(reason), "bold red") for reason in list(lost.values())[:MOST_MESSAGES]]
    parts.append(table)
    if len(shown_ranks) < len(ranks):
        parts.append(Text(f"and {len(ranks) - len(shown_ranks):,} more ranks"))
    earlier = history.earlier
    if earlier.other_runs:
        runs, alarms = count_text(earlier.other_runs, "earlier run"), count_text(earlier.other_alarms, "alarm")
        parts.append(Text(f"{runs} in these files had {alarms}"))
    return Group(*parts, *(Text(text, style) for text, style in messages))


def print_state(history: RunHistory, lost: Mapping[int, str], console: Console) -> None:
    """Print the state as plain columns, with all other lines as ``#`` comments."""
    from unsilent.render.console import print_columns, print_lines

    heads = ("rank", "step", "loss", "gradient_norm", "score", "health", "monitor", "last_event")
    rows = []
    for rank in history.ranks:
        step, loss, *others = _cells(rank, "loss")
        rows.append((str(rank.rank), step.replace(",", ""), loss, _cells(rank, "gradient_norm")[1], *others))
    print_lines(console, [history.headline, *map(escape_unprintable, lost.values())], plain=True)
    print_columns(console, heads, rows)
    print_lines(console, [text for text, _ in _messages(history)], plain=True)


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve as a line of bar characters, at most ``width`` of them.

    Each bar is the mean of neighbouring values; ``×`` marks values that are not finite.
    """
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    finite = [value for value in means if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > 100 * min(finite):
        means = [math.log(value) if value > 0 else value for value in means]
        finite = [value for value in means if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return NOT_FINITE
        share = (value - low) / (high - low) if 0 < high - low < math.inf else 0.0
        return BARS[min(int(share * len(BARS)), len(BARS) - 1)]

    return "".join(map(bar, means))


def _cells(rank: RankHistory, curve: str) -> tuple[str, str, str, str, str, str]:
    """The table cells of a rank: step, value, score, health, cost, and time since the last event."""
    latest: StepSummary | None = rank.summaries[-1] if rank.summaries else None
    value = getattr(latest, curve) if latest else None
    cost = "–" if rank.cost is None else f"{100 * rank.cost:.2g} %"
    age = max(0, round(time.time() - rank.last.time)) if rank.last else 0
    ago = f"{age} s ago" if age < 600 else f"{age // 60:,} min ago" if age < 36000 else f"{age // 3600:,} h ago"
    last = rank.state if rank.ended or rank.failed else ago
    score = "–" if latest is None or latest.score is None else f"{latest.score:.2g}"
    return (
        f"{max(0, rank.steps - 1):,}",
        "–" if value is None else f"{value:.4g}",
        score,
        escape_unprintable(rank.health)[:8],
        cost,
        last,
    )


def _messages(history: RunHistory) -> list[tuple[str, str]]:
    """Lines, with their styles, for failures, alarms, verdicts, the incident and its explanations."""
    ranks = history.ranks
    every = (alarm for rank in ranks for alarm in rank.latest_alarms if not alarm.repeats_other_rank)
    alarms = sorted(every, key=lambda alarm: (alarm.step, alarm.rank))
    verdicts = [verdict for verdict in history.latest_verdicts if not verdict.repeats_alarm]
    lines = [(str(rank.failed), "yellow") for rank in ranks if rank.failed][:MOST_MESSAGES]
    lines += [(f"{alarm.level}: {alarm}", _style(alarm.level)) for alarm in alarms[-MOST_MESSAGES:]]
    lines += [(f"verdict: {verdict}", "bold") for verdict in verdicts[-MOST_MESSAGES:]]
    lines += [(str(event), "bold") for event in [history.incident, *history.explained[-MOST_MESSAGES:]] if event]
    return [(escape_unprintable(text), style) for text, style in lines]


def _style(level: str) -> str:
    return {"ok": "green", "alarm": "red", "warning": "yellow"}.get(level, "")


COMMAND = Command("watch", WATCH, "unsilent watch events.jsonl", (WatchOptions, DisplayOptions), watch)
