"""Creates a guard for a training workload, whose counters are kept and restored with its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsilent.guard.guard import Guard
from unsilent.workloads.trainings.base import TrainingState

_COUNTERS = ("step", "epoch", "cursor")


class Counters:
    """Position of a training, as an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, int]:
        """The number of steps done, the epoch, and the number of batches taken in it."""
        return {name: getattr(self._state, name) for name in _COUNTERS}

    def load_state_dict(self, counters: Mapping[str, int]) -> None:
        """Set the position of the training."""
        for name in _COUNTERS:
            setattr(self._state, name, counters[name])
        self._state.cached_values.clear()


def guard_training(state: TrainingState, **options: Any) -> Guard:
    """A guard for ``guard.step(lambda: workload.step(state))``, with the options of `Guard`.

    Gradients are kept only if requested: a step of a workload begins by setting them to zero.
    """
    scaler = [] if state.scaler is None else [state.scaler]
    stateful_objects = [*state.schedulers, *scaler, Counters(state)]
    return Guard(state.model, state.optimizers, *stateful_objects, **{"snapshot_gradients": False, **options})
