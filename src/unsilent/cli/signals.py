"""Handling of SIGTERM, SIGHUP and Ctrl-C, so that every command cleans up before it ends."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from typing import Any

REPEAT_SECONDS = 0.02
"""Seconds after which a swallowed interrupt is raised again."""
REPEATED_SECONDS = 2.0
"""Seconds in which a second signal is ignored. The kernel and the shell both signal a closed terminal, and the second signal
must not interrupt the clean-up."""


def interrupt_on_ending() -> None:
    """Make SIGTERM and SIGHUP raise ``KeyboardInterrupt``.

    SIGHUP stays ignored if it was, as under ``nohup``.
    """
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    last = -REPEATED_SECONDS

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        for fd in terminals:
            if not os.isatty(fd):  # it was closed, and writing to it fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        before, last = last, time.monotonic()
        if last - before >= REPEATED_SECONDS:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


def repeat_swallowed_interrupts() -> None:
    """Raise a ``KeyboardInterrupt`` again if Python ignored it, for example during garbage collection."""
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(REPEAT_SECONDS, _thread.interrupt_main).start()  # not here: it would be swallowed again
        else:
            usual(unraisable)

    sys.unraisablehook = hook


def end_silently_on_interrupt() -> None:
    """Make Ctrl-C end this process at once, without a traceback.

    Called when a command has ended and only the interpreter's clean-up is left.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_as_python_does() -> None:
    """Undo `interrupt_on_ending` and `repeat_swallowed_interrupts`, before a user's program runs in this process."""
    sys.unraisablehook = sys.__unraisablehook__
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, signal.SIG_DFL)
