"""The check of a guard that a monitor uses to execute steps again: the guard asks after each step whether there was an alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from unsilent.monitor.events import Alarm

if TYPE_CHECKING:
    from unsilent.monitor.monitor import Monitor


class RerunCheck:
    """A `StepCheck` of what a monitor finds."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def check(self, late: bool, stepped: Callable[[], bool]) -> Alarm | None:
        """An alarm that is known by now; unless ``late``, of this step as well."""
        return self._monitor.take_alarm(flush=not late)

    def check_pending(self) -> Alarm | None:
        """An alarm in the last step."""
        return self._monitor.take_alarm(flush=True)

    def drop_pending(self) -> None:
        """Forget what is not judged yet."""
        self._monitor.drop_pending()

    def restart(self) -> None:
        """Rules go on."""

    def close(self) -> None:
        """The monitor closes itself."""
