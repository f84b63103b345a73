"""The clock for timing shortcuts: CPU time of this thread, or wall time of an asynchronous device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> Callable[[], float]:
    """A function that returns the time in seconds.

    On CUDA it waits for all launched kernels, so it is meant for timing single kernels.
    """
    if device.type != "cuda":
        return time.thread_time

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
