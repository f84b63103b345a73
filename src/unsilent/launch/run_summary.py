"""The summary of a monitored training that ``unsilent run`` prints on stderr."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unsilent.events.event_kinds import LOGGER, Alarm, Ended, Event, IncidentBegan, Started, Verdict
from unsilent.launch.standard_error import StandardError
from unsilent.report.text import count_text


class RunSummary:
    """A sink that summarises the events of all monitors of a run in one line.

    Args:
        events: The file of events; the line names it after an alarm.
    """

    def __init__(self, events: Path | None) -> None:
        self._events = events
        self._alarms: list[Alarm] = []
        self._first_verdict: Verdict | None = None
        self._incident = self._from = ""
        self._ended: list[Ended] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Alarm) and event.level == "alarm":
            self._alarms.append(event)
        elif isinstance(event, Verdict):
            self._first_verdict = self._first_verdict or event
        elif isinstance(event, IncidentBegan):
            self._incident = self._incident or event.folder
        elif isinstance(event, Started):
            self._from = f" from step {event.first_step} of the training on" if event.first_step else ""
        elif isinstance(event, Ended):
            self._ended.append(event)

    @property
    def text(self) -> str:
        """The summary line; empty if no monitor ended, and on ranks other than 0 without an alarm."""
        if not self._ended or (self._ended[0].rank and not self._alarms):
            return ""
        whole = _together(self._ended)
        steps = f"{count_text(whole.steps, 'step')}{self._from}"
        if self._alarms:
            first = self._alarms[0]
            where = f" of rank {first.rank}" if first.rank else ""
            alarms = f"{count_text(len(self._alarms), 'alarm')} in {steps}{where}"
            summary = f"{alarms}; first in step {first.step}: {first.series_name}"
        elif self._first_verdict is not None:
            summary = f"no alarm in {steps} of rank {whole.rank}; verdict in {self._first_verdict}"
        else:
            summary = f"no alarm in {steps}"
        more = f"; see unsilent watch {self._events}" if self._events and (self._alarms or self._first_verdict) else ""
        more += f" and unsilent incident show {self._incident}" if more and self._incident else ""
        return f"{summary}; {whole.coverage}; the monitor took {100 * whole.cost:.2g} % of the time{more}"


def _together(ended: Sequence[Ended]) -> Ended:
    """Combine the end events of several successive monitors of one rank."""
    seconds, longest = sum(end.seconds for end in ended), max(end.longest_wait for end in ended)
    unread = sum(end.steps for end in ended if not end.longest_wait)
    return replace(
        ended[-1],
        steps=sum(end.steps for end in ended),
        seconds=seconds,
        cost=sum(end.cost * end.seconds for end in ended) / seconds if seconds else ended[-1].cost,
        longest_wait=longest and longest + unread,  # no tensor was read while a monitor that read nothing was there
        unseen_count=sum(end.unseen_count for end in ended),
        unjudged=sum(end.unjudged for end in ended),
    )


class StderrHandler(logging.Handler):
    """Prints the monitor's log lines on stderr, unless the program has configured logging."""

    def __init__(self, stderr: StandardError) -> None:
        super().__init__()
        self._stderr = stderr

    def install(self) -> None:
        """Start printing log lines of level INFO and above."""
        log = logging.getLogger(LOGGER)
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
            log.addHandler(self)

    def remove(self) -> None:
        """Stop printing, and restore the logger's level."""
        log = logging.getLogger(LOGGER)
        if self in log.handlers:
            log.removeHandler(self)
            log.setLevel(logging.NOTSET)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line, unless another handler does."""
        if not logging.getLogger().handlers and not logging.getLogger("unsilent").handlers:
            self._stderr.print_line(record.getMessage())
