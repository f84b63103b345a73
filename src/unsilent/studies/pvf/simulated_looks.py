"""Simulates the look that each cell of a campaign with ``--ci`` or ``--rel`` may come to, from its trials so far.

The rate of incorrect outputs of each stratum is drawn from what its trials, and those of its class of bits, leave open. Trials
that are still to come then end by that rate, and looks follow each other as in `PrecisionPlanner`, with half-widths of intervals
taken from their approximation, `expected_half_width`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.rounds import Cell, CellPlan
from unsilent.statistics.interim import GROWTH, confidence_at
from unsilent.statistics.planning import expected_half_width, expected_interval
from unsilent.studies.pvf.pilots import PSEUDO_COUNT, PilotView
from unsilent.studies.pvf.row_scopes import RowScope, StoredTrials
from unsilent.studies.pvf.spec import TargetInfo

DRAWS = 100
"""Simulated campaigns."""
LAST = 15
"""The last look that is simulated."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _Trials:
    """The trials of a stratum that count at a look, in every simulated campaign.

    Attributes:
        forecast: Two outcomes, with the mean and variance that are expected.
        top: The outcome of an incorrect trial, by draw: below 1 where a trial has several samples.
        means: Mean outcome of the trials so far, by draw.
    """

    def __init__(
        self, target: TargetInfo, plan: CellPlan, stored: StoredTrials, view: PilotView, rng: np.random.Generator
    ) -> None:
        self._first, self._rng = plan.first_look_trials[target.name], rng
        forecast, left = view.forecasts[target.name, plan.flips], view.variance_left(plan.samples)
        known = stored.pilot(target.name, plan.flips, (plan.counting_trials(target.name),)).incorrect_share_per_trial
        seen = stored.count(target.name, plan.flips) + PSEUDO_COUNT
        middle = (forecast.mean + forecast.likely) / 2
        rate = rng.beta(middle * seen, (1 - middle) * seen, DRAWS)
        self.top = rate + (1 - rate) * (1 - forecast.within * (1 - left))
        self.forecast = forecast.stratum(target.share, left)
        self._chance = rate / self.top
        self._count, self._sum = np.full(DRAWS, len(known)), np.full(DRAWS, float(known.sum()))

    def sizes(self, looks: Ints) -> Floats:
        """Trials that count at these looks."""
        result: Floats = np.ceil(self._first * GROWTH**looks)
        return result

    def run_until(self, looks: Ints) -> None:
        """Simulate the trials up to these looks."""
        more = np.maximum(self.sizes(looks).astype(np.int64) - self._count, 0)
        self._sum += self.top * self._rng.binomial(more, self._chance)
        self._count += more
        self.means = self._sum / self._count


@dataclass
class _Row:
    """A row that has to be precise: its strata with their weights, and what the approximate half-width is multiplied with."""

    cells: list[Cell]
    strata: list[_Trials]
    weights: Floats
    correction: float = 1.0

    def half_widths(self, looks: Ints, confidence: float) -> Floats:
        """Half-widths of intervals at these looks, by draw, where trials to come end as those so far did."""
        means = np.array([s.means for s in self.strata])
        variances = means * np.maximum(np.array([s.top for s in self.strata]) - means, 0)
        rates = self.weights[:, None] / np.array([s.sizes(looks) for s in self.strata])
        levels = np.array([confidence_at(int(look), confidence) for look in looks])
        return self.correction * _half_widths(self.weights[:, None] * rates * variances, rates, levels)


def simulated_last_looks(
    stored: StoredTrials,
    view: PilotView,
    rows: Sequence[RowScope],
    target_half_width: Callable[[Floats], Floats],
    confidence: float,
    most_trials: int,
) -> dict[Cell, Ints]:
    """The look that each cell ends with, int64[draws]; arguments as of `expected_end`."""
    rng = np.random.default_rng(0)
    plans = stored.plans
    looks = {cell: np.full(DRAWS, plan.look) for cell, plan in plans.items()}
    highest = {cell: _highest_look(plan, most_trials) for cell, plan in plans.items()}
    trials = {
        (t.name, plan.flips): _Trials(t, plan, stored, view, rng)
        for plan in plans.values()
        for t in stored.description.targets_at(plan.flips)
        if t.group == plan.group
    }
    scopes = [_row(row, plans, trials, confidence) for row in rows]
    for _ in range(LAST):
        for (name, flips), sample in trials.items():
            sample.run_until(looks[stored.groups[name], flips])
        grown = dict(looks)
        for row in scopes:
            more = _more_looks(row, looks, target_half_width, confidence)
            for cell in row.cells:
                grown[cell] = np.maximum(grown[cell], np.minimum(looks[cell] + more, highest[cell]))
        if all((grown[cell] == looks[cell]).all() for cell in looks):
            break
        looks = grown
    return looks


def _highest_look(plan: CellPlan, most_trials: int) -> int:
    """The last look that the trials there may be are enough for."""
    further = range(plan.look + 1, LAST + 1)
    return max((look for look in further if replace(plan, look=look).total_trials <= most_trials), default=plan.look)


def _row(scope: RowScope, plans: dict[Cell, CellPlan], trials: dict[Cell, _Trials], confidence: float) -> _Row:
    cells = list(dict.fromkeys((t.group, scope.flips) for t in scope.targets))
    strata = [trials[t.name, scope.flips] for t in scope.targets]
    weights = np.array([t.share for t in scope.targets])
    row = _Row(cells, strata, weights / weights.sum())
    look = min(plans[cell].look for cell in cells)
    forecasts = [replace(s.forecast, weight=float(w)) for s, w in zip(strata, row.weights, strict=True)]
    sizes = np.array([s.sizes(np.array([look])) for s in strata])
    rates = row.weights[:, None] / sizes
    variances = np.array([[f.variance] for f in forecasts])
    level = confidence_at(look, confidence)
    rough = float(_half_widths(row.weights[:, None] * rates * variances, rates, level)[0])
    row.correction = expected_interval(forecasts, [int(n) for n in sizes[:, 0]], level).half_width / rough
    return row


def _half_widths(parts: Floats, rates: Floats, confidence: Floats | float) -> Floats:
    """Half-widths over strata, from parts of the variance and the most that a trial moves the estimate, float64[strata, n]."""
    variance, coarsest = parts.sum(0), rates.max(0)
    step = np.divide((parts * rates).sum(0), variance, out=coarsest.copy(), where=variance > 0)
    result: Floats = expected_half_width(variance, coarsest, confidence, step)
    return result


def _more_looks(
    row: _Row, looks: dict[Cell, Ints], target_half_width: Callable[[Floats], Floats], confidence: float
) -> Ints:
    """How many more looks the row is planned to need; 0 where it is precise enough."""
    now = np.min([looks[cell] for cell in row.cells], axis=0)
    aims = target_half_width(row.weights @ np.array([s.means for s in row.strata]))
    more = np.zeros(DRAWS, np.int64)
    for _ in range(LAST):
        wide = row.half_widths(now + more, confidence) > aims
        if not wide.any():
            break
        more += wide
    return more
