"""Rule on NaN and infinity in any series.

The norms and largest magnitudes that a monitor reads are finite if every element is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from unsilent.detectors.rule import Judgement, make_judgement
from unsilent.detectors.series import Bools, Floats, Series


@dataclass(frozen=True)
class Nonfinite:
    """Rule on NaN and infinity in any series, without state."""

    name: ClassVar[str] = "nonfinite"

    def reads(self, series: Series) -> bool:
        """True for every series."""
        return True

    def initial_state(self, series: Sequence[Series]) -> None:
        """None, because the rule has no state."""

    def judge(self, state: None, values: Floats, seen: Bools, seconds: float) -> tuple[None, Judgement]:
        """The judgement of one step."""
        bad = ~np.isfinite(values)
        none = np.zeros(len(values), np.bool_)
        return None, make_judgement(seen, bad, none, np.where(bad, np.inf, 0.0), np.full(len(values), np.nan))
