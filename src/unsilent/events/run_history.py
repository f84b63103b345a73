"""History of a run from the events of a job, in limited memory, for `unsilent watch` and the report."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, TypeVar

from unsilent.events.event_kinds import (
    DONE,
    ONE_RANK,
    Alarm,
    AlarmExplained,
    Ended,
    Event,
    IncidentBegan,
    MonitorFailed,
    SamplingChanged,
    Started,
    StepSummary,
    Verdict,
)
from unsilent.report.text import count_text

MOST_INCIDENTS = 20


@dataclass(frozen=True)
class RunIncident:
    """The incident of an earlier run that another run continued.

    Attributes:
        step: Step of the training.
        fault: Kind of fault and its code; empty if it is not known.
        suspect: Rank that is suspected; -1 if no rank is named.
        folder: Folder in which it is recorded.
    """

    step: int
    fault: str
    suspect: int
    folder: str

    def __str__(self) -> str:
        parts = [self.fault, f"rank {self.suspect}" if self.suspect >= 0 else "no rank named"]
        where = "/".join(PurePath(self.folder).parts[-2:])
        return f"step {self.step}: {', '.join([*filter(None, parts), f'see {where}'])}"


@dataclass
class EarlierRuns:
    """Counts and incidents of the runs before the last one.

    Attributes:
        runs, alarms: Number of runs that the last run continues, and of their alarms.
        other_runs, other_alarms: Number of runs and alarms of previous trainings.
        incidents: Last incidents of the runs that the last run continues.
    """

    runs: int = 0
    alarms: int = 0
    other_runs: int = 0
    other_alarms: int = 0
    incidents: list[RunIncident] = field(default_factory=list)

    def add(self, run: RankHistory) -> None:
        """Add a run that has ended."""
        self.runs, self.alarms = self.runs + 1, self.alarms + run.alarm_count
        if run.incident is not None:
            known = next((explained for explained in run.explained if explained.step == run.incident.step), None)
            fault = f"{known.fault}{f' ({known.code})' if known.code else ''}" if known else ""
            step = (run.started.first_step or 0 if run.started else 0) + run.incident.step
            new = RunIncident(step, fault, run.incident.suspect, run.incident.folder)
            self.incidents = [*self.incidents, new][-MOST_INCIDENTS:]

    def start_anew(self) -> None:
        """Count the runs so far as another training, which the next run does not continue."""
        self.other_runs, self.other_alarms = self.other_runs + self.runs, self.other_alarms + self.alarms
        self.runs = self.alarms = 0
        self.incidents = []


def of_all_ranks(ranks: Iterable[EarlierRuns]) -> EarlierRuns:
    """The earlier runs of all ranks combined; an incident reported by several ranks counts once."""
    result = EarlierRuns()
    every: list[RunIncident] = []
    for earlier in ranks:
        result.runs, result.other_runs = max(result.runs, earlier.runs), max(result.other_runs, earlier.other_runs)
        result.alarms, result.other_alarms = result.alarms + earlier.alarms, result.other_alarms + earlier.other_alarms
        every += earlier.incidents
    result.incidents = sorted(dict.fromkeys(every), key=lambda incident: incident.step)[-MOST_INCIDENTS:]
    return result


OK, WARNING = "ok", "warning"


def health_after(health: str, event: Event) -> str:
    """The health of a rank's device after an event: `WARNING` after an alarm or a verdict that suspects the rank."""
    if isinstance(event, StepSummary):
        return event.health
    raised = isinstance(event, Alarm) and event.level == "alarm"
    suspected = isinstance(event, Verdict) and event.suspect == event.rank
    return WARNING if raised or suspected else health


MOST_SUMMARIES = 4096
"""Largest number of summaries of a rank; if there are more, every two are merged."""
MOST_KEPT = 1000
"""Largest number of alarms, of verdicts and of sampling changes that are kept for one rank: the first ones."""
MOST_LATEST = 20
MOST_NAMED = 3
"""Largest number of earlier runs' incidents in a headline: the last ones."""
Agreed = TypeVar("Agreed", Verdict, AlarmExplained)


