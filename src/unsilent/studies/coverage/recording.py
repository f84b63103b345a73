"""Records the signals of single training steps, and copies of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from unsilent.detectors.series import Bools, Floats, Series
from unsilent.monitor.backward_hooks import BackwardListener, add_listener, remove_listener
from unsilent.monitor.signals.collector import SignalCollector
from unsilent.sites.modules import named_parameters
from unsilent.workloads.trainings.base import StepRecord, TrainingState


class StepRecorder(BackwardListener):
    """A context manager that records steps of one training, and removes its hooks at the end.

    Attributes:
        parameters: Parameters that are trained.
        gradients: Copies of their gradients after the last backward pass, before any clipping; zeros for a missing gradient.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._collector = SignalCollector(state.model, state.optimizers, fingerprint=False)
        self.parameters: list[Tensor] = [p for _, p in named_parameters(state.model) if p.requires_grad]
        self.gradients: list[Tensor] = []
        add_listener(self)

    @property
    def series(self) -> tuple[Series, ...]:
        """The series that are recorded."""
        return tuple(self._collector.series)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        remove_listener(self)
        self._collector.close()

    def record(self, run: Callable[[TrainingState], StepRecord]) -> tuple[Floats, Bools]:
        """Run one step and return its signals, float64[n], and which of them are present, bool[n]."""
        try:
            run(self._state)
        finally:
            row = self._collector.take_row()
        signals = row.read(len(self.series))
        return signals.values, signals.seen

    @torch.no_grad()
    def after_backward(self) -> None:
        """Copy the gradients at the end of a backward pass."""
        self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]

    def hook_failed(self, error: Exception) -> None:
        """Raise the error of a failed hook, since the recording would be wrong."""
        raise error


def relative_difference(tensors: Sequence[Tensor], others: Sequence[Tensor], size: Sequence[Tensor]) -> float:
    """The L2 norm of ``tensors - others`` relative to that of ``size``; infinity if not finite."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        return float("inf")
    change = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(tensors, others, strict=True))
    whole = sum(float(tensor.double().square().sum()) for tensor in size)
    return float((change / max(whole, 1e-300)) ** 0.5)
