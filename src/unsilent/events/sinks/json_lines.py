"""Writes events as lines of JSON to a file, which `unsilent.events.event_files` reads."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.basics.strictjson import as_json_values
from unsilent.events.event_files import MOST_LINE, begins_a_run, may_begin_an_event, path_of_rank
from unsilent.events.event_kinds import LOGGER, Event


class JsonLinesSink:
    """Appends each event to a file.

    The operating system has the whole line when the call returns: a process that is killed loses no event. If a line cannot be
    written, this is logged once, and later events are tried again.

    Args:
        path: Path of the file; with several ranks, each writes its own file, see `path_of_rank`. Events of an earlier run are
            kept.

    Raises:
        UsageError: The file cannot be written, or has other content.
    """

    def __init__(self, path: Path, rank: int = 0, world_size: int = 1) -> None:
        self.path = path_of_rank(path, rank, world_size).absolute()  # the job may change its working folder
        self._lost = 0
        try:
            _prepare(self.path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot write events to {self.path}: {reason}; give another file") from None

    def __call__(self, event: Event) -> None:
        text = json.dumps(as_json_values(event.to_json()), ensure_ascii=False, allow_nan=False)
        try:
            _append(self.path, text.encode(errors="replace") + b"\n")
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                reason = error.strerror or error
                logging.getLogger(LOGGER).warning("cannot write events to %s: %s; the job goes on", self.path, reason)

    def close(self) -> None:
        if self._lost:
            logging.getLogger(LOGGER).warning("%d events could not be written to %s", self._lost, self.path)


def _append(path: Path, line: bytes) -> None:
    """Append a complete line or nothing.

    The file is opened each time because its folder may have been removed.
    """
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if file.write(line) != len(line):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _prepare(path: Path) -> None:
    """Create the file, or remove an incomplete last line from an existing one.

    Raises ``OSError`` and ``ValueError``.

    A file that no monitor wrote is not changed.
    """
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size and not begins_a_run(file.readline(MOST_LINE)):
            raise ValueError("the file holds something else than events")
        start = max(0, size - MOST_LINE)
        file.seek(start)
        rest = file.read()
        last = rest[rest.rfind(b"\n") + 1 :]
        if not may_begin_an_event(last):
            raise ValueError("its last line is not finished, and is no event")
        if last:
            file.truncate(size - len(last))
