"""Information about this machine and its processes."""

from __future__ import annotations

import os
import platform
from pathlib import Path

SLOT = "UNSILENT_SLOT"
"""Environment variable with the number of a rank's device on this host, for jobs that leave out devices and renumber others."""
FIRST_STEP = "UNSILENT_FIRST_STEP"
"""Environment variable with the training step at which a run begins; a monitor counts from 0 in each run."""
LONGEST_STEP = 18
"""Largest number of digits of a step, so that it has at most 63 bits."""
CLOCK_SECONDS = 60.0
"""Largest error of the start time of a process in seconds, because the clock of a host is corrected now and then."""


def first_step() -> int | None:
    """The training step with which this run begins, from an environment variable; None if it is not set."""
    text = os.environ.get(FIRST_STEP, "")
    return int(text) if text.isdecimal() and len(text) <= LONGEST_STEP else None


def host_name() -> str:
    """Name of this machine."""
    return platform.node() or "unknown"


def pid_namespace() -> str:
    """The PID namespace of this process on Linux, in which process numbers are unique; empty on other systems."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_exists(number: int, at: float) -> bool:
    """Whether the process that had a number at a given time is still running; true if that is unknown."""
    if os.name != "posix" or number <= 0:
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # a process of another user
    try:
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        began = int(booted.split()[1]) + int(fields[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return True  # no such files on this system
    return state not in ("Z", "X") and began <= at + CLOCK_SECONDS  # started later: another process
