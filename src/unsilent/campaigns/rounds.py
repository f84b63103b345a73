"""Campaigns in rounds: what a look at all completed trials decided to run next, as it is stored.

A cell is one reported target at one number of flips, with one or several strata. Its first trials are a pilot, which decides
about the others and counts for nothing else; so what counts at a look was drawn after its size was decided. A
cell grows from look to look (`unsilent.statistics.interim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from unsilent.campaigns.spec import Json, TrialId
from unsilent.statistics.interim import size_at

Cell = tuple[str, int | None]
NO_LOOK = -1
"""Of trials that count for no estimate."""
MOST_LOOKS = 100
"""A stratum has grown beyond any bound by then."""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """What was decided for one cell; the last decision holds.

    Attributes:
        group, flips: The cell.
        target_precision: The precision it was planned for.
        pilot_trials: By stratum, its pilot trials.
        first_look_trials: By stratum, trials of look 0; empty until the pilot is done.
        pilot_means: By stratum, the mean share of wrong outputs in the pilot.
        look: Which look the cell has come to.
    """

    group: str
    flips: int | None
    target_precision: str
    pilot_trials: Mapping[str, int]
    first_look_trials: Mapping[str, int]
    pilot_means: Mapping[str, float]
    look: int = 0

    @property
    def cell(self) -> Cell:
        """Its identity."""
        return self.group, self.flips

    def counting_trial_numbers(self, stratum: str, look: int | None = None) -> range:
        """Numbers of the trials that count at a look (the latest one); of a pilot that is all there is, they are its own."""
        start = self.pilot_trials[stratum]
        if not self.first_look_trials:
            return range(start)
        return range(start, start + size_at(self.look if look is None else look, self.first_look_trials[stratum]))

    def look_of_trial(self, stratum: str, k: int) -> int:
        """The look from which on a trial counts; `NO_LOOK` for one that never does, as of a pilot."""
        looks = range(self.look + 1 if self.first_look_trials else 1)
        return next((look for look in looks if k in self.counting_trial_numbers(stratum, look)), NO_LOOK)

    @property
    def total_trials(self) -> int:
        """Trials of all strata, the pilot included."""
        return sum(self.counting_trial_numbers(stratum).stop for stratum in self.pilot_trials)

    def to_json(self) -> Json:
        """Plain JSON values."""
        return {
            **asdict(self),
            "pilot_trials": dict(self.pilot_trials),
            "first_look_trials": dict(self.first_look_trials),
            "pilot_means": dict(self.pilot_means),
        }


def latest_plans(rounds: Iterable[Iterable[CellPlan]]) -> dict[Cell, CellPlan]:
    """What holds after some rounds."""
    return {plan.cell: plan for cells in rounds for plan in cells}


def plans_by_stratum(rounds: Iterable[Iterable[CellPlan]]) -> dict[Cell, CellPlan]:
    """What holds after some rounds, by stratum and number of flips."""
    return {(stratum, plan.flips): plan for plan in latest_plans(rounds).values() for stratum in plan.pilot_trials}


def trial_ids_of_plans(plans: Iterable[CellPlan]) -> Iterator[TrialId]:
    """All trials of some cells, one of every stratum after the other."""
    ends = [
        (stratum, plan.flips, plan.counting_trial_numbers(stratum).stop)
        for plan in plans
        for stratum in plan.pilot_trials
    ]
    for k in range(max((end for *_, end in ends), default=0)):
        for stratum, flips, end in ends:
            if k < end:
                yield TrialId(stratum, flips, k)
