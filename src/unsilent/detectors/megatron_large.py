"""Megatron-LM's check for unexpectedly large results: ten times the largest of the first hundred values.

    the first `samples` finite values:  largest = max(largest, value)
    afterwards:                         alarm: value >= factor * largest

Source: ``rerun_state_machine.py`` of Megatron-LM (``is_unexpectedly_large``), which checks the local loss and the norm of the
gradients of a bucket before their reduction; this rule checks the norm of each parameter's gradient. NaN and infinity are
ignored, as in Megatron-LM, where other checks find them: use this rule with `nonfinite`. Chosen here: if the largest is 0 or
less, no value is an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import GRADIENT, L2, LOSS, Bools, Floats, Series
from unsilent.detectors.thresholds import check_above, check_at_least


class LargestState(NamedTuple):
    """State of the rule: the largest of the first values, and their number.

    ``largest`` is float64[n], 0 before the first value; ``samples`` is int64[n].
    """

    largest: Floats
    samples: NDArray[np.int64]


@dataclass(frozen=True)
class MegatronLarge:
    """Rule on a value relative to the largest of the first values.

    Attributes:
        factor: Least ratio to the largest that is an alarm.
        samples: Number of first values.
    """

    name: ClassVar[str] = "megatron-large"
    factor: float = 10.0
    samples: int = 100

    def __post_init__(self) -> None:
        check_above(self.name, 1, factor=self.factor)
        check_at_least(self.name, 1, samples=self.samples)

    def reads(self, series: Series) -> bool:
        """Whether the series is the loss or the L2 norm of a parameter's gradient."""
        return series.feature == LOSS or (series.feature, series.statistic) == (GRADIENT, L2)

    def initial_state(self, series: Sequence[Series]) -> LargestState:
        """The state without values."""
        return LargestState(np.zeros(len(series)), np.zeros(len(series), np.int64))

    def judge(self, state: LargestState, values: Floats, seen: Bools, seconds: float) -> tuple[LargestState, Judgement]:
        """The next state and the judgement of one step."""
        usable, learning = seen & np.isfinite(values), state.samples < self.samples
        limit = np.where(~learning & (state.largest > 0), self.factor * state.largest, np.nan)
        no_warnings, baselines = np.zeros(len(values), np.bool_), np.where(learning, np.nan, state.largest)
        judgement = make_judgement(usable, values >= limit, no_warnings, values / limit, baselines)
        learnt = usable & learning
        largest = np.where(learnt, np.maximum(state.largest, values), state.largest)
        return LargestState(largest, state.samples + learnt), judgement
