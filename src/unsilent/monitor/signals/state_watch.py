"""Signals of the state around an optimizer step: the size of updates, and fingerprints of bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from unsilent.monitor.signals.fingerprints import StateTensors
from unsilent.monitor.signals.magnitudes import local_tensor, norms_and_largest
from unsilent.monitor.signals.row import SignalRow


class StateWatch:
    """Reads parameters and optimizer state around each step.

    Args:
        parameters: Those that are trained, by name.
        optimizers: What trains them.
        fingerprint: Whether bits are compared.
        is_full: Compare all of them in each step.
        has_replicas: Whether other ranks should have the same parameters.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        optimizers: Sequence[Optimizer],
        fingerprint: bool,
        is_full: bool,
        has_replicas: bool,
    ) -> None:
        self._parameters, self._optimizers, self._has_replicas = parameters, optimizers, has_replicas
        self._is_on, self._is_full = fingerprint, is_full
        self._tensors: StateTensors | None = None
        self._entries = -1
        self._chosen: list[int] = []
        self._versions: list[list[tuple[int, int]]] = []
        self._sums: Tensor | None = None
        self._before: list[tuple[str, Tensor]] = []
        self._copies: list[Tensor] = []
        self._copied: list[tuple[int, ...]] = []

    @torch.no_grad()
    def remember_parameters(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Copy these, so that `updates` can tell how much they change; the memory is used again."""
        self._before = [
            (name, local_tensor(p)) for name, p in parameters if p.grad is not None and local_tensor(p).numel()
        ]
        shapes = [tuple(t.shape) for _, t in self._before]
        if shapes != self._copied:
            self._copies, self._copied = [torch.empty_like(t) for _, t in self._before], shapes
        if self._before:
            torch._foreach_copy_(self._copies, [t for _, t in self._before])

    def forget(self) -> None:
        """Compare nothing with what was before: the state was replaced."""
        self._sums, self._before = None, []

    def forget_parameters(self) -> None:
        """The update is left out."""
        self._before = []

    @property
    def names(self) -> list[str]:
        """Of parameters and the tensors of optimizers, in the order of their numbers."""
        return [] if self._tensors is None else self._tensors.names

    @torch.no_grad()
    def updates(self) -> tuple[list[str], Tensor]:
        """Names of the parameters that were copied, and of their changes the L2 norms, then the largest magnitudes."""
        if not self._before:
            return [], torch.zeros(0)
        names = [name for name, _ in self._before]
        torch._foreach_sub_(self._copies, [t for _, t in self._before])
        self._before = []
        return names, norms_and_largest(self._copies)

    def take(self, row: SignalRow, step: int, interval: int) -> None:
        """Take fingerprints of a part of the state after a step; those of replicas are added to the row."""
        if not self._is_on:
            return
        entries = sum(len(optimizer.state) for optimizer in self._optimizers)
        if self._tensors is None or entries != self._entries:
            self._tensors, self._entries = StateTensors(self._parameters, self._optimizers), entries
        tensors, interval = self._tensors, 1 if self._is_full else interval
        self._chosen = [n for n in range(len(tensors.names)) if (n + step) % interval == 0]
        self._versions = [tensors.versions(n) for n in self._chosen]
        self._sums = tensors.bit_sums(self._chosen)
        replicas = [place for place, n in enumerate(self._chosen) if tensors.is_parameter[n]]
        if replicas and self._has_replicas:
            row.add_replicas([tensors.names[self._chosen[place]] for place in replicas], self._sums[replicas])

    def compare(self, row: SignalRow) -> None:
        """Compare the same part before the next step, except for what was written to or replaced."""
        if self._sums is None or self._tensors is None:
            return
        tensors, sums, self._sums = self._tensors, self._sums, None
        same = [
            place
            for place, (n, versions) in enumerate(zip(self._chosen, self._versions, strict=True))
            if tensors.versions(n) == versions
        ]
        numbers = [self._chosen[place] for place in same]
        changed = tensors.bit_sums(numbers).to(sums.device) != sums[same]
        row.add_comparison([tensors.names[n] for n in numbers], changed)
