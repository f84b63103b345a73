"""Side effects of user code on its process: forked children, torch's thread count, other threads.

A forked child that returns from user code would go on as a second copy of the campaign. It is therefore ended, and its
parent can find out (`check_no_returned_fork`). Harmless changes are undone, and noted once.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unsilent.basics.errors import UsageError

_forked = mmap.mmap(-1, 8)
"""Memory shared with children: id of the process whose child last returned from user code."""
_new: list[str] = []
_all: set[str] = set()


@contextmanager
def contain_user_process() -> Iterator[None]:
    """Context for user code that limits its side effects on the process.

    Forked children end here, and torch's number of threads is restored.
    """
    pid, threads, running = os.getpid(), torch.get_num_threads(), threading.active_count()
    try:
        yield
    finally:
        end_child_of(pid)
        if (now := torch.get_num_threads()) != threads:
            torch.set_num_threads(threads)
            add_workload_note(
                f"changes torch's number of threads to {now}; the number is set back to {threads} after each call"
            )
        if threading.active_count() > running:
            add_workload_note("starts a thread that keeps running afterwards, which may disturb later runs")


def end_child_of(pid: int) -> None:
    """End this process unless its id is ``pid``.

    Another id means a child that user code forked and let return.
    """
    if os.getpid() != pid:
        _forked[:] = struct.pack("q", pid)
        os._exit(0)


def check_no_returned_fork(name: str) -> None:
    """Raise ``UsageError`` if a forked child of this process has returned from user code."""
    if struct.unpack("q", _forked[:])[0] == os.getpid():
        _forked[:] = bytes(8)
        raise UsageError(
            f"workload {name!r} forks a process and lets the child return, so all later code would run twice; "
            "end the child with os._exit(0)"
        )


def take_notes(name: str) -> list[str]:
    """The notes since the last call.

    Each note is given only once in a process.
    """
    notes = [f"Workload {name!r} {note}." for note in _new]
    _new.clear()
    return notes


def forget_notes() -> None:
    """Delete all notes, which belong to a workload that ran in this process before."""
    _new.clear()
    _all.clear()


def add_workload_note(text: str) -> None:
    """Add a note on the workload, unless this process has had the same note.

    The text is the rest of a sentence that begins with the workload's name.
    """
    if text not in _all:
        _all.add(text)
        _new.append(text)
