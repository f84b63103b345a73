"""Rule of the first two generations of ASD: alarm if a value or its jump exceeds a limit.

The jump is measured in multiples of the range of values so far.

    ratio = (value - previous) / (largest - smallest)
    alarm:   not finite, or value > upper_alarm, or ratio > jump_alarm after c_min_steps steps     (ASD level 1)
    warning: otherwise, value > upper_warning, or ratio > jump_warning after c_min_steps steps     (ASD level 2)

Source: MindSpore tutorials on silent data corruption, torch_npu's page on ``NPU_ASD_UPPER_THRESH`` (the ratio), and the page of
aclnnSilentCheck in ops-math (four scalars for each tensor). The kernel is closed. Chosen here, because it is not documented:

- whether a value that is not finite enters the smallest, largest and previous values: it does not, but it counts as a step;
- the jump if all values were equal: there is none;
- the first values: all four scalars begin at 0, as MindSpore makes them (torch_npu begins with a smallest value of 1e10 and a
  largest of -1e10), so the range is the largest value so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import Bools, Floats, Series
from unsilent.detectors.thresholds import check_above, check_at_least, check_order


class AbsoluteAndJumpState(NamedTuple):
    """State of the rule: four numbers for each series.

    Attributes:
        previous, smallest, largest: float64[n].
        steps: int64[n], number of values so far.
    """

    previous: Floats
    smallest: Floats
    largest: Floats
    steps: NDArray[np.int64]


@dataclass(frozen=True)
class AbsoluteAndJump:
    """Rule with limits for a value and for its jump, each for warnings and for alarms.

    Attributes:
        upper_alarm, upper_warning: Limits of the value (``NPU_ASD_UPPER_THRESH``).
        jump_alarm, jump_warning: Limits of the jump, in multiples of the range (``NPU_ASD_SIGMA_THRESH``; not standard
            deviations).
        c_min_steps: Number of values of a series before its jumps are judged.
        learns_alarms: Whether a finite value that raised an alarm enters the state, as with ``NPU_ASD_ENABLE=1``, which only
            logs. With 2 and 3 the training ends at the alarm.
    """

    name: ClassVar[str]
    upper_alarm: float = 1e6
    upper_warning: float = 1e4
    jump_alarm: float = 1e5
    jump_warning: float = 5e3
    c_min_steps: int = 100
    learns_alarms: bool = True

    def __post_init__(self) -> None:
        check_above(self.name, 0, upper_warning=self.upper_warning, jump_warning=self.jump_warning)
        check_at_least(self.name, 0, c_min_steps=self.c_min_steps)
        check_above(self.name, 0, upper_alarm=self.upper_alarm, jump_alarm=self.jump_alarm)
        check_order(self.name, ("upper_alarm", self.upper_alarm), ("upper_warning", self.upper_warning))
        check_order(self.name, ("jump_alarm", self.jump_alarm), ("jump_warning", self.jump_warning))

    def initial_state(self, series: Sequence[Series]) -> AbsoluteAndJumpState:
        """A state of zeros for the given series."""
        zeros = np.zeros(len(series))
        return AbsoluteAndJumpState(zeros, zeros, zeros, np.zeros(len(series), np.int64))

    def judge(
        self, state: AbsoluteAndJumpState, values: Floats, seen: Bools, seconds: float
    ) -> tuple[AbsoluteAndJumpState, Judgement]:
        """The next state and the judgement of one step."""
        reach, finite = state.largest - state.smallest, np.isfinite(values)
        with np.errstate(all="ignore"):
            ratio = (values - state.previous) / reach
        ratio = np.where(finite & (reach > 0) & (state.steps >= self.c_min_steps), ratio, 0.0)
        alarms = ~finite | (values > self.upper_alarm) | (ratio > self.jump_alarm)
        warnings = (values > self.upper_warning) | (ratio > self.jump_warning)
        scores = np.where(finite, np.maximum(values / self.upper_alarm, ratio / self.jump_alarm), np.inf)
        judgement = make_judgement(seen, alarms, warnings, scores, np.where(state.steps > 0, state.previous, np.nan))
        counted = seen & (self.learns_alarms | ~alarms)
        learnt = counted & finite
        smallest = np.where(learnt, np.minimum(state.smallest, values), state.smallest)
        largest = np.where(learnt, np.maximum(state.largest, values), state.largest)
        previous = np.where(learnt, values, state.previous)
        return AbsoluteAndJumpState(previous, smallest, largest, state.steps + counted), judgement
