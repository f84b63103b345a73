"""Spikes of the loss, as in Lightning's ``SpikeDetection(window=10, warmup=1, rtol=2.0, finite_only=True)``.

    alarm: not finite; or value > previous and |value - mean| >= rtol * |mean|, the mean of the last `window` values

Values that raise an alarm are not learnt. Source: Lightning (``fabric/utilities/spike.py``), with the loss to be minimised and no
absolute tolerance. Lightning ends a training at a spike. Chosen here, for a training that continues: `relearn` finite alarms in a
row are a new level of the loss, and the window begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import LOSS, Bools, Floats, Series
from unsilent.detectors.thresholds import check_above, check_at_least


class LossState(NamedTuple):
    """State of the rule: the most recent values of each series.

    Attributes:
        recent: float64[window, n], the latest value first; missing values are 0.
        learnt: int64[n], number of values in ``recent``.
        alarms: int64[n], number of finite values in a row that raised an alarm.
    """

    recent: Floats
    learnt: NDArray[np.int64]
    alarms: NDArray[np.int64]


@dataclass(frozen=True)
class LossSpike:
    """Rule on the loss relative to the mean of its most recent values.

    Attributes:
        window: Number of values in the mean.
        warmup: Number of values before the first judged value.
        rtol: Distance from the mean that raises an alarm, in multiples of the mean.
        relearn: Number of finite alarms in a row that begin a new window.
    """

    name: ClassVar[str] = "loss-spike"
    window: int = 10
    warmup: int = 1
    rtol: float = 2.0
    relearn: int = 8

    def __post_init__(self) -> None:
        check_at_least(self.name, 1, window=self.window, warmup=self.warmup, relearn=self.relearn)
        check_above(self.name, 0, rtol=self.rtol)

    def reads(self, series: Series) -> bool:
        """Whether a series is the loss."""
        return series.feature == LOSS

    def initial_state(self, series: Sequence[Series]) -> LossState:
        """The state without values."""
        none = np.zeros(len(series), np.int64)
        return LossState(np.zeros((self.window, len(series))), none, none)

    def judge(self, state: LossState, values: Floats, seen: Bools, seconds: float) -> tuple[LossState, Judgement]:
        """The next state and the judgement of one step."""
        finite = np.isfinite(values)
        with np.errstate(all="ignore"):
            mean = state.recent.sum(axis=0) / state.learnt
            ratio = np.abs(values - mean) / np.abs(self.rtol * mean)
        # The second condition also handles a mean of 0: only a rising value counts.
        ratio = np.where((state.learnt >= self.warmup) & (values > state.recent[0]), ratio, 0.0)
        spikes = finite & (ratio >= 1)
        none = np.zeros(len(values), np.bool_)
        judgement = make_judgement(seen, ~finite | spikes, none, np.where(finite, ratio, np.inf), mean)
        alarms = np.where(seen & finite, np.where(spikes, state.alarms + 1, 0), state.alarms)
        is_new = alarms >= self.relearn
        learnt = seen & finite & (~spikes | is_new)
        previous = np.where(is_new, 0.0, state.recent[:-1])
        recent = np.where(learnt, np.concatenate([values[None], previous]), state.recent)
        count = np.where(is_new, 1, np.minimum(state.learnt + learnt, self.window))
        return LossState(recent, count, np.where(is_new, 0, alarms)), judgement
