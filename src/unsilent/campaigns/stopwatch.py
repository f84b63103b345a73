"""The cost of a campaign: wall and CPU time that always cover the same stretch."""

from __future__ import annotations

import resource
import time


class Stopwatch:
    """Runs from when it is made. CPU time is that of this process; who has children adds theirs."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), _cpu()

    def lap(self) -> tuple[float, float]:
        """Wall and CPU seconds since it was made or last asked."""
        wall, cpu = time.monotonic(), _cpu()
        spent = wall - self._wall, cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        return spent


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
