"""Forecasts outcomes from pilot trials, and chooses the number of samples of a trial.

Estimates from a short pilot are imprecise. Means are therefore shrunk towards the mean of all strata of the same class of bits,
and variances are computed with slightly more events than were observed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unsilent.campaigns.rounds import Cell, CellPlan
from unsilent.outcomes.tallies import Tally
from unsilent.statistics import Stratum
from unsilent.studies.pvf.row_scopes import StoredTrials
from unsilent.studies.pvf.spec import TargetInfo

PILOT = 4
"""Minimum number of pilot trials of each stratum."""
PILOT_OF_TARGET = 24
"""Minimum number of pilot trials of a target, over all its strata."""
PILOT_OF_CLASS = 20
"""Minimum number of pilot trials of a class of bits, over all targets; means are shrunk towards those of classes."""
WIDE_SAMPLES = 16
"""Samples of each wide trial; these few pilot trials show how samples of one fault differ."""
WIDE_OF_CLASS = 2
"""Minimum number of wide trials of each class of bits; each may cost as much as 16 other trials."""
PILOT_PER_WIDE = 16
"""Other trials for each wide trial in a longer pilot, so that wide trials do not cost more than these."""
PSEUDO_COUNT = 4.0
"""Number of trials that the mean of the class counts as; in simulations, 2 to 6 do equally well."""
PSEUDO_EVENTS = 0.5
"""Outcomes of either kind that are added in each class for variances: a class without events in a pilot may have some later."""
WITHIN = 0.5
"""Part of the variance that is assumed to lie between samples of one fault before trials show it."""
WITHIN_WEIGHT = 0.5
"""Weight of `WITHIN`: that of two trials of a stratum with half of the outputs wrong."""
SAVING = 0.03
"""More samples per trial are chosen only if they save at least this part of the cost, since costs are estimates."""

_MANY = 1000.0
"""Number of trials that an expected outcome counts as."""


def class_of(stratum: str) -> str:
    """The class of bits of a stratum, which is the last part of its name."""
    return stratum.rpartition("/")[2]


def first_pilot(targets: Mapping[str, Sequence[str]]) -> dict[str, dict[str, int]]:
    """The number of pilot trials of each stratum, by target."""
    members = _by_class(name for names in targets.values() for name in names)
    result: dict[str, dict[str, int]] = {}
    for group, names in targets.items():
        least = max(PILOT, math.ceil(PILOT_OF_TARGET / len(names)))
        of_class = {name: math.ceil(PILOT_OF_CLASS / len(members[class_of(name)])) for name in names}
        result[group] = {name: max(least, of_class[name]) for name in names}
    return result


def first_wide_pilot(strata: Iterable[str]) -> dict[str, int]:
    """The number of pilot trials with many samples, by stratum."""
    result = {}
    for number, names in enumerate(_by_class(strata).values()):
        for i, place in enumerate(range(number, number + len(names))):
            result[names[place % len(names)]] = WIDE_OF_CLASS // len(names) + (i < WIDE_OF_CLASS % len(names))
    return result


def _by_class(strata: Iterable[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = defaultdict(list)
    for name in strata:
        members[class_of(name)].append(name)
    return members


@dataclass(frozen=True)
class Forecast:
    """The expected mean and variance of the outcomes of a stratum.

    Attributes:
        mean: Share of incorrect outputs.
        likely: Mean for variances, slightly nearer to one half, since outcomes that were not observed may happen.
        within: Part of the variance of single outcomes that lies between samples of one fault; the rest lies between faults.
    """

    mean: float
    likely: float
    within: float

    def stratum(self, weight: float, left: float) -> Stratum:
        """A stratum of two outcomes with the expected mean and variance; see `variance_left` for ``left``."""
        top = self.likely + (1 - self.likely) * (1 - self.within * (1 - left))
        share = self.likely / top
        return Stratum(weight, np.array([0.0, top]), _MANY * np.array([1 - share, share]), self.mean)


def variance_left(sample_count: int, samples: Sequence[int]) -> float:
    """The part of the variance between samples of one fault that remains in a mean of samples.

    ``sample_count`` is the number of samples in the mean; 0 stands for all.

    ``samples`` has the number of samples of each batch. Differences between batches are unknown, so a whole batch counts like as
    many samples from all batches.
    """
    whole = sum(samples)
    if not sample_count or whole == 1:
        return 0.0
    sample_count = min(sample_count, max(samples))
    return (1 - sample_count / whole) / sample_count * whole / (whole - 1) if len(samples) == 1 else 1 / sample_count


def forecasts(pilots: Mapping[Cell, Tally], left: Callable[[int], float] | None) -> dict[Cell, Forecast]:
    """The forecast of each stratum, from its own pilot trials and those of its class of bits.

    ``left`` returns the part of the variance within a fault that remains in a mean of so many samples (`variance_left`). It is
    None if all trials evaluate equally many samples; ``within`` then covers all that they lack of the variance of single samples.
    """
    members: dict[tuple[str, int | None], list[Cell]] = defaultdict(list)
    for name, flips in pilots:
        members[class_of(name), flips].append((name, flips))
    shares = {cell: tally.incorrect_share_per_trial for cell, tally in pilots.items()}
    means, spreads = {}, {}
    within: dict[tuple[str, int | None], tuple[float, float]] = {}
    for key, cells in members.items():
        together = np.concatenate([shares[c] for c in cells])
        events, n = float(together.sum()), len(together)
        means[key], spreads[key] = events / n, (events + PSEUDO_EVENTS) / (n + 2 * PSEUDO_EVENTS)
        within[key] = _within(means[key], [pilots[c] for c in cells], left)
    prior = WITHIN if left is not None else 0.0
    whole = _ratio(sum(w for w, _ in within.values()), sum(t for _, t in within.values()), prior)
    result = {}
    for key, cells in members.items():
        for cell in cells:
            events, n = float(shares[cell].sum()), len(shares[cell])
            mean, likely = ((events + PSEUDO_COUNT * m) / (n + PSEUDO_COUNT) for m in (means[key], spreads[key]))
            result[cell] = Forecast(mean, likely, _ratio(*within[key], whole))
    return result


def _within(mean: float, pilots: Sequence[Tally], left: Callable[[int], float] | None) -> tuple[float, float]:
    """The variance between samples of one fault and the total variance, summed over trials."""
    within_faults = total = 0.0
    for tally in pilots:
        shares, units = tally.incorrect_share_per_trial, tally.units_per_trial
        units = units[units > 0]
        if left is None:
            total += len(shares) * mean * (1 - mean)
            within_faults += len(shares) * mean * (1 - mean) - float(((shares - mean) ** 2).sum())
            continue
        for share, n in zip(shares[units > 1], units[units > 1], strict=True):
            within_faults += float(share * (1 - share)) / (1 - left(int(n)))
            total += mean * (1 - mean)
    return within_faults, total


def _ratio(part: float, whole: float, prior: float) -> float:
    return min(1.0, max(0.0, (part + WITHIN_WEIGHT * prior) / (whole + WITHIN_WEIGHT)))


@dataclass(frozen=True)
class TrialCost:
    """The expected seconds of a trial: a fixed part per batch and a part per sample."""

    per_trial: float
    per_sample: float

    def seconds(self, sample_count: int, samples: Sequence[int]) -> float:
        """The seconds of a trial with ``sample_count`` samples of one batch; 0 stands for all batches."""
        if sample_count:
            return self.per_trial + self.per_sample * min(sample_count, max(samples))
        return len(samples) * self.per_trial + sum(samples) * self.per_sample


class PilotView:
    """The forecasts from the pilot trials of some plans.

    ``with_all`` uses all stored trials instead.

    Attributes:
        stored: The trials.
        forecasts: Forecast of each stratum at each number of flips.
        cost: Cost of a trial; None if the number of samples per trial is given, or batches have one sample.
    """

    def __init__(self, stored: StoredTrials, plans: Sequence[CellPlan], with_all: bool = False) -> None:
        self.stored = stored
        self._samples = stored.description.samples
        self._pilots: dict[Cell, Tally] = {}
        for plan in plans:
            for name in plan.pilot_trials:
                which = tuple(plan.trial_numbers(name).items()) if with_all else plan.pilot_of(name)
                self._pilots[name, plan.flips] = stored.pilot(name, plan.flips, which)
        self._is_open = stored.spec.samples is None
        self.forecasts = forecasts(self._pilots, self.variance_left if self._is_open else None)
        self.cost: TrialCost | None = None
        if self._is_open and max(self._samples) > 1:
            self.cost = TrialCost(stored.description.trial_seconds, stored.description.sample_seconds)

    def variance_left(self, sample_count: int) -> float:
        """The part of the variance between samples of one fault that remains in a mean of samples.

        It is 0 if all trials evaluate equally many samples.
        """
        return variance_left(sample_count, self._samples) if self._is_open else 0.0

    def strata(
        self, targets: Sequence[TargetInfo], flips: int | None, sample_counts: Mapping[str, int]
    ) -> list[Stratum]:
        """The forecast strata for given numbers of samples per trial, with weights that sum to 1."""
        total = sum(t.share for t in targets)
        return [
            self.forecasts[t.name, flips].stratum(t.share / total, self.variance_left(sample_counts[t.name]))
            for t in targets
        ]

    def seen(self, targets: Sequence[TargetInfo], flips: int | None) -> list[Stratum]:
        """The strata with the outcomes that were observed."""
        total = sum(t.share for t in targets)
        return [Stratum.of(self._pilots[t.name, flips].incorrect_share_per_trial, t.share / total) for t in targets]

    def estimate(self, targets: Sequence[TargetInfo], flips: int | None) -> float:
        """The expected share of incorrect outputs over some strata."""
        return sum(t.share * self.forecasts[t.name, flips].mean for t in targets) / sum(t.share for t in targets)


def choose_samples(trials: Callable[[int], int], cost: TrialCost, samples: Sequence[int]) -> int:
    """The number of samples per trial with the least total cost; 0 stands for all samples.

    Each further sample saves fewer trials, so the search ends at the first number that costs more than the one before.
    """
    best, least = 1, math.inf
    before = math.inf
    largest = max(samples)
    candidates = [*(2**i for i in range(largest.bit_length()) if 2**i < largest), largest]
    for sample_count in [*candidates, 0] if len(samples) > 1 else candidates:
        seconds = trials(sample_count) * cost.seconds(sample_count, samples)
        if seconds < (1 - SAVING) * least:
            best, least = sample_count, seconds
        if seconds > before:
            break
        before = seconds
    return best
