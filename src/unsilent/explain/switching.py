"""Switches that make a running process deterministic: set and put back again, so that steps of one run can take turns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from unsilent.replicas.runner import PRECISIONS, parts_with_precision


class Mode(NamedTuple):
    """Switches with which steps run.

    Attributes:
        deterministic: Torch's deterministic algorithms, and cuDNN's.
        fill: Whether, with them, NaN (or the largest integer) is written into memory that ``torch.empty`` gives.
        tune: cuDNN measures several kernels and takes the fastest.
        threads: Threads of the CPU; None leaves them.
        tf32: Whether CUDA's matrix products and convolutions may use TF32; None leaves it.
        seeds: Seed all global generators at the start of every step.
    """

    deterministic: bool = False
    fill: bool = True
    tune: bool = False
    threads: int | None = None
    tf32: bool | None = None
    seeds: bool = False

    def set(self, warn_only: bool) -> None:
        """Set all its switches; ``warn_only``: operations without a deterministic form run."""
        memory: Any = torch.utils.deterministic
        cudnn: Any = torch.backends.cudnn
        torch.use_deterministic_algorithms(self.deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = self.fill
        cudnn.deterministic, cudnn.benchmark = self.deterministic, self.tune
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.tf32 is not None:
            for part in parts_with_precision():
                part.fp32_precision = PRECISIONS[self.tf32]

    @property
    def is_set(self) -> bool:
        """Whether its switches are as it sets them."""
        memory: Any = torch.utils.deterministic
        cudnn: Any = torch.backends.cudnn
        now = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
        return (
            now == (self.deterministic, self.fill)
            and (cudnn.deterministic, cudnn.benchmark) == (self.deterministic, self.tune)
            and self.threads in (None, torch.get_num_threads())
            and (
                self.tf32 is None
                or all(part.fp32_precision == PRECISIONS[self.tf32] for part in parts_with_precision())
            )
        )


@contextmanager
def switched(mode: Mode) -> Iterator[None]:
    """The mode inside, in which operations without a deterministic form run; all switches as they were afterwards."""
    memory: Any = torch.utils.deterministic
    cudnn: Any = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches = memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark
    threads = torch.get_num_threads()
    precisions = [(part, part.fp32_precision) for part in parts_with_precision()] if mode.tf32 is not None else []
    try:
        mode.set(warn_only=True)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark = switches
        torch.set_num_threads(threads)
        for part, precision in precisions:
            part.fp32_precision = precision


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
