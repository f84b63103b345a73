"""SIGTERM and SIGHUP (a closed terminal) end a command as Ctrl-C does: by ``KeyboardInterrupt``, so that all is tidied up."""

from __future__ import annotations

import os
import signal
import time

REPEATED_SECONDS = 2.0
"""The kernel and the shell both signal a closed terminal: the second signal must not interrupt the tidying."""


def interrupt_on_ending() -> None:
    """Turn both signals into ``KeyboardInterrupt``; SIGHUP only where it is not ignored already, as under ``nohup``."""
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    last = -REPEATED_SECONDS

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        for fd in terminals:
            if not os.isatty(fd):  # it was closed, and writing there fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        before, last = last, time.monotonic()
        if last - before >= REPEATED_SECONDS:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def end_as_python_does() -> None:
    """Undo `interrupt_on_ending`, before a program of the user's runs in this process."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, signal.SIG_DFL)
