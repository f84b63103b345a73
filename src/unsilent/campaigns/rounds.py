"""Campaigns in rounds: what a look at all completed trials decided to run next, as it is stored.

A cell is one reported target at one number of flips, with one or several strata. Its first trials are a pilot, which decides
about the others and counts for nothing else; so what counts at a look was drawn after its size was decided. A
cell grows from look to look (`unsilent.statistics.interim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from unsilent.campaigns.spec import Json, TrialId
from unsilent.statistics.interim import size_at

Cell = tuple[str, int | None]
NO_LOOK = -1
"""Look of trials that count for no estimate."""
MOST_LOOKS = 100
"""A stratum has grown beyond any bound by then."""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The decision for one cell; the last one holds.

    Attributes:
        group, flips: The cell.
        target_precision: The precision it was planned for.
        pilot_trials: By stratum, its pilot trials.
        first_look_trials: By stratum, trials of look 0; empty until the pilot is done.
        pilot_means: By stratum, the mean share of wrong outputs that the pilot lets expect.
        look: Which look the cell has come to.
        pilot_samples: Samples of a pilot trial (`TrialId.sample_count`).
        wide_pilot_trials: By stratum, further pilot trials that evaluate more samples; they show how samples of one fault differ.
        wide_samples: Samples of such a trial.
        samples: Samples of the trials of looks, chosen from the pilot.
    """

    group: str
    flips: int | None
    target_precision: str
    pilot_trials: Mapping[str, int]
    first_look_trials: Mapping[str, int]
    pilot_means: Mapping[str, float]
    look: int = 0
    pilot_samples: int = 0
    wide_pilot_trials: Mapping[str, int] = field(default_factory=dict)
    wide_samples: int = 0
    samples: int = 0

    @property
    def cell(self) -> Cell:
        """The identity of the cell."""
        return self.group, self.flips

    def pilot_of(self, stratum: str) -> tuple[tuple[int, range], ...]:
        """Pilot trials of a stratum: samples of a trial, and numbers of the trials."""
        pilot = (self.pilot_samples, range(self.pilot_trials[stratum]))
        wide = self.wide_pilot_trials.get(stratum, 0)
        return (pilot, (self.wide_samples, range(wide))) if wide else (pilot,)

    def counting_trials(self, stratum: str, look: int | None = None) -> tuple[int, range]:
        """Samples and numbers of the trials that count at a look (the latest one); of a pilot that is all there is, its own."""
        if not self.first_look_trials:
            return self.pilot_samples, range(self.pilot_trials[stratum])
        start = dict(self.pilot_of(stratum)).get(self.samples, range(0)).stop
        size = size_at(self.look if look is None else look, self.first_look_trials[stratum])
        return self.samples, range(start, start + size)

    def is_counted(self, trial: TrialId, look: int | None = None) -> bool:
        """Whether a trial of one of its strata counts at a look (the latest one)."""
        samples, numbers = self.counting_trials(trial.target, look)
        return trial.sample_count == samples and trial.k in numbers

    def look_of_trial(self, trial: TrialId) -> int:
        """The look from which on a trial counts; `NO_LOOK` for one that never does, as of a pilot."""
        looks = range(self.look + 1 if self.first_look_trials else 1)
        return next((look for look in looks if self.is_counted(trial, look)), NO_LOOK)

    def trial_numbers(self, stratum: str) -> dict[int, range]:
        """All trials of a stratum: samples of a trial -> their numbers."""
        numbers = dict(self.pilot_of(stratum))
        samples, counting = self.counting_trials(stratum)
        return numbers | {samples: range(counting.stop)}

    @property
    def total_trials(self) -> int:
        """Trials of all strata, the pilot included."""
        return sum(len(numbers) for stratum in self.pilot_trials for numbers in self.trial_numbers(stratum).values())

    @property
    def pilot_size(self) -> int:
        """Pilot trials of all strata."""
        return sum(self.pilot_trials.values()) + sum(self.wide_pilot_trials.values())

    def to_json(self) -> Json:
        """Plain JSON values."""
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in asdict(self).items()}


def latest_plans(rounds: Iterable[Iterable[CellPlan]]) -> dict[Cell, CellPlan]:
    """The plans that hold after some rounds."""
    return {plan.cell: plan for cells in rounds for plan in cells}


def plans_by_stratum(rounds: Iterable[Iterable[CellPlan]]) -> dict[Cell, CellPlan]:
    """The plans that hold after some rounds, by stratum and number of flips."""
    return {(stratum, plan.flips): plan for plan in latest_plans(rounds).values() for stratum in plan.pilot_trials}


def trial_ids_of_plans(plans: Iterable[CellPlan]) -> Iterator[TrialId]:
    """All trials of some cells, one of every stratum after the other."""
    ends = [
        (stratum, plan.flips, numbers.stop, samples)
        for plan in plans
        for stratum in plan.pilot_trials
        for samples, numbers in plan.trial_numbers(stratum).items()
    ]
    for k in range(max((end for _, _, end, _ in ends), default=0)):
        for stratum, flips, end, samples in ends:
            if k < end:
                yield TrialId(stratum, flips, k, samples)
