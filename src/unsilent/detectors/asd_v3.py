"""ASD of MindSpore 2.5 (CANN operator aclnnSilentCheckV2): limits relative to a moving average.

    value = (largest magnitude of the gradient) ** 2
    scale = average / (1 - decay ** step)
    alarm:   not finite, or value > alarm_ratio * scale          (ASD level 1)
    warning: otherwise, value > warning_ratio * scale            (ASD level 2)
    average = decay * average + (1 - decay) * value; step += 1

Ratios apply to squares: 1e6 means 1000 times the usual largest magnitude. Source: the page of aclnnSilentCheckV2 in ops-math,
its caller in MindSpore, and the logs in MindSpore's tutorial. The page prints the divisor as ``(1 - decay) ** step``, which would
raise the limits beyond all numbers within 20 steps; the logs fit ``1 - decay ** step``. Not documented, chosen here:

- the first value is its own scale (one version of the caller seeds the average with it, another with the median of the tensor's
  squares), and the average begins at 0 after it, as the logs imply;
- a value that is not finite changes nothing.

As documented, a series that was always zero has the scale 0, so that its first value above 0 raises an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import GRADIENT, LARGEST, Bools, Floats, Series
from unsilent.detectors.thresholds import check_above, check_order, check_share


class AverageState(NamedTuple):
    """State of the rule: the moving average of each series.

    Attributes:
        average: float64[n], without the correction for its start at 0.
        steps: int64[n], number of values in the average.
    """

    average: Floats
    steps: NDArray[np.int64]


def corrected_average(average: Floats, steps: NDArray[np.int64], decay: float) -> Floats:
    """A moving average with correction for its start at 0, float64[n]; NaN for no values.

    >>> corrected_average(np.array([9.88e-10]), np.array([4]), 0.99).round(9)  # from a log of MindSpore
    array([2.5e-08])
    """
    with np.errstate(all="ignore"):
        result: Floats = average / (1 - decay**steps)
    return result


@dataclass(frozen=True)
class AsdV3:
    """Rule on the largest squared element of a gradient, relative to its moving average.

    Attributes:
        alarm_ratio, warning_ratio: Limits, in multiples of the average of squares.
        decay: Decay of the average.
        learns_alarms: Whether a finite value that raised an alarm enters the average, as with ``NPU_ASD_ENABLE=1``, which only
            logs.
    """

    name: ClassVar[str] = "asd-v3"
    alarm_ratio: float = 1e6
    warning_ratio: float = 1e4
    decay: float = 0.99
    learns_alarms: bool = True

    def __post_init__(self) -> None:
        check_above(self.name, 1, warning_ratio=self.warning_ratio, alarm_ratio=self.alarm_ratio)
        check_order(self.name, ("alarm_ratio", self.alarm_ratio), ("warning_ratio", self.warning_ratio))
        check_share(self.name, decay=self.decay)

    def reads(self, series: Series) -> bool:
        """Whether the series is the largest magnitude of a parameter's gradient."""
        return (series.feature, series.statistic) == (GRADIENT, LARGEST)

    def initial_state(self, series: Sequence[Series]) -> AverageState:
        """The state with empty averages."""
        return AverageState(np.zeros(len(series)), np.zeros(len(series), np.int64))

    def judge(self, state: AverageState, values: Floats, seen: Bools, seconds: float) -> tuple[AverageState, Judgement]:
        """The next state and the judgement of one step."""
        with np.errstate(all="ignore"):
            squares = values * values
            finite = np.isfinite(squares)
            scale = np.where(state.steps == 0, squares, corrected_average(state.average, state.steps, self.decay))
            alarms = ~finite | (squares > self.alarm_ratio * scale)
            warnings = squares > self.warning_ratio * scale
            scores = np.where(finite, np.where(squares > 0, squares / scale, 0.0) / self.alarm_ratio, np.inf)
        judgement = make_judgement(seen, alarms, warnings, scores, np.sqrt(np.where(state.steps > 0, scale, np.nan)))
        learnt = seen & finite & (self.learns_alarms | ~alarms)
        average = np.where(learnt, self.decay * state.average + (1 - self.decay) * squares, state.average)
        return AverageState(average, state.steps + learnt), judgement
