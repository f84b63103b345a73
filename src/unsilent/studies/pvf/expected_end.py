"""Forecasts the end of a campaign with ``--ci`` or ``--rel``: the number of trials and their duration.

The number of looks that a campaign needs depends on rare outcomes, of which its pilot has few. The looks are therefore simulated.
The rate of incorrect outputs of each stratum is drawn from a distribution given by its trials and those of its class of bits, and
determines the outcomes of its further trials. Looks follow each other as in `PrecisionPlanner`, with an approximation to the
half-widths of intervals. The duration of a trial is measured on stored trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.expected_end import ExpectedEnd
from unsilent.campaigns.rounds import Cell, CellPlan
from unsilent.statistics.interim import GROWTH, confidence_at
from unsilent.statistics.planning import expected_half_width, expected_interval
from unsilent.studies.pvf.pilots import PSEUDO_COUNT, PilotView, TrialCost
from unsilent.studies.pvf.row_scopes import RowScope, StoredTrials
from unsilent.studies.pvf.spec import TargetInfo

DRAWS = 100
"""Number of simulated campaigns."""
LAST = 15
"""Last look that is simulated."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _Trials:
    """The counted trials of a stratum in every simulated campaign.

    Attributes:
        forecast: Stratum of two outcomes with the expected mean and variance.
        top: Outcome of an incorrect trial in each simulated campaign; below 1 if a trial has several samples.
        means: Mean outcome of the trials so far in each simulated campaign.
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
        """The number of trials that count at each of the given interim looks."""
        result: Floats = np.ceil(self._first * GROWTH**looks)
        return result

    def run_until(self, looks: Ints) -> None:
        """Simulate the trials up to the given interim looks."""
        more = np.maximum(self.sizes(looks).astype(np.int64) - self._count, 0)
        self._sum += self.top * self._rng.binomial(more, self._chance)
        self._count += more
        self.means = self._sum / self._count


@dataclass
class _Row:
    """A row that must become precise, with the weights of its strata.

    ``correction`` is the factor on the approximate half-width.
    """

    cells: list[Cell]
    strata: list[_Trials]
    weights: Floats
    correction: float = 1.0

    def half_widths(self, looks: Ints, confidence: float) -> Floats:
        """The half-widths of the row's interval at the given interim looks, in each simulated campaign."""
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
    """The last interim look of each cell (target and number of flips), int64[draws].

    The arguments are those of `expected_end`.
    """
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
    """The last interim look that the maximum number of trials allows."""
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
    """Half-widths of intervals over strata, from arrays float64[strata, n].

    ``parts`` is the contribution of each stratum to the variance, and ``rates`` the largest effect of one trial on the estimate.
    """
    variance, coarsest = parts.sum(0), rates.max(0)
    step = np.divide((parts * rates).sum(0), variance, out=coarsest.copy(), where=variance > 0)
    result: Floats = expected_half_width(variance, coarsest, confidence, step)
    return result


def _more_looks(
    row: _Row, looks: dict[Cell, Ints], target_half_width: Callable[[Floats], Floats], confidence: float
) -> Ints:
    """How many more interim looks a row needs; 0 if it is precise enough."""
    now = np.min([looks[cell] for cell in row.cells], axis=0)
    aims = target_half_width(row.weights @ np.array([s.means for s in row.strata]))
    more = np.zeros(DRAWS, np.int64)
    for _ in range(LAST):
        wide = row.half_widths(now + more, confidence) > aims
        if not wide.any():
            break
        more += wide
    return more


LIKELY = (0.1, 0.5, 0.9)
"""Quantiles of the simulated campaigns that are shown: the range and its middle."""
STORING, STORED = 0.0002, 1000
"""Assumed seconds of the driver per trial, and the number of measured trials that this assumption counts as."""
READING = 0.0001
"""Seconds per stored trial from the last trial to the result, about as measured."""


def expected_end(
    stored: StoredTrials,
    view: PilotView,
    rows: Sequence[RowScope],
    target_half_width: Callable[[Floats], Floats],
    confidence: float,
    most_trials: int,
    wall_seconds: Callable[[float], float],
    driver: tuple[float, int] = (0.0, 0),
) -> ExpectedEnd:
    """The expected end of a campaign whose pilots are complete, forecast from the trials so far.

    Args:
        view: Forecasts from all trials so far.
        rows: The rows that must become precise.
        target_half_width: Function that returns sufficient half-widths for given estimates.
        confidence: Confidence of the intervals of rows.
        most_trials: Maximum number of trials of a cell.
        wall_seconds: Function that converts seconds of work of one worker to seconds of wall time.
        driver: Seconds of rounds in which no worker ran a trial, and the number of trials of these rounds.
    """
    looks = simulated_last_looks(stored, view, rows, target_half_width, confidence, most_trials)
    each = trial_seconds(stored)
    trials, work, left = np.zeros(DRAWS), np.zeros(DRAWS), np.zeros(DRAWS)
    for cell, plan in stored.plans.items():
        done = sum(stored.count(name, plan.flips) for name in plan.pilot_trials)
        totals = np.array([replace(plan, look=look).total_trials for look in range(looks[cell].max() + 1)])
        trials += totals[looks[cell]]
        left += totals[looks[cell]] - done
        work += (totals[looks[cell]] - done) * each[cell]
    storing = (driver[0] + STORED * STORING) / (driver[1] + STORED)
    seconds = [wall_seconds(float(w)) for w in work] + storing * left + READING * trials
    low, middle, high = (int(n) for n in np.quantile(trials, LIKELY))
    short, about, long = (float(s) for s in np.quantile(seconds, LIKELY))
    return ExpectedEnd((low, middle, high), (short, about, long), stored.trial_count)


def trial_seconds(stored: StoredTrials) -> dict[Cell, float]:
    """The expected seconds of one more trial of each cell (target and number of flips).

    Trials that evaluate more samples are assumed to take longer in proportion to their computed costs. Trials that ran together
    have one time, stored with the first, so times scatter: the mean of a cell is shrunk towards that of all cells.
    """
    times: dict[Cell, list[float]] = {cell: [] for cell in stored.plans}
    for cell, plan in stored.plans.items():
        rows = [row for name in plan.pilot_trials for row in stored.rows.get((name, plan.flips), ())]
        times[cell] = [row.seconds / _counted_seconds(stored, row.trial.sample_count) for row in rows]
    together = np.concatenate([np.array(seconds) for seconds in times.values()])
    whole = float(together.mean())
    errors = {cell: float(np.var(s, ddof=1)) / len(s) if len(s) > 1 else np.inf for cell, s in times.items()}
    means = {cell: float(np.mean(s)) if s else whole for cell, s in times.items()}
    between = max(0.0, float(np.mean([(means[c] - whole) ** 2 - min(errors[c], 1e18) for c in times])))
    result = {}
    for cell, plan in stored.plans.items():
        weight = between / (between + errors[cell]) if between else 0.0
        ratio = whole + weight * (means[cell] - whole)
        result[cell] = ratio * _counted_seconds(stored, plan.samples)
    return result


def _counted_seconds(stored: StoredTrials, samples: int) -> float:
    """The counted cost of a trial with ``samples`` samples; 1 if all trials evaluate equally many."""
    known = stored.description
    seconds = TrialCost(known.trial_seconds, known.sample_seconds).seconds(samples, known.samples)
    return seconds if stored.spec.samples is None and seconds else 1.0
