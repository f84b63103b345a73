"""The expected end of a campaign that decides itself how many trials it runs."""

from __future__ import annotations

from dataclasses import dataclass

from unsilent.basics.sizes import rough_duration_text
from unsilent.report.text import count_text


@dataclass(frozen=True)
class ExpectedEnd:
    """Expected number of trials and time left, each as a lower end, a middle and an upper end.

    Attributes:
        trials: Total number of trials.
        seconds: Remaining seconds.
        measured: Number of stored trials from whose times the seconds are estimated.
    """

    trials: tuple[int, int, int]
    seconds: tuple[float, float, float]
    measured: int

    @property
    def time_text(self) -> str:
        """The time left as text, with the number of trials that it was measured on."""
        low, middle, high = map(rough_duration_text, self.seconds)
        return f"in about {middle} ({low} to {high}, measured on {count_text(self.measured, 'trial')})"

    def __str__(self) -> str:
        low, middle, high = self.trials
        return f"the end is expected after {middle:,} trials ({low:,} to {high:,}), {self.time_text}"
