"""Spikes of the root mean square of an update, relative to its running mean and standard deviation.

    alarm: value > mean + deviations * spread, and value > factor * mean

The idea is that of a study of faults in matrix products (arXiv 2604.00726, CCGrid 2026), which finds spikes of gradient norms and
of the update's root mean square with a dynamic threshold. Its rule and thresholds are not known: formula and numbers are chosen
here.
The root mean square is the L2 norm divided by the square root of the constant number of elements, so the rule compares L2 norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.asd_v3 import corrected_average
from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import L2, UPDATE, Bools, Floats, Series
from unsilent.detectors.thresholds import check_above, check_at_least, check_share


class RunningState(NamedTuple):
    """State of the rule: moving averages of the values and of their squares, and the number of learnt values.

    ``alarms`` int64[n]: number of finite values in a row that raised an alarm.
    """

    average: Floats
    squares: Floats
    learnt: NDArray[np.int64]
    alarms: NDArray[np.int64]


@dataclass(frozen=True)
class UpdateRms:
    """Rule on the size of an update relative to its running mean; values with an alarm are not learnt.

    Attributes:
        factor: Smallest ratio to the mean that is an alarm.
        deviations: Smallest distance from the mean that is an alarm, in standard deviations.
        decay: Decay of the averages.
        warm_up: Number of values of a series before it is judged.
        relearn: Number of finite alarms in a row after which the averages begin again.
    """

    name: ClassVar[str] = "update-rms"
    factor: float = 5.0
    deviations: float = 10.0
    decay: float = 0.98
    warm_up: int = 50
    relearn: int = 8

    def __post_init__(self) -> None:
        check_above(self.name, 1, factor=self.factor)
        check_above(self.name, 0, deviations=self.deviations)
        check_share(self.name, decay=self.decay)
        check_at_least(self.name, 1, warm_up=self.warm_up, relearn=self.relearn)

    def reads(self, series: Series) -> bool:
        """Whether the series is the L2 norm of a parameter's update."""
        return (series.feature, series.statistic) == (UPDATE, L2)

    def initial_state(self, series: Sequence[Series]) -> RunningState:
        """The state with empty averages."""
        zeros, none = np.zeros(len(series)), np.zeros(len(series), np.int64)
        return RunningState(zeros, zeros, none, none)

    def judge(self, state: RunningState, values: Floats, seen: Bools, seconds: float) -> tuple[RunningState, Judgement]:
        """The next state and the judgement of one step."""
        finite = np.isfinite(values)
        mean = corrected_average(state.average, state.learnt, self.decay)
        with np.errstate(all="ignore"):
            square = values * values
            spread = np.sqrt(np.maximum(corrected_average(state.squares, state.learnt, self.decay) - mean * mean, 0))
            limit = np.maximum(self.factor * mean, mean + self.deviations * spread)
            scores = np.where(values > 0, values / limit, 0.0)
        armed = (state.learnt >= self.warm_up) & (mean > 0)
        large = finite & armed & (scores >= 1)
        scores = np.where(finite, np.where(armed, scores, np.nan), np.inf)
        judgement = make_judgement(seen, ~finite | large, np.zeros(len(values), np.bool_), scores, mean)
        alarms = np.where(seen & finite, np.where(large, state.alarms + 1, 0), state.alarms)
        is_new, learnt = alarms >= self.relearn, seen & finite & ~large

        def updated(average: Floats, new: Floats) -> Floats:
            return np.where(is_new, 0.0, np.where(learnt, self.decay * average + (1 - self.decay) * new, average))

        counts = np.where(is_new, 0, state.learnt + learnt), np.where(is_new, 0, alarms)
        return RunningState(updated(state.average, values), updated(state.squares, square), *counts), judgement
