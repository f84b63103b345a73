"""The signals of one step, from the device to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.detectors.series import Bools, Floats
from unsilent.guard.host_copy import HostCopy

Ints = NDArray[np.int64]
MOST_PARTS = 256
"""Maximum number of pieces of a row; then they are reduced to the largest value of each series, to limit the row's size."""


class SignalValues(NamedTuple):
    """The signals of one step on the CPU.

    Attributes:
        values: float64[n], value of each series; the largest if a series had several values (micro-batches).
        seen: bool[n], whether each series has a value.
        changed: Names of the tensors whose bits changed since the step before without a write.
        compared: Names of all tensors whose bits were compared.
        replica_sums: int64[k], fingerprints of the tensors whose bits should be equal in all ranks.
    """

    values: Floats
    seen: Bools
    changed: tuple[str, ...]
    compared: tuple[str, ...]
    replica_sums: Ints


class SignalRow:
    """Collects the signals of one step.

    Attributes:
        step: Number of the step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._slots: list[Sequence[int]] = []
        self._parts: list[Tensor] = []
        self._scaled: set[int] = set()
        self._without_minus_infinity: set[int] = set()
        self._compared_names: list[Sequence[str]] = []
        self._compared: list[Tensor] = []
        self._replicas: list[Tensor] = []
        self._copy: HostCopy | None = None

    def add(self, slots: Sequence[int], values: Tensor, is_scaled: bool = False) -> None:
        """Add values of series; ``slots`` are the numbers of the series.

        ``is_scaled``: whether a loss scaler has multiplied the backward pass. The scaler itself skips an update with non-finite
        numbers, so these count as not seen.
        """
        self._slots.append(slots)
        self._parts.append(values)
        if is_scaled:
            self._scaled.update(slots)
        if len(self._parts) > MOST_PARTS:
            self._merge()

    def leave_out_minus_infinity(self, slot: int) -> None:
        """Count a value of minus infinity of this series as not seen."""
        self._without_minus_infinity.add(slot)

    def discard_values(self, except_for: int) -> None:
        """Discard all values except those of one series, because the update was skipped."""
        self._merge()
        parts = zip(self._slots, self._parts, strict=True)
        values_kept = [values[slots.index(except_for)] for slots, values in parts if except_for in slots]
        self._slots, self._parts = [(except_for,)] * len(values_kept), [value.reshape(1) for value in values_kept]

    def add_comparison(self, names: Sequence[str], changed: Tensor) -> None:
        """Add the result of a comparison: bool[k], whether each named tensor changed."""
        self._compared_names.append(names)
        self._compared.append(changed)
        if len(self._compared) > MOST_PARTS:
            self._merge_comparisons()

    def add_replicas(self, sums: Tensor) -> None:
        """Add fingerprints of tensors that all ranks should have alike, int64[k].

        If there are very many, only the last ones are kept.
        """
        self._replicas = [*self._replicas[-MOST_PARTS:], sums]

    def begin_copy(self) -> None:
        """Start copying all numbers to the CPU in one piece; nothing may be added afterwards."""
        parts = [part.to(torch.float64).view(torch.int64) for part in self._parts]
        parts += [changed.to(torch.int64) for changed in self._compared]
        parts += self._replicas
        if parts:
            device = next((part.device for part in parts if part.is_cuda), parts[0].device)
            self._copy = HostCopy(torch.cat([part.to(device, non_blocking=True) for part in parts]))
        self._parts = []

    def read(self, count: int) -> SignalValues:
        """The signals of ``count`` series; waits until they are on the CPU."""
        words: Ints = np.zeros(0, np.int64) if self._copy is None else np.asarray(self._copy.read())
        slots = np.array([slot for part in self._slots for slot in part], dtype=np.int64)
        values, seen = np.full(count, -np.inf), np.zeros(count, np.bool_)
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            np.maximum.at(values, slots, words[: len(slots)].view(np.float64))
        seen[slots] = True
        scaled = np.array(sorted(self._scaled), dtype=np.int64)
        seen[scaled] &= np.isfinite(values[scaled])
        without_minus_infinity = np.array(sorted(self._without_minus_infinity), dtype=np.int64)
        seen[without_minus_infinity] &= ~np.isneginf(values[without_minus_infinity])
        values[~seen] = np.nan
        rest = words[len(slots) :]
        names = [name for part in self._compared_names for name in part]
        changed = tuple(name for name, differs in zip(names, rest[: len(names)].tolist(), strict=True) if differs)
        return SignalValues(values, seen, changed, tuple(names), rest[len(names) :])

    def _merge(self) -> None:
        """Reduce the values of each series to the largest, or to NaN if one is NaN."""
        if not self._parts:
            return
        slots = torch.tensor([slot for part in self._slots for slot in part])
        device = self._parts[0].device
        values = torch.cat([part.to(device, torch.float64) for part in self._parts])
        unique, places = torch.unique(slots, return_inverse=True)
        largest = torch.full((len(unique),), -torch.inf, dtype=torch.float64, device=device)
        self._parts = [largest.scatter_reduce(0, places.to(device, non_blocking=True), values, "amax")]
        self._slots = [unique.tolist()]

    def _merge_comparisons(self) -> None:
        """Reduce the comparisons of each tensor to whether it changed in any of them."""
        places: dict[str, int] = {}
        order = [places.setdefault(name, len(places)) for part in self._compared_names for name in part]
        device = self._compared[0].device
        changed = torch.cat([part.to(device, torch.int64) for part in self._compared])
        counts = torch.zeros(len(places), dtype=torch.int64, device=device)
        index = torch.tensor(order).to(device, non_blocking=True)
        self._compared = [counts.index_add(0, index, changed) > 0]
        self._compared_names = [list(places)]