@dataclass
class RankHistory:
    """History of one rank of a run.

    Attributes:
        summaries: At most `MOST_SUMMARIES` summaries; of two merged ones, the later one with the larger score.
        alarms: The first alarms of both levels; ``latest_alarms``: the last ones.
        alarm_count, warning_count: Total number of alarms and of warnings.
        last: The last event.
        has_judged: Whether a rule has judged a value by more than whether it is finite.
        incident: Recorded incident; None if there is none.
        explained: Explanations of alarms.
        longest_gap: Longest time between two events in seconds.
    """

    rank: int
    started: Started | None = None
    ended: Ended | None = None
    failed: MonitorFailed | None = None
    last: Event | None = None
    health: str = OK
    alarm_count: int = 0
    warning_count: int = 0
    summaries: list[StepSummary] = field(default_factory=list)
    sampling: list[SamplingChanged] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    latest_alarms: deque[Alarm] = field(default_factory=lambda: deque(maxlen=MOST_LATEST))
    verdicts: list[Verdict] = field(default_factory=list)
    latest_verdicts: deque[Verdict] = field(default_factory=lambda: deque(maxlen=MOST_LATEST))
    incident: IncidentBegan | None = None
    explained: list[AlarmExplained] = field(default_factory=list)
    last_step: int = -1
    has_judged: bool = False
    longest_gap: float = 0.0

    def add(self, event: Event) -> None:
        """Add the next event of this rank."""
        self.longest_gap = max(self.longest_gap, event.time - self.last.time if self.last else 0.0)
        self.last, self.health = event, health_after(self.health, event)
        if isinstance(event, (StepSummary, Alarm, Verdict)):
            self.last_step = max(self.last_step, event.step)
        if isinstance(event, StepSummary):
            self.summaries.append(event)
            self.has_judged |= event.score is not None
            if len(self.summaries) > MOST_SUMMARIES:
                pairs = zip(self.summaries[:-1:2], self.summaries[1::2], strict=True)
                self.summaries = [replace(b, score=_larger(a.score, b.score)) for a, b in pairs] + self.summaries[-1:]
        elif isinstance(event, Alarm):
            self.alarm_count += event.level == "alarm"
            self.warning_count += event.level != "alarm"
            self.latest_alarms.append(event)
            _keep(self.alarms, event)
        elif isinstance(event, Verdict):
            self.latest_verdicts.append(event)
            _keep(self.verdicts, event)
        elif isinstance(event, IncidentBegan):
            self.incident = self.incident or event
        elif isinstance(event, AlarmExplained):
            _keep(self.explained, event)
        elif isinstance(event, SamplingChanged):
            _keep(self.sampling, event)
        elif isinstance(event, Started):
            self.started = event
        elif isinstance(event, MonitorFailed):
            self.failed = event
        elif isinstance(event, Ended):
            self.ended = event

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.ended.steps if self.ended else self.last_step + 1

    @property
    def state(self) -> str:
        """State of the rank: ``running``, ``monitor failed``, ``ended``, ``error`` or ``stopped``; see `Ended`."""
        if self.ended is None:
            return "monitor failed" if self.failed else "running"
        return "ended" if self.ended.how == DONE else self.ended.how

    @property
    def cost(self) -> float | None:
        """Share of the time spent by the monitor, in the whole run or recently; None if it is unknown."""
        return self.ended.cost if self.ended else self.summaries[-1].cost if self.summaries else None


