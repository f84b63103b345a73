"""Measures the gain of fusing the operations of a part of a model by compiling and timing it."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unsilent.basics.options import check_count

WARMUP = 3
"""Number of first calls that are not timed, as they compile."""


def measure_fused(module: nn.Module, *inputs: Any, repeats: int = 20) -> float:
    """Time of a compiled part of a model divided by its time without compilation.

    Forward and backward pass count together.

    The result is the factor for ``--what-if scale:GLOB=FACTOR``, with a glob of the part's operations. Copies of the module are
    measured in turns, plain and under `torch.compile`, and the medians are compared. The module, its gradients and random
    states are not changed.

    Args:
        module: The part to measure.
        inputs: Arguments of each call.
        repeats: Number of timed calls of each copy, at least 1.
    """
    check_count("repeats", repeats, 1, 10_000)
    plain = copy.deepcopy(module)
    both = (plain, torch.compile(copy.deepcopy(module)))
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.random.fork_rng():
        for repeat in range(WARMUP + repeats):
            for part, times in zip(both, seconds, strict=True):
                taken = _seconds(part, inputs)
                if repeat >= WARMUP:
                    times.append(taken)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def _seconds(module: Any, inputs: tuple[Any, ...]) -> float:
    """Seconds of a forward pass, and of the backward pass if there is one."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    wanted = [tensor for tensor in (*module.parameters(), *tensors) if tensor.requires_grad]
    _wait(tensors)
    begin = time.perf_counter()
    outputs = [leaf for leaf in pytree.tree_leaves(module(*inputs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if outputs and wanted:
        torch.autograd.grad([output.sum() for output in outputs], wanted, allow_unused=True)
    _wait(tensors)
    return time.perf_counter() - begin


def _wait(tensors: list[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
