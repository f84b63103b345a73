"""Sinks of the events of a monitor: the log, a file of JSON lines, Prometheus, TensorBoard.

A sink takes one event and never stops the job: a full disk or a port in use is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.events.event_kinds import LOGGER, Event

Sink = Callable[[Event], object]
"""A receiver of events. If it has a method ``close``, the method is called after the last event."""


class SinkSettings(Protocol):
    """Settings of sinks, as ``monitor.settings.MonitorSettings`` has them."""

    @property
    def log_normal(self) -> bool: ...
    @property
    def events(self) -> Path | None: ...
    @property
    def metrics_port(self) -> int | None: ...
    @property
    def tensorboard(self) -> Path | None: ...
    @property
    def rule_names(self) -> Sequence[str]: ...


def make_sinks(settings: SinkSettings, rank: int, world_size: int, compatibility: bool = False) -> list[Sink]:
    """The sinks that the settings ask for, and the log.

    Args:
        compatibility: Alarms in the log carry the keyword and the codes of MindSpore's accuracy-sensitive detection.

    Raises:
        UsageError: The events file cannot be written or is another kind of file, or a package is not installed.
    """
    from unsilent.events.sinks.logging_sink import LoggingSink

    sinks: list[Sink] = [LoggingSink(compatibility, logging.INFO if settings.log_normal else logging.DEBUG)]
    if settings.events is not None:
        from unsilent.events.sinks.json_lines import JsonLinesSink

        sinks.append(JsonLinesSink(settings.events, rank, world_size))
    if (port := settings.metrics_port) is not None:
        from unsilent.events.sinks.prometheus import PrometheusSink

        rank_port, rules = port + rank if port else 0, settings.rule_names
        sinks.append(IsolatedSink(lambda: PrometheusSink(rank_port, rank, rules), "Prometheus metrics"))
    if (folder := settings.tensorboard) is not None:
        from unsilent.events.sinks.tensorboard import TensorBoardSink

        rank_folder = folder / f"rank{rank}" if world_size > 1 else folder
        sinks.append(IsolatedSink(lambda: TensorBoardSink(rank_folder), "TensorBoard"))
    return sinks


def isolated(sink: Sink) -> Sink:
    """A user's sink, wrapped so that its errors do not reach the monitor."""
    return IsolatedSink(lambda: sink, f"events for {getattr(sink, '__name__', type(sink).__name__)}")


class IsolatedSink:
    """A sink that is disabled after its first error, which is logged; the job continues.

    Args:
        make: Creates the sink. A ``UsageError`` is raised; any other error counts as the sink's first error.
        name: Name of the sink whose events are lost.
    """

    def __init__(self, make: Callable[[], Sink], name: str) -> None:
        self._name = name
        self._sink: Sink | None = None
        try:
            self._sink = make()
        except UsageError:
            raise
        except Exception as error:
            self._end(error)

    def __call__(self, event: Event) -> None:
        try:
            if self._sink is not None:
                self._sink(event)
        except Exception as error:
            self._end(error)

    def close(self) -> None:
        try:
            if (close := getattr(self._sink, "close", None)) is not None:
                close()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._sink = None
        logging.getLogger(LOGGER).warning("no %s: %s; the job goes on", self._name, kind_and_line(error))
