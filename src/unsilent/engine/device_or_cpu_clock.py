"""The clock that shortcuts are judged by: CPU time of this thread, or the time of a device that works on its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> Callable[[], float]:
    """A function that gives seconds; on CUDA it waits for what was launched, so it belongs into trials of kernels alone."""
    if device.type != "cuda":
        return time.thread_time

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
