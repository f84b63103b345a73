"""Robust z-score on a log scale: distance of a value from the median of recent values, relative to their spread.

    distance = log(value) - median            of the logs of the last `window` clean values
    spread   = max(1.4826 * MAD, floor)
    limit    = max(min(threshold * spread, log(largest_factor)), headroom * reach)                     upwards
    limit    = max(min(threshold * spread, log(smallest_factor)), headroom * reach, 18 / elements)     downwards
    score    = |distance| / limit;  alarm: score >= 1;  warning: score >= warning_share

*reach* is the largest distance of a clean value so far in that direction; it halves in `half_life` values. It widens the limit of
a series with heavy tails, which median and MAD do not capture. ``largest_factor`` narrows it if the spread is large: a value that
exceeds the usual one by this factor is an alarm, unless clean values came near that before. The gradient of a tensor with a
single element sometimes passes 0: see `log_of_smallest_norm`.

NaN and infinity are always an alarm, with the score inf. No value that raises an alarm is learnt.

*Zero* has no logarithm. It is an alarm in a series that was never 0 while `warm_up` values were collected, and is not learnt.

*Beginning*: during the first `warm_up` values of a series, only values that are not finite raise an alarm. During the first
`early` values a limit is at least ``log(early_factor)`` upwards and ``log(smallest_factor)`` downwards, because gradients change
fast then; from there, this widening decreases linearly to zero at twice as many values.

*New regime*: if consecutive values are outside the limits and agree with each other (all within one limit), only the first is an
alarm. The others are warnings. After `relearn` of them the window is moved to their mean, and the series is judged against that.
A persistent fault raises an alarm at its first step and then counts as usual. After `relearn` zeros, in a row or not, zero counts
as usual. A value that does not agree with those before it starts a new sequence, with an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import GRADIENT, NORM_INPUT_GRADIENT, VALUE, Bools, Floats, Series
from unsilent.detectors.thresholds import check_above, check_at_least, check_share

LOG_OF_ZERO = math.log(5e-324)
"""Used as the logarithm of 0: the logarithm of the smallest positive number."""
NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
BELOW_ALARM = float(np.nextafter(1.0, 0.0))
"""Score of a value that agrees with the alarm before it."""
_LOG_OF_RARE = 18.0
"""Negative logarithm of a probability that is considered negligible, 1.5e-8."""


class RobustZState(NamedTuple):
    """State of the rule for n series.

    Attributes:
        latest: float64[window, n], logarithms of clean values, in a ring buffer; infinity in places without a value.
        ordered: float64[window, n], the same logarithms in ascending order.
        learnt: int64[n], number of clean values so far.
        reach: float64[2, n], largest distance upwards and downwards, decayed.
        least_down: float64[n], smallest limit downwards: `log_of_smallest_norm`.
        run: int64[n], number of consecutive values outside the limits that agree.
        run_ends: float64[2, n], their smallest and largest logarithm.
        run_sum: float64[n], sum of their logarithms.
        zeros: int64[n], number of zeros so far; from `RobustZ.relearn` zeros on, zero counts as usual.
    """

    latest: Floats
    ordered: Floats
    learnt: NDArray[np.int64]
    reach: Floats
    least_down: Floats
    run: NDArray[np.int64]
    run_ends: Floats
    run_sum: Floats
    zeros: NDArray[np.int64]


def median_and_deviation(ordered: Floats, counts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Median and median absolute deviation of each column; NaN for an empty column.

    For an even number of values, the upper of the two middle values is returned.

    Args:
        ordered: float64[window, n], each column in ascending order.
        counts: int64[n], number of values at the start of each column that count.
    """
    median, deviation = np.full((2, ordered.shape[1]), np.nan)
    for count in set(counts.tolist()):
        columns = slice(None) if count == counts.min() == counts.max() else np.flatnonzero(counts == count)
        if count:
            values, half = ordered[:count, columns], count // 2
            middle = values[half]
            # The half + 1 values closest to the median lie side by side: of all such stretches the shortest way to its ends.
            ways = np.maximum(middle - values[: count - half], values[half:] - middle)
            median[columns], deviation[columns] = middle, ways.min(axis=0)
    return median, deviation


