"""The last iterations of a guarded loop in the form that `recovery.step_replay` requires."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError
from unsilent.guard.execution_record import (
    BETWEEN,
    RepeatableStep,
    ReplayableIteration,
    SnapshotSegment,
    settings_differ,
    settings_of_group,
)
from unsilent.guard.magnitude_check import StepCheck
from unsilent.recovery.digests import state_tensors
from unsilent.recovery.ring import SnapshotRing
from unsilent.recovery.step_replay import IterationStart
from unsilent.workloads.trainings.randomness import (
    generator_state,
    global_generators,
    save_generator_states,
    set_generator_state,
)


class LiveSteps:
    """Implements `ReplayedSteps` for the iterations since the oldest state of a ring.

    ``check`` evaluates their signals.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        ring: SnapshotRing,
        segments: Sequence[SnapshotSegment],
        check: StepCheck,
    ) -> None:
        self.model, self.problem = model, ""
        iterations = [iteration for segment in segments for iteration in segment.iterations]
        self._begun = [start.settings for segment in segments for start in segment.execution.iteration_starts]
        self._optimizers, self._ring, self._iterations, self._check = optimizers, ring, iterations, check

    def go_back(self) -> None:
        """Restore the oldest state."""
        self._ring.put_back_oldest()
        self._check.drop_pending()

    def starts(self) -> Sequence[IterationStart]:
        """The starts of the iterations."""

        def begin(number: int, iteration: ReplayableIteration) -> None:
            self._begin(number, iteration.restore_generators)
            self._check.before_again(iteration.item)

        numbered = enumerate(self._iterations)
        return [IterationStart(each.item, functools.partial(begin, number, each)) for number, each in numbered]

    def _begin(self, number: int, restore_generators: Callable[[], object]) -> None:
        restore_generators()
        now = [settings_of_group(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        if not self.problem and (texts := list(settings_differ(self._begun[number], now))):
            self.problem = f"before a step {texts[0]} ({BETWEEN})"

    def end_iteration(self) -> None:
        """Evaluate the signals of the iteration."""
        self._check.check(late=False, stepped=lambda: True, whole=True)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the current training state, by name."""
        return state_tensors(self.model, self._optimizers)

    def batches(self) -> Sequence[Any]:
        """Batches of the iterations, or arguments of step functions."""
        return [_batch_of(iteration.item) for iteration in self._iterations]

    def portable(self) -> Any:
        """Batches and states of random generators, in a form for another rank."""
        items = [iteration.item for iteration in self._iterations]
        if any(callable(item) and not isinstance(item, RepeatableStep) for item in items):
            raise UsageError("a step is a function without arguments, so that its batch is not known")
        put_back = save_generator_states(self._ring.generators)
        try:
            states = []
            for iteration in self._iterations:
                iteration.restore_generators()
                states.append([generator_state(generator) for generator in self._generators])
        finally:
            put_back()
        return list(zip(self.batches(), states, strict=True))

    def starts_of(self, portable: Any) -> Sequence[IterationStart]:
        """Iterations with the batches and the random states of another rank."""

        def start(number: int, own_item: Any, batch: Any, states: Sequence[Any]) -> IterationStart:
            def restore() -> None:
                for generator, state in zip(self._generators, states, strict=False):
                    set_generator_state(generator, state)

            is_step = isinstance(own_item, RepeatableStep)
            item = RepeatableStep(own_item.run, batch, own_item.results) if is_step else batch
            return IterationStart(item, functools.partial(self._begin, number, restore))

        pairs = enumerate(zip(self._iterations, portable, strict=True))
        return [start(number, iteration.item, *other_rank) for number, (iteration, other_rank) in pairs]

    @property
    def _generators(self) -> list[Any]:
        return [*global_generators(), *self._ring.generators]


def _batch_of(item: Any) -> Any:
    if isinstance(item, RepeatableStep):
        return item.arguments
    return None if callable(item) else item
