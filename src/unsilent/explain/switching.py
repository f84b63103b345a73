"""Switches that make a running process deterministic, which can be set and restored between steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from unsilent.replicas.runner import PRECISIONS, parts_with_precision

Switches = tuple[bool, bool, bool, bool]
"""Whether torch uses deterministic algorithms, whether uninitialised memory is filled, whether cuDNN uses deterministic
algorithms, and whether it measures several kernels."""


class Mode(NamedTuple):
    """A set of switches that are applied to some steps of a run.

    Attributes:
        deterministic: Whether torch and cuDNN use deterministic algorithms.
        fill: Whether, with these, memory from ``torch.empty`` is filled with NaN (or the largest integer).
        tune: Whether cuDNN measures several kernels and uses the fastest.
        threads: Number of CPU threads; ``None`` to keep the setting.
        tf32: Whether CUDA's matrix products and convolutions may use TF32; ``None`` to keep the setting.
        seeds: Whether all global generators are seeded at the start of every step.
    """

    deterministic: bool = False
    fill: bool = True
    tune: bool = False
    threads: int | None = None
    tf32: bool | None = None
    seeds: bool = False

    @property
    def _switches(self) -> Switches:
        return self.deterministic, self.fill, self.deterministic, self.tune

    def set(self, warn_only: bool) -> None:
        """Set all switches of the mode.

        ``warn_only``: whether operations without a deterministic form are allowed.
        """
        _set_switches(self._switches, warn_only)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.tf32 is not None:
            for part in parts_with_precision():
                part.fp32_precision = PRECISIONS[self.tf32]

    @property
    def is_set(self) -> bool:
        """Whether all switches have the values of this mode."""
        precisions = [part.fp32_precision for part in parts_with_precision()] if self.tf32 is not None else []
        return (
            _current_switches() == self._switches
            and self.threads in (None, torch.get_num_threads())
            and all(precision == PRECISIONS[bool(self.tf32)] for precision in precisions)
        )


def _current_switches() -> Switches:
    memory: Any = torch.utils.deterministic
    cudnn: Any = torch.backends.cudnn
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return is_deterministic, memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark


def _set_switches(switches: Switches, warn_only: bool) -> None:
    memory: Any = torch.utils.deterministic
    cudnn: Any = torch.backends.cudnn
    torch.use_deterministic_algorithms(switches[0], warn_only=warn_only)
    _, memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark = switches


@contextmanager
def switched(mode: Mode) -> Iterator[None]:
    """Context in which the switches of a mode are set; they are restored afterwards.

    Operations without a deterministic form are allowed.
    """
    switches, threads = _current_switches(), torch.get_num_threads()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    precisions = [(part, part.fp32_precision) for part in parts_with_precision()] if mode.tf32 is not None else []
    try:
        mode.set(warn_only=True)
        yield
    finally:
        _set_switches(switches, warn_only)
        torch.set_num_threads(threads)
        for part, precision in precisions:
            part.fp32_precision = precision


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