class RunHistory:
    """History of the last run in the events of a job, with alarms and incidents of earlier runs."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._ranks: dict[int, RankHistory] = {}
        self._earlier: dict[int, EarlierRuns] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Add an event; the events of each rank must come in order."""
        rank = self._ranks.setdefault(event.rank, RankHistory(event.rank))
        if isinstance(event, Started) and rank.last is not None:
            earlier = self._earlier.setdefault(event.rank, EarlierRuns())
            earlier.add(rank)
            if event.first_step is None:
                earlier.start_anew()
            rank = self._ranks[event.rank] = RankHistory(event.rank)
        rank.add(event)

    @property
    def earlier(self) -> EarlierRuns:
        """The runs before the last one, on all ranks."""
        ranks = self.ranks
        present, continues = {rank.rank for rank in ranks}, self.first_step is not None
        every = []
        for number, rank in self._ranks.items():
            earlier = self._earlier.get(number, EarlierRuns())
            if number not in present:
                earlier = replace(earlier)
                earlier.add(rank)
                if not continues:
                    earlier.start_anew()
            every.append(earlier)
        return of_all_ranks(every)

    @property
    def first_step(self) -> int | None:
        """Training step at which the last run continues; None if it is unknown."""
        return next((rank.started.first_step for rank in self.ranks if rank.started is not None), None)

    @property
    def has_alarm(self) -> bool:
        """Whether the last run, or one that it continues, had an alarm."""
        earlier = self.earlier
        return bool(self.alarm_count or earlier.alarms or earlier.incidents)

    @property
    def ranks(self) -> list[RankHistory]:
        """Histories of the ranks of the last run; further ranks of an earlier run are left out."""
        ranks = [self._ranks[number] for number in sorted(self._ranks)]
        starts = [rank.started for rank in ranks if rank.started is not None]
        size = max(starts, key=lambda start: start.time).world_size if starts else len(ranks)
        return [rank for rank in ranks if rank.rank < size or not starts]

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the last run that have no events, the first `MOST_LATEST` of them."""
        starts = [rank.started for rank in self.ranks if rank.started is not None]
        size, known = max((start.world_size for start in starts), default=0), {rank.rank for rank in self.ranks}
        return list(itertools.islice((rank for rank in range(size) if rank not in known), MOST_LATEST))

    @property
    def has_ended(self) -> bool:
        """Whether every rank with events has written its last one."""
        ranks = self.ranks
        return bool(ranks) and all(rank.ended is not None for rank in ranks)

    @property
    def steps(self) -> int:
        """The largest number of steps of any rank."""
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def alarm_count(self) -> int:
        """Number of alarms of all ranks, without warnings."""
        return sum(rank.alarm_count for rank in self.ranks)

    @property
    def verdicts(self) -> list[Verdict]:
        """The first verdicts; one reported by several ranks is listed once."""
        return _distinct(verdict for rank in self.ranks for verdict in rank.verdicts)

    @property
    def latest_verdicts(self) -> list[Verdict]:
        """The latest verdicts; one reported by several ranks is listed once."""
        return _distinct(verdict for rank in self.ranks for verdict in rank.latest_verdicts)

    @property
    def incident(self) -> IncidentBegan | None:
        """The recorded incident, which all ranks report; None if there is none."""
        incidents = [rank.incident for rank in self.ranks if rank.incident is not None]
        return min(incidents, key=lambda incident: (incident.time, incident.rank), default=None)

    @property
    def explained(self) -> list[AlarmExplained]:
        """Kinds of fault behind alarms; one reported by several ranks is listed once."""
        return _distinct(event for rank in self.ranks for event in rank.explained)

    @property
    def suspects(self) -> list[int]:
        """Ranks that a verdict suspects, the one suspected most often first."""
        return [rank for rank, _ in Counter(verdict.suspect for verdict in self.verdicts).most_common() if rank >= 0]

    @property
    def headline(self) -> str:
        """A summary, such as ``3 alarms in 12,000 steps of 2 ranks; rank 1 is suspected``."""
        alarms = count_text(self.alarm_count, "alarm") if self.alarm_count else "no alarm"
        suspects = self.suspects
        who = f"rank {suspects[0]} is suspected" if suspects else "the faulty rank is undetermined"
        who = f"ranks {', '.join(map(str, sorted(suspects)[:8]))} are suspected" if len(suspects) > 1 else who
        where = f"{self._steps_text} of {count_text(len(self.ranks), 'rank')}"
        where += f", from step {self.first_step} of the training on" if self.first_step else ""
        parts = [f"{alarms} in {where}"] if self.ranks else ["no events yet"]
        parts += [who] if any(verdict.reason != ONE_RANK for verdict in self.verdicts) else []
        parts += [self.explained[-1].kind_text] if self.explained else []
        return "; ".join([*parts, *self._what_was_not_judged(), *_of_earlier(self.earlier)])

    @property
    def _steps_text(self) -> str:
        """Text with the number of steps, or with the smallest and the largest number if ranks differ."""
        least = min((rank.steps for rank in self.ranks), default=0)
        text = count_text(self.steps, "step")
        return text if least == self.steps else f"{least:,} to {text}"

    def _what_was_not_judged(self) -> Iterator[str]:
        ranks = self.ranks
        if ranks and all(rank.ended and not rank.ended.longest_wait for rank in ranks):
            yield (
                "no step was read, so that only losses that are not finite and norms of gradients that clip_grad_norm_ computes "
                "were checked"
            )
        if unjudged := self.unjudged_text:
            yield unjudged
        elif any(rank.summaries for rank in ranks) and not any(rank.has_judged for rank in ranks):
            yield "rules have judged no value yet"

    @property
    def unjudged_text(self) -> str:
        """Text on series with too few values to be judged, on ranks that have ended; empty if there are none."""
        ended = [rank for rank in self.ranks if rank.ended and rank.ended.unjudged]
        counts = {rank.rank: rank.ended.unjudged for rank in ended if rank.ended}
        if not counts:
            return ""
        rank = max(counts, key=lambda number: counts[number])
        where = f" of rank {rank}" if len(set(counts.values())) > 1 or len(counts) < len(self.ranks) else ""
        return f"{counts[rank]:,} series{where} had too few values to be judged"

    def as_json(self) -> dict[str, Any]:
        """The history as JSON values."""
        earlier = self.earlier
        return {
            "headline": self.headline,
            "first_step": self.first_step,
            "steps": self.steps,
            "alarms": self.alarm_count,
            "warnings": sum(rank.warning_count for rank in self.ranks),
            "ended": self.has_ended,
            "earlier_runs": earlier.runs,
            "earlier_alarms": earlier.alarms,
            "earlier_incidents": list(map(str, earlier.incidents)),
            "other_runs": earlier.other_runs,
            "other_alarms": earlier.other_alarms,
            "ranks": [_rank_json(rank) for rank in self.ranks],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "incident": self.incident.to_json() if self.incident else None,
            "fault_verdicts": [event.to_json() for event in self.explained],
            "latest_alarms": [alarm.to_json() for rank in self.ranks for alarm in rank.latest_alarms],
        }


def _of_earlier(earlier: EarlierRuns) -> Iterator[str]:
    """Yield texts on the alarms and the last incidents of the runs that the last run continues."""
    if earlier.alarms or earlier.incidents:
        alarms = count_text(earlier.alarms, "alarm") if earlier.alarms else "no alarm, but an incident"
        yield f"{alarms} in {'an earlier run' if earlier.runs == 1 else f'{earlier.runs:,} earlier runs'}"
        yield from map(str, earlier.incidents[-MOST_NAMED:])


def _rank_json(rank: RankHistory) -> dict[str, Any]:
    latest = rank.summaries[-1].to_json() if rank.summaries else {}
    return {
        "rank": rank.rank,
        "host": rank.started.host if rank.started else None,
        "device": rank.started.device if rank.started else None,
        "steps": rank.steps,
        **{name: latest.get(name) for name in ("loss", "gradient_norm", "score")},
        "health": rank.health,
        "cost": rank.cost,
        "sampling_interval": rank.sampling[-1].interval if rank.sampling else None,
        "alarms": rank.alarm_count,
        "warnings": rank.warning_count,
        "ended": rank.ended is not None,
        "how_ended": rank.ended.how if rank.ended else None,
        "unjudged": rank.ended.unjudged if rank.ended else None,
        "failed": rank.failed.error if rank.failed else None,
        "last_event_time": rank.last.time if rank.last else None,
    }


def _larger(first: float | None, second: float | None) -> float | None:
    known = [score for score in (first, second) if score is not None]
    return max(known, default=None)


def _keep(events: list[Any], event: Event) -> None:
    if len(events) < MOST_KEPT:
        events.append(event)


def _distinct(events: Iterable[Agreed]) -> list[Agreed]:
    """The events in the order of steps, without duplicates that differ only in time and reporting rank."""
    every = sorted(events, key=lambda event: (event.step, event.rank))
    return list({replace(event, time=0.0, rank=0): event for event in every}.values())
