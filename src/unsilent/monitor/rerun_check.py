"""The check with which a guard asks a monitor after each step whether there was an alarm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unsilent.events.event_kinds import FINGERPRINT, Alarm, Verdict
from unsilent.guard.execution_record import RepeatableStep
from unsilent.guard.magnitude_check import StepCheck
from unsilent.monitor.exchange import RankRow

if TYPE_CHECKING:
    from unsilent.monitor.monitor import Monitor


class RerunCheck(StepCheck):
    """A check of a guard that asks a monitor for alarms.

    The rules keep what they learnt when a new loop begins, and the monitor closes itself.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def check(self, late: bool, stepped: Callable[[], bool], whole: bool = False) -> Alarm | None:
        """An alarm that is known now, or None.

        Alarms in this step count as well, unless ``late``.
        """
        return self._monitor.take_alarm(flush=not late)

    def check_last(self) -> Alarm | None:
        """An alarm in the last step, or None."""
        return self._monitor.take_alarm(flush=True)

    def drop_pending(self) -> None:
        """Forget the steps that are not judged yet."""
        self._monitor.drop_pending()

    def before_again(self, item: Any) -> None:
        """Record the iteration that is about to be executed again."""
        self._monitor.record_iteration(item.arguments if isinstance(item, RepeatableStep) else item)


def alarm_of(verdict: Verdict, rows: Sequence[RankRow], alarms: Sequence[Alarm]) -> Alarm:
    """The alarm for which all ranks execute steps again.

    This is the alarm of this rank that the verdict names, or else one made from the verdict.

    Args:
        verdict: Verdict of all ranks.
        rows: Rows of all ranks, in the step of the verdict.
        alarms: Alarms of this rank.
    """
    for alarm in reversed(alarms):
        if alarm.step != verdict.step:
            break
        if alarm.series_name == verdict.tensor:
            return alarm
    score, prefix = max(row.score for row in rows), f"{FINGERPRINT} of "
    has_changed = verdict.tensor.startswith(prefix)
    return Alarm(
        time=verdict.time, rank=verdict.suspect, step=verdict.step, host=verdict.host, device=verdict.device,
        rule=verdict.reason, feature=FINGERPRINT if has_changed else verdict.tensor,
        tensor=verdict.tensor.removeprefix(prefix) if has_changed else "", statistic="score", level="alarm", value=score,
        baseline=math.nan, score=score,
    )  # fmt: skip
