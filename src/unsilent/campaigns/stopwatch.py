"""A stopwatch for the wall and CPU time of a campaign."""

from __future__ import annotations

import resource
import time


class Stopwatch:
    """A stopwatch that starts when it is created.

    CPU time is the time of this process, without its children.
    """

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), _cpu()

    def lap(self) -> tuple[float, float]:
        """Wall and CPU seconds since the previous call, or since construction."""
        wall, cpu = time.monotonic(), _cpu()
        spent = wall - self._wall, cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        return spent


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
