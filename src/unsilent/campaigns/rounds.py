"""Campaigns in rounds: stored decisions on which trials to run next.

A cell is one reported target at one number of flips, with one or several strata. Its first trials are a pilot, which is only
used to plan the others. So trials that count at a look were drawn after their number was decided. A cell grows from look to
look (`unsilent.statistics.interim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from unsilent.campaigns.spec import Json, TrialId
from unsilent.statistics.interim import size_at

Cell = tuple[str, int | None]
NO_LOOK = -1
"""Look number of trials that are not part of an estimate."""
MOST_LOOKS = 100
"""Most looks of a cell. After so many, a stratum would exceed any bound."""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """The plan for one cell, as decided in a round.

    A later plan replaces an earlier one of the same cell.

    Attributes:
        group, flips: Target and number of flips of the cell.
        target_precision: The precision that the cell was planned for.
        pilot_trials: Number of pilot trials, by stratum.
        first_look_trials: Number of trials of look 0, by stratum; empty until the pilot is done.
        pilot_means: Mean share of wrong outputs expected from the pilot, by stratum.
        look: Number of the look that the cell has reached.
        pilot_samples: Samples of a pilot trial (`TrialId.sample_count`).
        wide_pilot_trials: Number of further pilot trials that evaluate more samples, by stratum. They show how samples of one
            fault differ.
        wide_samples: Number of samples in such a trial.
        samples: Number of samples in trials of looks, chosen from the pilot.
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
        """The identity of the cell: group and number of flips."""
        return self.group, self.flips

    def pilot_of(self, stratum: str) -> tuple[tuple[int, range], ...]:
        """The pilot trials of a stratum, as pairs of samples per trial and trial numbers."""
        pilot = (self.pilot_samples, range(self.pilot_trials[stratum]))
        wide = self.wide_pilot_trials.get(stratum, 0)
        return (pilot, (self.wide_samples, range(wide))) if wide else (pilot,)

    def counting_trials(self, stratum: str, look: int | None = None) -> tuple[int, range]:
        """Samples per trial and numbers of the trials that count at a look, by default the latest one.

        Before the first look, the pilot trials count.
        """
        if not self.first_look_trials:
            return self.pilot_samples, range(self.pilot_trials[stratum])
        start = dict(self.pilot_of(stratum)).get(self.samples, range(0)).stop
        size = size_at(self.look if look is None else look, self.first_look_trials[stratum])
        return self.samples, range(start, start + size)

    def is_counted(self, trial: TrialId, look: int | None = None) -> bool:
        """Whether a trial counts at a look, by default the latest one."""
        samples, numbers = self.counting_trials(trial.target, look)
        return trial.sample_count == samples and trial.k in numbers

    def look_of_trial(self, trial: TrialId) -> int:
        """The first look at which a trial counts; `NO_LOOK` for a trial that never counts."""
        looks = range(self.look + 1 if self.first_look_trials else 1)
        return next((look for look in looks if self.is_counted(trial, look)), NO_LOOK)

    def trial_numbers(self, stratum: str) -> dict[int, range]:
        """The numbers of all trials of a stratum, by samples per trial."""
        numbers = dict(self.pilot_of(stratum))
        samples, counting = self.counting_trials(stratum)
        return numbers | {samples: range(counting.stop)}

    @property
    def total_trials(self) -> int:
        """The number of trials of all strata, including the pilot."""
        return sum(len(numbers) for stratum in self.pilot_trials for numbers in self.trial_numbers(stratum).values())

    @property
    def pilot_size(self) -> int:
        """The number of pilot trials of all strata."""
        return sum(self.pilot_trials.values()) + sum(self.wide_pilot_trials.values())

    def to_json(self) -> Json:
        """Plain JSON values."""
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in asdict(self).items()}


def latest_plans(rounds: Iterable[Iterable[CellPlan]]) -> dict[Cell, CellPlan]:
    """The latest plan for each cell."""
    return {plan.cell: plan for cells in rounds for plan in cells}


def plans_by_stratum(rounds: Iterable[Iterable[CellPlan]]) -> dict[Cell, CellPlan]:
    """The latest plans, by stratum and number of flips."""
    return {(stratum, plan.flips): plan for plan in latest_plans(rounds).values() for stratum in plan.pilot_trials}


def trial_ids_of_plans(plans: Iterable[CellPlan]) -> Iterator[TrialId]:
    """All trials of some cells, alternating between strata."""
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
