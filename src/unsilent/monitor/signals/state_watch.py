"""Signals of the state around an optimizer step: sizes of updates, and fingerprints of bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from unsilent.guard.magnitudes import local_tensor, norms_and_largest
from unsilent.monitor.signals.fingerprints import StateEntry, state_entries
from unsilent.monitor.signals.row import SignalRow
from unsilent.monitor.signals.trained_parameters import part_in_turn
from unsilent.recovery.digests import digests_of

ALIGNMENT = 64
"""Alignment in elements: each tensor begins at a multiple of it, as torch would place it."""
MOST_AGE = 1000
"""Steps after which the tensors of an optimizer are always collected again."""


class UpdateSizes:
    """Measures the change of parameters in an optimizer step, with copies in reused memory."""

    def __init__(self) -> None:
        self._before: list[tuple[int, Tensor]] = []
        self._copies: list[Tensor] = []
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @torch.no_grad()
    def remember(self, parameters: Sequence[tuple[int, Tensor]]) -> None:
        """Copy these numbered parameters, except for those without a gradient."""
        self._before = [(n, local_tensor(p)) for n, p in parameters if p.grad is not None and p.numel()]
        self._before = [(n, t) for n, t in self._before if t.numel()]
        if self._before:
            self._copies = self._room_for([t for _, t in self._before])
            torch._foreach_copy_(self._copies, [t for _, t in self._before])

    def _room_for(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors with the shapes of these, one after the other in reused memory."""
        ends: dict[tuple[torch.dtype, torch.device], int] = {}
        places = []
        for tensor in tensors:
            kind = tensor.dtype, tensor.device
            places.append((kind, ends.get(kind, 0), tensor))
            ends[kind] = ends.get(kind, 0) + tensor.numel() + -tensor.numel() % ALIGNMENT
        for kind, size in ends.items():
            if kind not in self._memory or self._memory[kind].numel() < size:
                self._memory[kind] = torch.empty(size, dtype=kind[0], device=kind[1])
        return [self._memory[kind][start : start + t.numel()].view(t.shape) for kind, start, t in places]

    def forget(self) -> None:
        """Forget the copies, because the step is skipped or the parameters were replaced."""
        self._before = []

    @torch.no_grad()
    def take(self) -> tuple[list[int], Tensor]:
        """Numbers of the copied parameters, and the L2 norms and largest magnitudes of their changes."""
        if not self._before:
            return [], torch.zeros(0)
        numbers = [n for n, _ in self._before]
        torch._foreach_sub_(self._copies, [t for _, t in self._before])
        self._before = []
        return numbers, norms_and_largest(self._copies)


class _OptimizerState:
    """Tensors whose bits are compared around the steps of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        parameters: list[tuple[str, Tensor]],
        frozen: Sequence[tuple[str, Tensor]],
    ) -> None:
        self.optimizer, self.number, self.parameters, self.frozen = optimizer, number, parameters, frozen
        self.entries: list[StateEntry] = []
        self.chosen: list[StateEntry] = []
        self.versions: list[list[tuple[int, int]]] = []
        self.digests: Tensor | None = None
        self._state: object = None
        self._counted = (-1, -1)
        self._age = 0

    def choose(self, step: int, interval: int) -> None:
        """Choose the entries to read in a step.

        All are collected anew if the optimizer has replaced tensors.
        """
        self._age += 1
        step += self.number  # so that optimizers of one parameter each are not all read in the same step
        counted = len(self.parameters), len(self.optimizer.state)
        if self.optimizer.state is not self._state or counted != self._counted or self._age >= MOST_AGE:
            self._find()
        self.chosen = part_in_turn(self.entries, step, interval)
        if not all(entry.is_current() for entry in self.chosen):
            self._find()
            self.chosen = part_in_turn(self.entries, step, interval)

    def _find(self) -> None:
        self._age, self._state = 0, self.optimizer.state
        self._counted = len(self.parameters), len(self.optimizer.state)
        self.entries = state_entries([*self.parameters, *self.frozen], self.optimizer, self.number)


class StateWatch:
    """Compares the bits of parameters and optimizer state between two steps of an optimizer.

    Fingerprints are taken after a step and compared before the next one.

    Args:
        parameters: Parameters of each optimizer, by name; more may be added to the lists.
        optimizers: Optimizers that train them.
        frozen: Further parameters, compared together with those of the first optimizer.
        is_full: Whether all of them are compared in each step.
        has_replicas: Whether other ranks should have the same parameters.
    """

    def __init__(
        self,
        parameters: Sequence[list[tuple[str, Tensor]]],
        optimizers: Sequence[Optimizer],
        frozen: Sequence[tuple[str, Tensor]],
        is_full: bool,
        has_replicas: bool,
    ) -> None:
        self._is_full, self._has_replicas = is_full, has_replicas
        self._states: dict[int, _OptimizerState] = {}
        for number, (optimizer, named) in enumerate(zip(optimizers, parameters, strict=True)):
            self._states[id(optimizer)] = _OptimizerState(optimizer, number, named, () if number else frozen)

    def forget(self) -> None:
        """Forget the fingerprints, because the state was replaced."""
        for state in self._states.values():
            state.digests = None

    @property
    def names(self) -> list[str]:
        """Names of the parameters and of the tensors of optimizers, by number."""
        return [entry.name for state in self._states.values() for entry in state.entries]

    @torch.no_grad()
    def take(self, row: SignalRow, optimizer: Optimizer, step: int, interval: int) -> None:
        """Take fingerprints of a part of the state after an optimizer step.

        ``step``: step in this optimizer's own count. Fingerprints of replicas are added to the row.
        """
        state = self._states[id(optimizer)]
        state.choose(step, 1 if self._is_full else interval)
        state.versions = [entry.versions() for entry in state.chosen]
        state.digests = digests_of([entry.bits() for entry in state.chosen])
        replicas = [place for place, entry in enumerate(state.chosen) if entry.is_parameter]
        if replicas and self._has_replicas:
            row.add_replicas(_chosen(state.digests, replicas))

    @torch.no_grad()
    def compare(self, row: SignalRow, optimizer: Optimizer) -> None:
        """Compare the part of the state that `take` read, before the next step.

        Tensors that were written to or replaced are left out.
        """
        state = self._states[id(optimizer)]
        digests, state.digests = state.digests, None
        if digests is None:
            return
        are_same = [entry.versions() == then for entry, then in zip(state.chosen, state.versions, strict=True)]
        same = [place for place, is_same in enumerate(are_same) if is_same]
        entries = [state.chosen[place] for place in same]
        now = digests_of([entry.bits() for entry in entries]).to(digests.device, non_blocking=True)
        changed = now != _chosen(digests, same)
        row.add_comparison([entry.name for entry in entries], changed)


def _chosen(digests: Tensor, places: Sequence[int]) -> Tensor:
    """The elements at these places, which are in ascending order, without waiting for the device."""
    if len(places) == len(digests):
        return digests
    return digests[torch.tensor(places, dtype=torch.int64).to(digests.device, non_blocking=True)]
