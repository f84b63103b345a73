"""Capture of a function as a CUDA graph: a recording of its kernel launches that can be replayed as a whole."""

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
    """The stream that is used for all captures on a device, so that the graphs can share memory."""
    return torch.cuda.Stream(device)


def capture(
    function: Callable[[], Result], device: torch.device, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a function as a CUDA graph and return the graph with the function's result.

    Each launch of the graph overwrites the memory of the result.

    Args:
        function: Function that has run before, so that libraries have chosen kernels and allocated their one-time memory.
        pool: Memory that is shared with other graphs, which must not run at the same time.

    Code that checks whether it is captured gets the answer no, because it might behave differently in a capture. Unlike
    `torch.cuda.graph`, this function does not synchronise and does not free cached memory.

    Raises:
        Exception: any error of CUDA, if the function waits for the device or copies to the host.
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
    """Make torch's random generator usable again after a failed capture, by capturing a small graph."""
    with contextlib.suppress(RuntimeError):
        word = torch.zeros(1, device=device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            word.add_(1)
