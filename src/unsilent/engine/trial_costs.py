"""Measured costs of trials with shortcuts and in plain runs, by class of site, for choosing between them.

A class is one site (or a number of sites at once) in one batch. If the shortcut turns out more expensive (trials that
raise early, a first layer of a tiny model), the plain run is used from then on. The cost of a plain run is measured
among the trials, because warm caches make it cheaper than at set-up. Results are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unsilent.faults import Fault

ENOUGH = 3
"""Number of trials of a class after which its costs are used."""
NEAR, CLOSE = 0.5, 0.8
"""Relative costs of a shortcut above which it is compared with plain runs: of its batch, and of its own class."""
COMPARED = 5
"""Number of plain runs that are measured for a comparison."""
PLAIN_ABOVE = 0.95
"""Relative cost of a shortcut above which the plain run is used; so few runs cannot show a smaller difference."""
RETRY_AFTER = 64
"""Number of trials of a class after which the other way is tried again; then after twice as many, and so on."""
MEMORY = 64
"""Number of trials after which the weight of old measurements is halved."""

Class = tuple[str, int]


@dataclass(slots=True)
class MeasuredCost:
    """CPU seconds of the trials that were measured."""

    trials: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Add the seconds of a trial.

        Old trials have less weight.
        """
        if self.trials >= MEMORY:
            self.trials, self.seconds = self.trials // 2, self.seconds / 2
        self.trials, self.seconds = self.trials + 1, self.seconds + seconds

    @property
    def mean(self) -> float:
        """Mean seconds of a trial."""
        return self.seconds / max(self.trials, 1)


@dataclass(slots=True)
class SiteClassCosts:
    """Costs of one class of sites.

    ``fallback_cost``: cost of plain runs after the tape could not be followed to its end.
    """

    tape_cost: MeasuredCost = field(default_factory=MeasuredCost)
    fallback_cost: MeasuredCost = field(default_factory=MeasuredCost)
    plain: MeasuredCost = field(default_factory=MeasuredCost)
    asked: int = 0


class TrialCosts:
    """Costs of trials by class of site.

    ``initial_plain_seconds``: seconds of a plain run of each batch, until some were measured among the trials.
    """

    def __init__(self, initial_plain_seconds: Sequence[float] = ()) -> None:
        self.initial_plain_seconds = initial_plain_seconds
        self.costs: dict[Class, SiteClassCosts] = {}
        self._plain: dict[int, MeasuredCost] = {}

    def add(self, key: Class, seconds: float, plain: float | None = None) -> None:
        """Add a trial by the shortcut.

        ``plain``: seconds of the plain run that had to follow; ``seconds`` includes them.
        """
        known = self.costs.get(key)
        if known is None:  # the first trial of a class has cold caches and is not counted
            self.costs[key] = SiteClassCosts()
            return
        known.tape_cost.add(seconds)
        if plain is not None:
            known.fallback_cost.add(plain)

    def add_plain(self, key: Class, seconds: float) -> None:
        """Add a trial that was run plainly."""
        self.costs[key].plain.add(seconds)
        self._plain.setdefault(key[1], MeasuredCost()).add(seconds)

    def forget_batch(self, batch: int) -> None:
        """Delete the costs of a batch, because its trials cost something else from now on."""
        self.costs = {key: costs for key, costs in self.costs.items() if key[1] != batch}

    def relative_cost(self, key: Class) -> float:
        """Cost of the shortcut relative to the plain run, or 0 while it is not known."""
        known = self.costs.get(key)
        if known is None or known.tape_cost.trials < ENOUGH:
            return 0.0
        batch = self._plain.get(key[1])
        plain = self.initial_plain_seconds[key[1]] if batch is None else batch.mean
        if known.plain.trials >= COMPARED:
            plain = known.plain.mean
        # A failing run may end early with an error.
        failing = min(1.0, known.fallback_cost.trials / known.tape_cost.trials)
        expected = failing * known.fallback_cost.mean + (1 - failing) * plain
        return known.tape_cost.mean / expected if expected > 0 else 0.0

    def prefers_plain(self, key: Class) -> bool:
        """Whether the plain run was measured to be at least as cheap as the shortcut."""
        return self.relative_cost(key) > PLAIN_ABOVE

    def is_plain_run_due(self, key: Class) -> bool:
        """Whether the next trial of the class should be run plainly."""
        relative = self.relative_cost(key)
        if relative < NEAR:
            return False
        known = self.costs[key]
        known.asked += 1
        is_retry_due = known.asked >= RETRY_AFTER and known.asked.bit_count() == 1
        if relative > PLAIN_ABOVE:
            return not is_retry_due
        batch = self._plain.get(key[1])
        is_batch_known = batch is not None and batch.trials >= COMPARED
        return is_retry_due or not is_batch_known or (relative > CLOSE and known.plain.trials < COMPARED)


def cost_class_of(batch: int, faults: Sequence[Fault]) -> Class:
    """The class of sites to which a trial's faults belong."""
    if len(faults) == 1:
        return faults[0].site, batch
    return f"{1 << max(len(faults).bit_length() - 1, 0)} or more sites at once", batch
