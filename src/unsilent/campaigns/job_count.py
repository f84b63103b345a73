"""How many worker processes run a campaign when nobody said: as many as cores and memory allow, and one core is left free."""

from __future__ import annotations

import os

from unsilent.basics.free_memory import available_memory_bytes, peak_memory_bytes
from unsilent.campaigns.spec import Spec

WORKER_BYTES = 2 << 30
"""Free memory that must be there for each worker. It is a guess: nothing is loaded yet."""
ROOM = 2
"""Times the memory that a running worker has used at most must be free before another one is started."""


def default_job_count(spec: Spec) -> int:
    """The number of cores less one, each worker with its threads, at least 1; on an accelerator 1.

    It is at most the free memory divided by `WORKER_BYTES`.
    """
    if getattr(spec, "device", "cpu") != "cpu":
        return 1
    free = available_memory_bytes()
    cores = (core_count() - 1) // max(1, spec.threads)
    return max(1, cores if free is None else min(cores, free // WORKER_BYTES))


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_memory_for_another(pid: int, starting: int) -> bool:
    """Whether another worker like the one of ``pid`` fits, besides ``starting`` ones that have not loaded anything yet."""
    free, used = available_memory_bytes(), peak_memory_bytes(pid)
    return free is None or used is None or free >= ROOM * used * (1 + starting)
