"""Runs of a rank before its last one, in bounded memory: of the same training, and of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unsilent.events.run_history import RankHistory

MOST_INCIDENTS = 20


@dataclass(frozen=True)
class RunIncident:
    """The incident of a run that another one continued.

    Attributes:
        step: Step of the training.
        fault: Kind of fault and its code; empty where it is not known.
        suspect: -1 where no rank is named.
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
    """Runs before the last one.

    Attributes:
        runs, alarms: That the last run continues, and their alarms.
        other_runs, other_alarms: Of trainings before.
        incidents: The last ones of the runs that it continues.
    """

    runs: int = 0
    alarms: int = 0
    other_runs: int = 0
    other_alarms: int = 0
    incidents: list[RunIncident] = field(default_factory=list)

    def add(self, run: RankHistory) -> None:
        """Take a run that is over."""
        self.runs, self.alarms = self.runs + 1, self.alarms + run.alarm_count
        if run.incident is not None:
            known = next((explained for explained in run.explained if explained.step == run.incident.step), None)
            fault = f"{known.fault}{f' ({known.code})' if known.code else ''}" if known else ""
            step = (run.started.first_step or 0 if run.started else 0) + run.incident.step
            new = RunIncident(step, fault, run.incident.suspect, run.incident.folder)
            self.incidents = [*self.incidents, new][-MOST_INCIDENTS:]

    def start_anew(self) -> None:
        """The next run begins another training."""
        self.other_runs, self.other_alarms = self.other_runs + self.runs, self.other_alarms + self.alarms
        self.runs = self.alarms = 0
        self.incidents = []


def of_all_ranks(ranks: Iterable[EarlierRuns]) -> EarlierRuns:
    """The earlier runs of all ranks together; what several of them report is one incident."""
    result = EarlierRuns()
    every: list[RunIncident] = []
    for earlier in ranks:
        result.runs, result.other_runs = max(result.runs, earlier.runs), max(result.other_runs, earlier.other_runs)
        result.alarms, result.other_alarms = result.alarms + earlier.alarms, result.other_alarms + earlier.other_alarms
        every += earlier.incidents
    result.incidents = sorted(dict.fromkeys(every), key=lambda incident: incident.step)[-MOST_INCIDENTS:]
    return result
