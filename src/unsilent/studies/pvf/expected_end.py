"""When a campaign with ``--ci`` or ``--rel`` is expected to end: how many trials it will run, and how long they take.

How many looks a campaign needs depends on outcomes that its pilot hardly shows. So its looks are simulated with rates of
incorrect outputs that are drawn from what its trials leave open. What a trial costs is measured on the trials that are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from unsilent.campaigns.expected_end import ExpectedEnd
from unsilent.campaigns.rounds import Cell
from unsilent.studies.pvf.pilots import PilotView, TrialCost
from unsilent.studies.pvf.row_scopes import RowScope, StoredTrials
from unsilent.studies.pvf.simulated_looks import DRAWS, Floats, simulated_last_looks

LIKELY = (0.1, 0.5, 0.9)
"""Quantiles of the simulated campaigns that are shown: the range, and its middle."""
STORING, STORED = 0.0002, 1000
"""Seconds that a trial takes the driver, and how many measured trials that counts for: short rounds take longer for each."""
READING = 0.0001
"""Seconds for each stored trial until the result is there, after the last trial: about what was measured."""


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
    """The end that is expected from the trials so far, after look 0 of all cells is planned.

    Args:
        view: All trials so far, read as a pilot.
        rows: The rows that have to be precise.
        target_half_width: Half-widths that are enough for these estimates.
        confidence: Of the intervals of rows.
        most_trials: Trials that a cell may have.
        wall_seconds: How long trials take that keep one worker busy for so many seconds.
        driver: Seconds of rounds in which no worker ran a trial, and the trials of these rounds.
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
    """Expected seconds of one more trial of each cell, from measured times.

    A trial that evaluates more samples is taken to cost more by the counted costs. Trials that ran together have one time, that
    of the first: so times of a cell that differ from those of all cells by no more than they scatter count for all cells.
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
    """Counted costs of a trial that evaluates so many samples; 1 where all trials evaluate as many."""
    known = stored.description
    seconds = TrialCost(known.trial_seconds, known.sample_seconds).seconds(samples, known.samples)
    return seconds if stored.spec.samples is None and seconds else 1.0
