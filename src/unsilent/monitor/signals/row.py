"""The signals of one step, on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.detectors.series import Bools, Floats
from unsilent.monitor.signals.host_copy import HostCopy

Ints = NDArray[np.int64]


class SignalValues(NamedTuple):
    """The signals of one step.

    Attributes:
        values: float64[n], of all series; the largest where a series had several values (micro-batches).
        seen: bool[n].
        changed: Names of the tensors whose bits changed since the step before although nobody wrote to them.
        checked: How many tensors were compared for that.
        replica_sums: int64[k], fingerprints of the tensors that every rank should have with the same bits.
        replica_names: Their names.
    """

    values: Floats
    seen: Bools
    changed: tuple[str, ...]
    checked: int
    replica_sums: Ints
    replica_names: tuple[str, ...]


class SignalRow:
    """Collects the signals of one step.

    Attributes:
        step: Its number.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._slots: list[Sequence[int]] = []
        self._parts: list[Tensor] = []
        self._compared_names: list[str] = []
        self._compared: list[Tensor] = []
        self._replicas: tuple[Sequence[str], Tensor] | None = None
        self._copy: HostCopy | None = None

    def add(self, slots: Sequence[int], values: Tensor) -> None:
        """Values of series by number, a tensor of as many numbers on any device."""
        self._slots.append(slots)
        self._parts.append(values)

    def discard_values(self) -> None:
        """Forget the values: the update is left out."""
        self._slots.clear()
        self._parts.clear()

    def add_comparison(self, names: Sequence[str], changed: Tensor) -> None:
        """Which of these tensors changed, bool[k]."""
        self._compared_names += names
        self._compared.append(changed)

    def add_replicas(self, names: Sequence[str], sums: Tensor) -> None:
        """Fingerprints of tensors that all ranks should have alike, int64[k]."""
        self._replicas = names, sums

    def begin_copy(self) -> None:
        """Nothing more is added; the numbers start on their way to the host, in one piece."""
        parts = [part.to(torch.float64).view(torch.int64) for part in self._parts]
        parts += [changed.to(torch.int64) for changed in self._compared]
        parts += [self._replicas[1]] if self._replicas else []
        if parts:
            device = next((part.device for part in parts if part.is_cuda), parts[0].device)
            self._copy = HostCopy(torch.cat([part.to(device, non_blocking=True) for part in parts]))
        self._parts = []

    def read(self, count: int) -> SignalValues:
        """The signals, of ``count`` series; waits for the device if they are not there yet."""
        words: Ints = np.zeros(0, np.int64) if self._copy is None else np.asarray(self._copy.read())
        slots = np.array([slot for part in self._slots for slot in part], dtype=np.int64)
        values, seen = np.full(count, -np.inf), np.zeros(count, np.bool_)
        np.maximum.at(values, slots, words[: len(slots)].view(np.float64))
        seen[slots] = True
        values[~seen] = np.nan
        rest = words[len(slots) :]
        names = self._compared_names
        changed = tuple(name for name, differs in zip(names, rest[: len(names)].tolist(), strict=True) if differs)
        replicas = self._replicas[0] if self._replicas else ()
        return SignalValues(values, seen, changed, len(names), rest[len(names) :], tuple(replicas))
