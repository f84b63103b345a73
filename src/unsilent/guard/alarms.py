"""Warnings and errors of a guard, and its time cost."""

from __future__ import annotations

from dataclasses import dataclass

from unsilent.basics.errors import UnsilentError
from unsilent.events.event_kinds import Alarm

LOOP_LEFT_MESSAGE = (
    "the loop was left while steps were executed again after the alarm at {}, so some steps are missing; "
    "if a counter ends the loop, take it from the batch: guard.iterate(enumerate(loader))"
)


class RepeatabilityWarning(UserWarning):
    """Warns that repeated steps differed from the original ones, so that the recovery may not be exact."""


class NotRepeatable(UnsilentError):
    """Raised by a guard with ``strict=True`` if a recovery may not be exact; the oldest kept state was restored."""

    exit_code = 17


class GuardStop(UnsilentError):
    """Raised if a guard cannot recover: the fault is permanent, older than all kept states, or a bound is too tight.

    The oldest kept state was restored, so a checkpoint saved now is sound unless the fault is older than that state.

    Attributes:
        alarm: The last alarm.
        first: Alarm that started the recovery; the same as ``alarm`` if nothing could be executed again.
    """

    exit_code = 17

    def __init__(self, alarm: Alarm, first: Alarm, steps: int = 0) -> None:
        reason = "; the loop was left, so its last steps cannot be executed again"
        if steps:
            reason = (
                f", although the last {steps} iteration{'s' if steps > 1 else ''} ran again (first alarm at {first.summary}); "
                "the fault is not transient, the fault is older than these iterations, or the bound is too tight: check this "
                "device, or give Guard a larger "
                "factor or snapshot_count"
            )
        super().__init__(
            f"{alarm.summary}{reason}. The oldest kept state was restored; it is sound unless the fault is older"
        )
        self.alarm, self.first = alarm, first


@dataclass
class GuardOverhead:
    """Wall time in seconds that the guard itself took, and the number of steps.

    ``check``: finding the largest magnitudes and comparing them. ``synchronise``: waiting for the device and for other ranks.
    """

    steps: int = 0
    check: float = 0.0
    synchronise: float = 0.0
    snapshot: float = 0.0
    recovery: float = 0.0
