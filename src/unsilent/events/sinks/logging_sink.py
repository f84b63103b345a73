"""Writes events to the logger ``unsilent.monitor``."""

from __future__ import annotations

import logging

from unsilent.basics.printable import escape_unprintable
from unsilent.events.event_kinds import LOGGER, Alarm, AlarmExplained, Event, StepSummary, Verdict
from unsilent.recovery.fault_codes import ASD_CODE, ASD_LEVEL

ASD_KEYWORD = "accuracy sensitivity feature abnormal"
"""Text of MindSpore's accuracy-sensitive detection; scripts search logs for it."""
ASD_FIELDS = (
    f"compatibility codes: event code {ASD_CODE}, node type SoC, sensor type Check Sensor, "
    f"event state check fail, level {ASD_LEVEL}"
)
MOST_ALARMS_PER_STEP = 5
"""Largest number of alarms of one step that are logged."""


class LoggingSink:
    """Sink that logs a line for each event: alarms as errors, and warnings of rules as warnings.

    Events that all ranks report equally are logged by one rank, because ranks may share a log; the other ranks use level DEBUG.

    Args:
        compatibility: Whether alarms also contain `ASD_KEYWORD` and `ASD_FIELDS`, and kinds of faults `ASD_FIELDS`.
        normal_level: Level of the lines for steps without an alarm.
    """

    def __init__(self, compatibility: bool = False, normal_level: int = logging.DEBUG) -> None:
        self._log = logging.getLogger(LOGGER)
        self._compatibility, self._normal_level = compatibility, normal_level
        self._step, self._alarms = -1, 0

    def __call__(self, event: Event) -> None:
        level = self._normal_level if isinstance(event, StepSummary) else event.log_level
        if event.repeats_other_rank or (isinstance(event, Verdict) and event.repeats_alarm):
            level = logging.DEBUG
        text = str(event)
        if isinstance(event, Alarm):
            self._alarms = self._alarms + 1 if event.step == self._step else 1
            self._step = event.step
            if self._alarms > MOST_ALARMS_PER_STEP:
                if self._alarms == MOST_ALARMS_PER_STEP + 1:
                    self._log.warning("step %d: there are more alarms, which are not logged", event.step)
                return
            level = level if event.level == "alarm" or level == logging.DEBUG else logging.WARNING
            text = f"{ASD_KEYWORD}: {text} [{ASD_FIELDS}]" if self._compatibility else f"{event.level}: {text}"
        elif isinstance(event, AlarmExplained) and self._compatibility:
            text = f"{text} [{ASD_FIELDS}]"
        self._log.log(level, "%s", escape_unprintable(text))

    def close(self) -> None: ...
