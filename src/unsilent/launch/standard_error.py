"""Printing on stderr, even after the monitored program has closed it."""

from __future__ import annotations

import contextlib
import os
import sys


class StandardError:
    """Prints lines on stderr, or on the original stderr if the program has closed or removed it."""

    def __init__(self) -> None:
        try:
            self._first: int | None = os.dup(2)
        except OSError:  # the process was started without standard error
            self._first = None

    def print_line(self, text: str) -> None:
        """Print a line, unless there was no stderr at the start."""
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{text}\n")  # one write, as other ranks may print between two
                sys.stderr.flush()
                return
        if self._first is not None:
            with contextlib.suppress(OSError):
                os.write(self._first, f"{text}\n".encode(errors="backslashreplace"))
