"""Turns of tensors to be read, so that every one is read within an interval also where it does not come in each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from unsilent.monitor.signals.trained_parameters import in_turn, part_in_turn


class TrainedParameter(NamedTuple):
    """A trained parameter, and the numbers of the first series of its gradient and of its update."""

    parameter: Tensor
    gradient: int
    update: int


@dataclass
class OptimizerTurns:
    """The parameters of one optimizer. Turns go by its own steps: every second row may be one of another optimizer.

    Attributes:
        first: Number of its first parameter among all.
        steps: Number of steps it has made so far.
    """

    first: int = 0
    steps: int = 0
    parameters: list[TrainedParameter] = field(default_factory=list)

    def add(self, parameter: TrainedParameter, number: int) -> int:
        """Add a parameter, with its number among all; its place here."""
        self.first = self.first if self.parameters else number
        self.parameters.append(parameter)
        return len(self.parameters) - 1

    def due(self, interval: int) -> list[TrainedParameter]:
        """The parameters whose turn it is."""
        return in_turn(self.parameters, self.first + self.steps, interval)

    def due_part(self, interval: int) -> list[TrainedParameter]:
        """The parameters whose state is to be read."""
        return part_in_turn(self.parameters, self.first + self.steps, interval)

    def is_due(self, place: int, interval: int) -> bool:
        """Whether it is the turn of the parameter at a place of the list."""
        return (place + self.first + self.steps) % interval == 0


class ValueTurns:
    """Values inside a model, by feature and name. One that does not come in its turn is read when it comes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def add(self, key: tuple[str, str]) -> None:
        """Add a key, numbered among those of its feature."""
        self._numbers[key] = sum(feature == key[0] for feature, _ in self._numbers)

    def is_due(self, key: tuple[str, str], step: int, interval: int) -> bool:
        """Whether a key is to be read in a step; all its values in that step are."""
        waited = step - self._last.get(key, -1)
        return waited > interval or not waited or (self._numbers[key] + step) % interval == 0

    def may_come(self, step: int, interval: int) -> frozenset[tuple[str, str]]:
        """Keys that may be due in a step or the next one."""
        return frozenset(key for key in self._numbers if any(self.is_due(key, step + n, interval) for n in (0, 1)))

    def note(self, key: tuple[str, str], step: int) -> None:
        """Note that a tensor was read."""
        self._last[key] = step

    def go_back(self, step: int) -> None:
        """Go back: this step and those after it are made again."""
        self._last = {key: last for key, last in self._last.items() if last < step}
