"""ASD of MindSpore 2.7.1 and torch_npu 7.1 (``NPU_ASD_CONFIG``): limits relative to a moving average, and strikes.

    value = (largest magnitude of the gradient) ** 2
    value 0: nothing happens. Not finite: a strike.
    scale = average / (1 - decay ** n), after n >= 10 learnt values if the average is not 0; before that, no value is judged
    strike:   value > upper_thresh1 * scale and |value - previous| > upper_thresh1 * scale
    else, value <= upper_thresh2 * scale: average = decay * average + (1 - decay) * value; n += 1
    previous = value

Thresholds are ratios of squares: 1e6 means 1000 times the usual largest magnitude, 100 means 10 times. Here a strike is an alarm;
a value above ``upper_thresh2 * scale`` that is not a strike is a warning. A strike within ``cooldown`` minutes of the last
counted one is not counted. ``strikes_num`` counted strikes within ``strikes_window`` minutes strike the rank out
(`StrikeState.struck_out`); the original then computes checksums of matrix products in all ranks. MindSpore drops strikes within
the cool-down, torch_npu keeps them as uncounted (``keeps_uncounted``); the counted ones are the same.

Source: ``silent_detector.cc`` of MindSpore and ``asd.py`` of torch_npu, as far as they are described. Not known, and chosen here:

- MindSpore's reduction of a gradient to a number: the largest magnitude, as in torch_npu;
- the precision of the square: float64, so it is 0 below a magnitude of about 1.6e-162;
- the previous value after one that is not finite: it is kept;
- which strikes are counted together: those of all parameters of a rank; several strikes in one step count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.asd_v3 import corrected_average
from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import GRADIENT, LARGEST, Bools, Floats, Series
from unsilent.detectors.thresholds import check_above, check_at_least, check_order, check_share

SECONDS_PER_MINUTE = 60.0


class StrikeState(NamedTuple):
    """State of the rule: moving averages of each series, and the strikes of the rank.

    Attributes:
        average: float64[n], moving average, without the correction for its start at 0.
        previous: float64[n], previous value.
        learnt: int64[n], number of values in the average.
        sampled: bool[n], the series that are judged: every ``grad_sample_interval``-th.
        strikes: Times of the last counted strikes in seconds, at most ``strikes_num``.
        uncounted: Times of strikes within the cool-down, if these are kept.
        struck_out: Whether the window that ends at this step contains ``strikes_num`` counted strikes.
    """

    average: Floats
    previous: Floats
    learnt: NDArray[np.int64]
    sampled: Bools
    strikes: tuple[float, ...] = ()
    uncounted: int = 0
    struck_out: bool = False


@dataclass(frozen=True)
class AsdCombined:
    """Rule on the largest squared element of a gradient, relative to its average and previous value, with strikes.

    Attributes:
        upper_thresh1, upper_thresh2: Limits of alarms and of warnings, in multiples of the average of squares.
        grad_sample_interval: Distance between judged parameters: 3 means every third one (torch_npu 3, MindSpore 10).
        cooldown, strikes_window: Durations in minutes.
        strikes_num: Number of strikes that strike a rank out.
        keeps_uncounted: Whether strikes within the cool-down are kept (torch_npu) or dropped (MindSpore).
        decay: Decay of the average.
        c_min_steps: Number of values of a series before it is judged.
    """

    name: ClassVar[str] = "asd-combined"
    upper_thresh1: float = 1e6
    upper_thresh2: float = 100.0
    grad_sample_interval: int = 3
    cooldown: float = 5.0
    strikes_num: int = 3
    strikes_window: float = 480.0
    keeps_uncounted: bool = True
    decay: float = 0.99
    c_min_steps: int = 10

    def __post_init__(self) -> None:
        check_above(self.name, 1, upper_thresh2=self.upper_thresh2, upper_thresh1=self.upper_thresh1)
        check_order(self.name, ("upper_thresh1", self.upper_thresh1), ("upper_thresh2", self.upper_thresh2))
        check_at_least(self.name, 1, grad_sample_interval=self.grad_sample_interval, strikes_num=self.strikes_num)
        check_at_least(self.name, 1, c_min_steps=self.c_min_steps)
        check_at_least(self.name, 0, cooldown=self.cooldown, strikes_window=self.strikes_window)
        check_share(self.name, decay=self.decay)

    def reads(self, series: Series) -> bool:
        """Whether the series is the largest magnitude of the gradient of a parameter with at least two dimensions."""
        return (series.feature, series.statistic) == (GRADIENT, LARGEST) and series.dimensions >= 2

    def initial_state(self, series: Sequence[Series]) -> StrikeState:
        """The state with empty averages and no strikes."""
        zeros = np.zeros(len(series))
        sampled = np.arange(len(series)) % self.grad_sample_interval == 0
        return StrikeState(zeros, zeros, np.zeros(len(series), np.int64), sampled)

    def judge(self, state: StrikeState, values: Floats, seen: Bools, seconds: float) -> tuple[StrikeState, Judgement]:
        """The next state and the judgement of one step."""
        armed = (state.learnt >= self.c_min_steps) & (state.average != 0)
        with np.errstate(all="ignore"):
            squares = values * values
            judged = seen & state.sampled & (squares != 0)
            finite = np.isfinite(squares)
            scale = np.where(armed, corrected_average(state.average, state.learnt, self.decay), np.nan)
            excess = np.minimum(squares, np.abs(squares - state.previous)) / scale / self.upper_thresh1
            strikes, high = judged & (~finite | (excess > 1)), squares > self.upper_thresh2 * scale
        scores = np.where(finite, excess, np.inf)
        judgement = make_judgement(judged, strikes, high, scores, np.sqrt(scale))
        learnt = judged & finite & ~high
        average = np.where(learnt, self.decay * state.average + (1 - self.decay) * squares, state.average)
        previous = np.where(judged & finite, squares, state.previous)
        state = state._replace(average=average, previous=previous, learnt=state.learnt + learnt)
        return self._count(state, bool(strikes.any()), seconds), judgement

    def _count(self, state: StrikeState, is_strike: bool, seconds: float) -> StrikeState:
        """The state after counting a strike, if this step is one, with the decision whether the rank is struck out."""
        strikes, uncounted = state.strikes, state.uncounted
        if is_strike:
            if not strikes or seconds - strikes[-1] >= self.cooldown * SECONDS_PER_MINUTE:
                strikes = (*strikes, seconds)[-self.strikes_num :]
            elif self.keeps_uncounted:
                uncounted += 1
        begin = seconds - self.strikes_window * SECONDS_PER_MINUTE
        struck_out = sum(strike >= begin for strike in strikes) >= self.strikes_num
        return state._replace(strikes=strikes, uncounted=uncounted, struck_out=struck_out)
