"""The report of a monitored run, made from its events."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.events.event_files import iterate_events
from unsilent.events.event_kinds import Alarm, Event, Started, StepSummary, Verdict
from unsilent.events.run_history import OK, RankHistory, RunHistory
from unsilent.report.model import Column, Plot, Report, Section, Table
from unsilent.report.shown import Shown
from unsilent.report.text import count_text, duration_text, listed, time_text
from unsilent.report.theme import (
    SERIES_COLOURS,
    SOFT,
    Figure,
    figure,
    label,
    marker_series,
    series_marker,
    vertical_line,
)

SCHEMA = "unsilent/run-report/1"
ALARM_COLOUR = "#D55E00"
RANK_COLOURS = tuple(colour for colour in SERIES_COLOURS if colour != ALARM_COLOUR)
MOST_CURVES = 8
"""Largest number of ranks in a figure; ranks with alarms come first."""
MOST_LINES = 200
"""Largest number of steps with an alarm that are marked in a figure."""
LEAST_SCORE = 1e-4
"""Smaller scores are drawn at this value."""
MOST_DRAWN = 1e100
LONGEST_FACT = 400
MOST_EXPLAINED = 5
"""Largest number of explained alarms among the findings: the last ones."""
RESULT_COLUMNS = (
    Column("rank"), Column("steps"), Column("alarms", of="alarm_count"), Column("warnings", of="warning_count"), Column("health"),
    Column("cost"),
)  # fmt: skip
INTRODUCTIONS = {
    "Alarms": "A series is one number of one tensor in one rank, step by step. A rule raises an alarm for the series with the "
    "highest score; a score of 1 or more is an alarm. What a rule finds in the same series in several steps in a row is reported "
    "once. The column series says how many of the series that the rule judged had a finding. An alarm of the feature replicas "
    "says that parameters differ between ranks; it comes again about once a minute as long as they do.",
    "Verdicts": "What all ranks agreed on after an alarm: which rank is suspected, and what was done.",
    "Training": "Loss and gradient norm as the monitor reported them. A dotted line marks a step with an alarm. A cross, and a "
    "gap in the curve, marks a value that is not finite.",
    "Scores": "The largest score of any rule since the previous point. The line at 1 is where an alarm begins.",
    "Ranks": "One row for each rank. Monitor: share of the time of the job that the monitor took.",
    "Sampling": "The monitor reads a part of the tensors at each step, so that it stays within its budget.",
}


@dataclass(frozen=True, repr=False)
class WatchedRun(Shown):
    """The last run in the events of a monitored training."""

    path: Path
    run_report: Report

    @classmethod
    def read(cls, path: Path) -> WatchedRun:
        """Read the run from a file of events or from a folder with the files of one job; raises ``UsageError``."""
        command = shlex.join(["unsilent", "report", str(path)])
        return cls(path, report(iterate_events(path), str(path), command))

    def report(self) -> Report:
        return self.run_report


def report(events: Iterable[Event], name: str = "", command: str = "") -> Report:
    """The report of the last run in the events of a job.

    Args:
        events: Events of each rank in their order.
        name: Name of the job or its file.
        command: Command that makes the report again.
    """
    history = RunHistory(events)
    ranks = history.ranks
    started = next((rank.started for rank in ranks if rank.started), None)
    settings = {"settings": started.settings, "versions": started.versions} if started else {}
    return Report(
        schema=SCHEMA,
        report_type="Monitored training",
        title=f"Events of {name}" if name else "Events of a monitored training",
        headline=history.headline,
        estimates=Table.of(ranks, RESULT_COLUMNS),
        numbers=tuple(_numbers(history)),
        findings=tuple(_findings(history)),
        sections=tuple(section for section in _sections(history) if section.parts),
        facts=tuple(_facts(started)) if started else (),
        repeat_command=command,
        further_json=history.as_json() | settings,
    )


def _numbers(history: RunHistory) -> Iterator[tuple[str, str, str]]:
    ranks = history.ranks
    warnings, earlier = count_text(sum(rank.warning_count for rank in ranks), "warning"), history.earlier.alarms
    yield "Alarms", f"{history.alarm_count:,}", f"{warnings}; in earlier runs {earlier:,}" if earlier else warnings
    yield "Steps", f"{history.steps:,}", "the rank that made most" if len(ranks) > 1 else ""
    if costs := [rank.cost for rank in ranks if rank.cost is not None]:
        yield "Monitor's share of the time", f"{100 * max(costs):.2g} %", "the rank where it is largest"
    if waits := [rank.ended.longest_wait for rank in ranks if rank.ended]:
        yield "Every tensor read within", count_text(max(waits), "step"), "the rank where it took longest"
    if seconds := [rank.ended.seconds for rank in ranks if rank.ended]:
        yield "Duration", duration_text(max(seconds)), ""


def _findings(history: RunHistory) -> Iterator[str]:
    earlier = history.earlier
    if earlier.runs:
        which, whose = ("run", "its") if earlier.runs == 1 else (f"{earlier.runs:,} runs", "their")
        alarms = count_text(earlier.alarms, "alarm")
        yield f"the {which} that this one continues had {alarms}; {whose} steps are not shown here"
    if earlier.other_runs:
        other_runs = count_text(earlier.other_runs, "earlier run")
        yield f"the files also hold {other_runs} with {count_text(earlier.other_alarms, 'alarm')}, not shown here"
    yield from map(str, history.explained[-MOST_EXPLAINED:])
    if history.incident:
        yield f"{history.incident}; see unsilent incident show"
    yield from (str(rank.failed) for rank in history.ranks if rank.failed)
    if open_ranks := [f"{rank.rank} (after step {rank.last_step:,})" for rank in history.ranks if rank.ended is None]:
        yield f"the events do not end for rank {listed(open_ranks)}: its process was killed, or still runs"
    world = max((rank.started.world_size for rank in history.ranks if rank.started), default=1)
    if missing := world - len(history.ranks):
        yield f"{missing:,} of {count_text(world, 'rank')} have no events"
    if unjudged := history.unjudged_text:
        yield f"{unjudged}; in these, only NaN and infinity would have been found"
    for rank in history.ranks:
        if rank.ended and rank.ended.unseen_count:
            count = count_text(rank.ended.unseen_count, "tensor")
            yield f"{count} of rank {rank.rank} never read: {listed(rank.ended.unseen, 3)}"


def _sections(history: RunHistory) -> Iterator[Section]:
    ranks = history.ranks
    drawn_ranks = most_alarmed(ranks, MOST_CURVES)
    alarms = sorted((alarm for rank in ranks for alarm in rank.alarms), key=lambda alarm: (alarm.step, alarm.rank))
    yield _section("Verdicts", verdict_table(history.verdicts))
    yield _section("Alarms", alarm_table(alarms, sum(rank.alarm_count + rank.warning_count for rank in ranks)))
    yield _section(
        "Training",
        _curves("loss", "Loss by step", drawn_ranks, alarms, lambda summary: summary.loss),
        _curves("gradient-norm", "Gradient norm by step", drawn_ranks, alarms, lambda summary: summary.gradient_norm),
    )
    yield _section("Scores", _curves("score", "Largest score by step", drawn_ranks, alarms, _drawn_score, limit=1.0))
    yield _section("Ranks", _rank_table(ranks))
    yield _section("Sampling", _sampling_table(ranks))


def most_alarmed(ranks: Sequence[RankHistory], most: int) -> list[RankHistory]:
    """The ranks with the most alarms, sorted by rank number."""
    chosen = sorted(ranks, key=lambda rank: (-rank.alarm_count, rank.rank))[:most]
    return sorted(chosen, key=lambda rank: rank.rank)


def _section(title: str, *parts: Table | Plot | None) -> Section:
    return Section(title, INTRODUCTIONS[title], tuple(part for part in parts if part is not None))


# -- tables --------------------------------------------------------------------------------------------------------------


def alarm_table(alarms: Sequence[Alarm], count: int) -> Table | None:
    """A table with a row for each alarm; None if there is none.

    ``count``: total number of alarms.
    """

    def feature(alarm: Alarm) -> str:
        return f"{alarm.feature}, {alarm.statistic}" if alarm.statistic else alarm.feature

    def tensor(alarm: Alarm) -> str:
        return f"ranks {listed(map(str, alarm.ranks))}" if alarm.ranks else alarm.tensor

    heads = (
        Column.count("step"), Column.count("rank"), Column.text("level", priority=2), Column.text("feature", feature),
        Column.text("tensor", tensor), Column("value", "number", digits=".4g"),
        Column("baseline", "number", digits=".4g", priority=3), Column("score", "number", digits=".3g"),
        Column.text("rule", priority=1),
        Column.text("series", lambda alarm: f"{alarm.series_flagged:,} of {alarm.series_judged:,}", 2),
    )  # fmt: skip
    title = f"the first {len(alarms):,} of {count:,}" if len(alarms) < count else "alarms"
    return _table(alarms, heads, title, is_emphasised=lambda alarm: alarm.level == "alarm", tooltip=str)


def _table(rows: Sequence[Any], columns: Sequence[Column], title: str, **more: Any) -> Table | None:
    """A table with the first rows for a terminal and all rows for a page; None if there are no rows."""
    more = {"terminal_rows": 20, "sortable": len(rows) > 20, **more}
    return Table.of(rows, columns, title, **more) if rows else None


def verdict_table(verdicts: Sequence[Verdict]) -> Table | None:
    """A table with a row for each verdict; None if there is none."""
    heads = (
        Column.count("step"),
        Column.text("suspect", lambda verdict: f"rank {verdict.suspect}" if verdict.suspect >= 0 else "undetermined"),
        Column.text("device", lambda verdict: f"{verdict.host} {verdict.device}".strip(), 2),
        *map(Column.text, ("tensor", "reason", "action", "outcome")),
        Column.text("ranks with an alarm", lambda verdict: listed(map(str, verdict.ranks)), 1),
    )  # fmt: skip
    return _table(verdicts, heads, "verdicts")


def _rank_table(ranks: Sequence[RankHistory]) -> Table | None:
    heads = (
        Column.count("rank"), Column.text("host", lambda rank: rank.started.host if rank.started else "", 1),
        Column.text("device", lambda rank: rank.started.device if rank.started else ""), Column.count("steps"),
        Column.count("alarms", "alarm_count"), Column.count("warnings", "warning_count", 1), Column.text("health"),
        Column.percent("monitor", "cost", digits=".2g"), Column.text("state", priority=2),
    )  # fmt: skip
    return _table(ranks, heads, "ranks", is_emphasised=lambda rank: rank.health != OK, terminal_rows=16)


def _sampling_table(ranks: Sequence[RankHistory]) -> Table | None:
    """A table of changes of the sampling, from the first rank that has any, because all ranks change together."""
    heads = (
        Column.count("from step", "step"), Column("each tensor read once in", "number", "steps", of="interval"),
        Column.text("reason"),
    )  # fmt: skip
    return _table(next((rank.sampling for rank in ranks if rank.sampling), []), heads, "sampling", terminal_rows=5)


def _facts(started: Started) -> Iterator[tuple[str, str]]:
    yield "started", time_text(started.time)
    yield "series", ", ".join(f"{count:,} of {feature}" for feature, count in started.series.items())
    for note in started.notes:
        yield "note", note
    yield from setting_facts({**started.settings, **started.versions})


def setting_facts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the settings and versions that are not empty."""
    for name, value in settings.items():
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if value not in (None, "", (), {}):
            yield name, text if len(text) <= LONGEST_FACT else f"{text[:LONGEST_FACT]}…"