def log_of_smallest_norm(elements: NDArray[np.int64]) -> Floats:
    """Logarithm of the factor by which the norm of random elements may plausibly fall below its typical size."""
    return _LOG_OF_RARE / elements


@dataclass(frozen=True)
class RobustZ:
    """Rule on the two-sided robust z-score of logarithms, explained in the module.

    Attributes:
        threshold: Limit, in multiples of the spread.
        largest_factor, smallest_factor: Changes upwards and downwards that are an alarm for any spread.
        headroom: Limit, in multiples of the reach.
        half_life: Number of values in which a reach halves.
        window: Number of clean values for median and spread.
        floor: Smallest spread.
        warm_up: Number of clean values before a series is judged.
        early: Number of clean values during which limits are wider, see the module.
        early_factor: Factor of the limit upwards during that time.
        relearn: Number of consecutive, agreeing values outside the limits after which they count as usual; also the number of
            zeros.
        warning_share: Smallest score of a warning.
    """

    name: ClassVar[str] = "robust-z"
    threshold: float = 24.0
    largest_factor: float = 40.0
    smallest_factor: float = 100.0
    headroom: float = 3.5
    half_life: float = 600.0
    window: int = 50
    floor: float = 0.02
    warm_up: int = 20
    early: int = 80
    early_factor: float = 10000.0
    relearn: int = 8
    warning_share: float = 0.75

    def __post_init__(self) -> None:
        name = self.name
        check_above(name, 0, threshold=self.threshold, headroom=self.headroom)
        check_above(name, 0, half_life=self.half_life, floor=self.floor)
        factors = {key: getattr(self, key) for key in ("largest_factor", "smallest_factor", "early_factor")}
        check_above(name, 1, **factors)
        check_at_least(name, 2, window=self.window)
        check_at_least(name, 1, warm_up=self.warm_up, early=self.early, relearn=self.relearn)
        check_share(name, warning_share=self.warning_share)

    def reads(self, series: Series) -> bool:
        """Whether the series is of a gradient or of a tensor named by the user."""
        return series.feature in (GRADIENT, NORM_INPUT_GRADIENT, VALUE)

    def initial_state(self, series: Sequence[Series]) -> RobustZState:
        """The state without values."""
        n = len(series)
        elements = np.array([max(entry.elements, 1) for entry in series], dtype=np.int64)
        empty, none = np.full((self.window, n), np.inf), np.zeros(n, np.int64)
        least = log_of_smallest_norm(elements)
        pair = np.zeros((2, n))
        return RobustZState(empty, empty, none, pair, least, none, pair, np.zeros(n), none)

    def judge(self, state: RobustZState, values: Floats, seen: Bools, seconds: float) -> tuple[RobustZState, Judgement]:
        """The next state and the judgement of one step."""
        bad = seen & ~np.isfinite(values)
        usable, is_zero = seen & ~bad, values == 0
        with np.errstate(all="ignore"):
            logs = np.where(usable & ~is_zero, np.log(np.abs(values)), LOG_OF_ZERO)
        median, deviation = median_and_deviation(state.ordered, np.minimum(state.learnt, self.window))
        spread = np.maximum(NORMAL_MAD * deviation, self.floor)
        up, down = self._limits(state, spread)
        distance = logs - median
        scores = np.where(distance > 0, distance / up, -distance / down)
        usual_zero = is_zero & (state.zeros >= self.relearn)
        judged = usable & (state.learnt >= self.warm_up) & ~usual_zero
        outside = judged & (scores >= 1)
        run, ends, total = self._next_run(state, logs, usable, outside, up)
        agrees = outside & (run > 1)
        scores = np.where(bad, np.inf, np.where(judged, np.where(agrees, BELOW_ALARM, scores), np.nan))
        warnings = judged & (scores >= self.warning_share)
        judgement = make_judgement(seen, bad | (outside & ~agrees), warnings, scores, np.exp(median))
        clean = usable & ~outside & ~is_zero
        state = self._learn(state, logs, distance, clean)._replace(run=run, run_ends=ends, run_sum=total)
        at_start = usable & is_zero & (state.learnt < self.warm_up)
        state = state._replace(zeros=np.where(at_start, self.relearn, state.zeros + (usable & is_zero)))
        return (self._relearn(state, median, is_zero) if (run >= self.relearn).any() else state), judgement

    def _limits(self, state: RobustZState, spread: Floats) -> tuple[Floats, Floats]:
        """Limits of the distances above and below the median, float64[n] each."""
        wide = self.threshold * spread
        up = np.maximum(np.minimum(wide, math.log(self.largest_factor)), self.headroom * state.reach[0])
        down = np.maximum(np.minimum(wide, math.log(self.smallest_factor)), self.headroom * state.reach[1])
        down = np.maximum(down, state.least_down)
        early = np.clip(2 - state.learnt / self.early, 0, 1)
        if early.any():
            up = up + early * np.maximum(math.log(self.early_factor) - up, 0)
            down = down + early * np.maximum(math.log(self.smallest_factor) - down, 0)
        return up, down

    def _next_run(
        self, state: RobustZState, logs: Floats, usable: Bools, outside: Bools, limit: Floats
    ) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Length, extremes and sum of the runs of alarms with similar values, after this step."""
        if not (outside.any() or state.run.any()):
            return state.run, state.run_ends, state.run_sum
        low, high = np.minimum(state.run_ends[0], logs), np.maximum(state.run_ends[1], logs)
        agrees = outside & (state.run > 0) & (high - low <= limit)
        run = np.where(outside, np.where(agrees, state.run + 1, 1), np.where(usable, 0, state.run))
        ends = np.where(outside, np.where(agrees, [low, high], logs), state.run_ends)
        return run, ends, np.where(outside, np.where(agrees, state.run_sum + logs, logs), state.run_sum)

    def _learn(self, state: RobustZState, logs: Floats, distance: Floats, clean: Bools) -> RobustZState:
        """The state after learning the clean values of this step."""
        place, columns = state.learnt % self.window, np.arange(len(logs))
        oldest = state.latest[place, columns]
        latest = state.latest.copy()
        latest[place, columns] = np.where(clean, logs, oldest)
        # Remove the oldest, then insert the new value: each place takes the middle one of its neighbours and the new value.
        rest = np.where(state.ordered[:-1] < oldest, state.ordered[:-1], state.ordered[1:])
        new = np.where(clean, logs, oldest)
        ordered = np.empty_like(state.ordered)
        ordered[0], ordered[-1] = np.minimum(rest[0], new), np.maximum(rest[-1], new)
        ordered[1:-1] = np.maximum(rest[:-1], np.minimum(rest[1:], new))
        faded = 0.5 ** (1 / self.half_life) * state.reach
        known = clean & (state.learnt >= self.warm_up)
        reach = np.where(clean, np.where(known, np.maximum(faded, [distance, -distance]), faded), state.reach)
        return state._replace(latest=latest, ordered=ordered, learnt=state.learnt + clean, reach=reach)

    def _relearn(self, state: RobustZState, median: Floats, is_zero: Bools) -> RobustZState:
        """The state after accepting values as normal whose alarms agreed for long enough."""
        ended = state.run >= self.relearn
        shift = np.where(ended & ~is_zero, state.run_sum / np.maximum(state.run, 1) - median, 0.0)
        least = math.log(self.largest_factor) / self.headroom
        reach = np.where(shift != 0, np.maximum(state.reach, least), state.reach)
        state = state._replace(latest=state.latest + shift, ordered=state.ordered + shift)
        return state._replace(reach=reach, run=np.where(ended, 0, state.run))
