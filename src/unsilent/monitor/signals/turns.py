"""Schedules when each tensor is read, so that each one is read once per interval.

This also holds for a tensor that does not occur in each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from unsilent.monitor.signals.trained_parameters import in_turn, part_in_turn


class TrainedParameter(NamedTuple):
    """A trained parameter, and the numbers of the series of its gradient and of its update."""

    parameter: Tensor
    gradient: int
    update: int


@dataclass
class OptimizerTurns:
    """The parameters of one optimizer, which are read in turn.

    Turns follow the optimizer's own steps, because every second row may belong to another optimizer.

    Attributes:
        first: Number of its first parameter among all.
        steps: Number of its steps so far.
    """

    first: int = 0
    steps: int = 0
    parameters: list[TrainedParameter] = field(default_factory=list)

    def add(self, parameter: TrainedParameter, number: int) -> int:
        """Add a parameter, and return its place in the list.

        ``number``: its number among the parameters of all optimizers.
        """
        self.first = self.first if self.parameters else number
        self.parameters.append(parameter)
        return len(self.parameters) - 1

    def due(self, interval: int) -> list[TrainedParameter]:
        """The parameters whose gradients are to be read in the current step."""
        return in_turn(self.parameters, self.first + self.steps, interval)

    def due_part(self, interval: int) -> list[TrainedParameter]:
        """The parameters whose state is to be read in the current step."""
        return part_in_turn(self.parameters, self.first + self.steps, interval)

    def is_due(self, place: int, interval: int) -> bool:
        """Whether the parameter at this place in the list is to be read now."""
        return (place + self.first + self.steps) % interval == 0


class ValueTurns:
    """Values inside a model by feature and name, which are read in turn.

    A value that does not occur in its turn is read when it occurs next.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def add(self, key: tuple[str, str]) -> None:
        """Add the key of a value, numbered among those of its feature."""
        self._numbers[key] = sum(feature == key[0] for feature, _ in self._numbers)

    def is_due(self, key: tuple[str, str], step: int, interval: int) -> bool:
        """Whether a value is to be read in a step; then it is read each time that it occurs."""
        waited = step - self._last.get(key, -1)
        return waited > interval or not waited or (self._numbers[key] + step) % interval == 0

    def may_come(self, step: int, interval: int) -> frozenset[tuple[str, str]]:
        """Keys of the values that may be read in a step or the next one."""
        return frozenset(key for key in self._numbers if any(self.is_due(key, step + n, interval) for n in (0, 1)))

    def note(self, key: tuple[str, str], step: int) -> None:
        """Note that a value was read in a step."""
        self._last[key] = step

    def go_back(self, step: int) -> None:
        """Forget this step and all later ones, because they are executed again."""
        self._last = {key: last for key, last in self._last.items() if last < step}