# -- figures -------------------------------------------------------------------------------------------------------------


def _drawn_score(summary: StepSummary) -> float | None:
    return None if summary.score is None else max(summary.score, LEAST_SCORE)


def _curves(
    name: str,
    title: str,
    ranks: Sequence[RankHistory],
    alarms: Sequence[Alarm],
    value: Callable[[StepSummary], float | None],
    limit: float | None = None,
) -> Plot | None:
    """A plot with a curve for each rank, and a line at each step with an alarm; None if there is nothing to draw.

    ``limit`` is drawn as a horizontal line.
    """
    traces: list[Figure] = []
    every: list[float] = []
    for number, rank in enumerate(ranks):
        points = [(summary.step, drawn) for summary in rank.summaries if (drawn := value(summary)) is not None]
        finite = [(step, y) for step, y in points if _drawable(y) is not None]
        every += [y for _, y in finite]
        colour = RANK_COLOURS[number % len(RANK_COLOURS)]
        hover = [f"rank {rank.rank}, step {step:,}: {y:.4g}" for step, y in points]
        curve = {"mode": "lines+markers" if len(points) < 3 else "lines", "line": {"color": colour, "width": 1.5}}
        ys = [_drawable(y) for _, y in points]
        traces.append(marker_series(f"rank {rank.rank}", [x for x, _ in points], ys, hover, {"color": colour}) | curve)
        gaps = [(step, y) for step, y in points if _drawable(y) is None][:MOST_LINES]
        if gaps and finite:  # an axis cannot show them, so they are marked at the height of the last finite value
            marker = {"color": colour, "symbol": "x", "size": 8}
            places: list[float | None] = [_value_at(finite, x) for x, _ in gaps]
            text = [f"rank {rank.rank}, step {x:,}: {y:.4g}" for x, y in gaps]
            traces.append(marker_series(f"not finite in rank {rank.rank}", [x for x, _ in gaps], places, text, marker))
        of_rank = [alarm for alarm in rank.alarms if alarm.level == "alarm"][:MOST_LINES]
        if of_rank and finite:
            marker = {"color": ALARM_COLOUR, "symbol": series_marker(number), "size": 9}
            heights = [_value_at(finite, alarm.step) if limit is None else _drawable(alarm.score) for alarm in of_rank]
            text, steps_of_rank = [label(str(alarm), 160) for alarm in of_rank], [alarm.step for alarm in of_rank]
            traces.append(marker_series(f"alarm in rank {rank.rank}", steps_of_rank, heights, text, marker))
    if not every:
        return None
    steps = sorted({alarm.step for alarm in alarms if alarm.level == "alarm"})[:MOST_LINES]
    lines = [vertical_line(step, ALARM_COLOUR, 1, dash="dot") for step in steps]
    if limit is not None:
        at = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": limit, "y1": limit}
        lines.append({**at, "line": {"color": SOFT, "width": 1}})
    wide = min(every) > 0 and max(every) > 100 * min(every)
    axis: dict[str, Any] = {"title": {"text": title.partition(" by ")[0].lower()}, "exponentformat": "power"}
    axis |= {"type": "log", "dtick": 1} if wide else {}
    xaxis = {"title": {"text": "step, counted from 0"}}
    drawn_figure = figure(traces, 320, xaxis=xaxis, yaxis=axis, shapes=lines)
    return Plot(name, f"{title} of {count_text(len(ranks), 'rank')}", drawn_figure)


def _drawable(value: float) -> float | None:
    """The number, or None (a gap in the curve) if it is not finite or too large for an axis."""
    return value if abs(value) < MOST_DRAWN else None


def _value_at(points: Sequence[tuple[int, float]], step: int) -> float:
    """The value at the last point up to a step, or else at the first point."""
    return next((y for at, y in reversed(points) if at <= step), points[0][1])
