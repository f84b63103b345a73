"""What a guard tells: alarms, the stop after a second one, and what it cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unsilent.errors import UnsilentError


@dataclass(frozen=True, slots=True)
class Alarm:
    """What passed its bound: step of the guard (from 0), tensor, its kind, largest magnitude, bound and its rule."""

    step: int
    tensor: str
    kind: str
    largest: float
    bound: float
    rule: str

    def __str__(self) -> str:
        if not math.isfinite(self.largest):
            return f"step {self.step}: {self.kind} {self.tensor} reaches {self.largest:.3g} ({self.rule})"
        return (
            f"step {self.step}: {self.kind} {self.tensor} reaches {self.largest:.3g}, beyond its bound {self.bound:.3g} "
            f"({self.rule})"
        )


class GuardStop(UnsilentError):
    """A bound was passed again while two steps were done again: not a transient fault, or a bound that is too tight."""

    exit_code = 17

    def __init__(self, alarm: Alarm, first: Alarm) -> None:
        super().__init__(
            f"{alarm}, again after two steps were done again (first at {first}); the fault is not transient, or the bound is too "
            "tight: check this device, or give Guard a larger factor"
        )
        self.alarm, self.first = alarm, first


@dataclass
class Spent:
    """Seconds (wall) that the guard itself took, and over how many steps.

    ``check``: finding the largest magnitudes and comparing them. ``synchronise``: waiting for the device and for other ranks.
    """

    steps: int = 0
    check: float = 0.0
    synchronise: float = 0.0
    snapshot: float = 0.0
    recovery: float = 0.0
