"""Capture a function as a CUDA graph: a recording of the kernels that it launches, which can be launched again as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar
from unittest.mock import patch

import torch

Result = TypeVar("Result")


@lru_cache(maxsize=64)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: graphs share memory only if they were captured on the same one."""
    return torch.cuda.Stream(device)


def capture(
    function: Callable[[], Result], device: torch.device, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of what a function launches on a device, and what the function returned, whose memory each launch fills anew.

    Args:
        function: Function that has run before, so that libraries have chosen kernels and allocated what they need once.
        pool: Memory that is shared with other graphs, which then must not run at the same time.

    Code that asks whether it is captured is told that it is not: it might take another way than without a graph. Nothing is
    waited for, and no cached memory is given back, as `torch.cuda.graph` does.

    Raises:
        Exception: whatever CUDA raises where the function waits for the device, or copies to the host.
    """
    current, side = torch.cuda.current_stream(device), side_stream(device)
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side), patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
    except BaseException:
        _end_failed_capture(device)
        raise
    current.wait_stream(side)
    return graph, result


def _end_failed_capture(device: torch.device) -> None:
    """A capture that fails leaves torch's generator in it, so that it can draw no numbers; one that succeeds ends that."""
    with contextlib.suppress(RuntimeError):
        word = torch.zeros(1, device=device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            word.add_(1)
