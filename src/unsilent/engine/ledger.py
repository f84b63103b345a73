"""What trials cost by the shortcut and plainly, by class of site: the planner's measured costs.

A class is one site (or so many sites at once) in one batch. Where the shortcut turned out dearer (trials that raise early, a
first layer of a tiny model), the plain run is taken from then on. Rows are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unsilent.faults import Fault

ENOUGH = 3
"""Trials of a class before its costs are believed."""
AGAIN = 50
"""Plain trials of a class after which the shortcut is tried once more."""

MEMORY = 64
"""Trials of a class after which half of what is known of it is forgotten."""
TRIED = 16
"""Trials each way before packing is decided."""

Class = tuple[str, int]


@dataclass(slots=True)
class Cost:
    """CPU seconds of the trials of one class so far, and what they would have cost plainly."""

    trials: int = 0
    shortcut: float = 0.0
    plain: float = 0.0
    skipped: int = 0


class Ledger:
    """Costs by class of site."""

    def __init__(self) -> None:
        self.costs: dict[Class, Cost] = {}

    def add(self, key: Class, shortcut: float, plain: float) -> None:
        """One more trial."""
        cost = self.costs.setdefault(key, Cost())
        if cost.trials >= MEMORY:  # what was long ago counts less
            cost.trials, cost.shortcut, cost.plain = cost.trials // 2, cost.shortcut / 2, cost.plain / 2
        cost.trials, cost.shortcut, cost.plain = cost.trials + 1, cost.shortcut + shortcut, cost.plain + plain

    def prefers_plain(self, key: Class) -> bool:
        """Whether the plain run was measured to be cheaper."""
        cost = self.costs.get(key)
        return cost is not None and cost.trials >= ENOUGH and cost.shortcut > cost.plain

    def skips(self, key: Class) -> bool:
        """Whether the next trial of the class is to be run plainly."""
        if not self.prefers_plain(key):
            return False
        cost = self.costs[key]
        cost.skipped += 1
        return cost.skipped % AGAIN > 0

    def plain_classes(self) -> list[str]:
        """Classes that run plainly."""
        return sorted({key[0] for key in self.costs if self.prefers_plain(key)})


class Packing:
    """Whether parameter faults of several trials go through a tape together: tried both ways, the cheaper one is kept."""

    def __init__(self) -> None:
        self._tried = {True: Cost(), False: Cost()}

    def next(self) -> bool:
        """Whether the next trials go together."""
        if self._tried[False].trials < TRIED:
            return False
        return self._tried[True].trials < TRIED or self.pays

    @property
    def pays(self) -> bool:
        """Whether it was measured to be cheaper."""
        one, many = self._tried[False], self._tried[True]
        return many.trials >= TRIED and many.shortcut / many.trials < one.shortcut / max(one.trials, 1)

    def add(self, together: bool, trials: int, seconds: float) -> None:
        """What some trials cost."""
        cost = self._tried[together]
        cost.trials, cost.shortcut = cost.trials + trials, cost.shortcut + seconds


def class_of(batch: int, faults: Sequence[Fault]) -> Class:
    """The class of a trial's faults."""
    if len(faults) == 1:
        return faults[0].site, batch
    return f"{1 << max(len(faults).bit_length() - 1, 0)} or more sites at once", batch
