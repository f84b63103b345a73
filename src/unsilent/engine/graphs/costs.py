"""Costs of trials by CUDA graphs, plainly, from the tape, and on rows: measured, so that the cheapest way is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

from unsilent.engine.graphs.batch_graph import BatchGraph
from unsilent.engine.trial_costs import ENOUGH, PLAIN_ABOVE, MeasuredCost

GROUPS, TRIED = 2, 128
"""Groups of trials on rows, and trials of each, before their cost is believed; the first group finds cold caches."""


@dataclass
class GraphCosts:
    """Seconds of trials: ``by_graphs``, and of some samples ``on_rows``."""

    by_graphs: MeasuredCost = field(default_factory=MeasuredCost)
    on_rows: MeasuredCost = field(default_factory=MeasuredCost)
    groups_on_rows: int = 0

    def add(self, seconds: float, trials: int) -> None:
        """A group of trials by graphs, preparation and reading included."""
        for _ in range(trials):
            self.by_graphs.add(seconds / trials)

    def add_on_rows(self, seconds: float, trials: int) -> None:
        """A group of trials of some samples that went another way."""
        self.groups_on_rows += 1
        if self.groups_on_rows > 1:
            self.on_rows.add(seconds / trials)

    @property
    def trial_seconds(self) -> float:
        """Seconds of a trial by graphs; 0 where that is not known."""
        return self.by_graphs.mean if self.by_graphs.trials >= ENOUGH else 0.0

    def trials_on_rows(self, by_graphs: float, trials: int) -> int:
        """How many of so many trials of some samples, the first ones, are to be evaluated on rows: all, none, or some to try it.

        ``by_graphs``: seconds of a trial by graphs, which evaluate whole batches.
        """
        if self.groups_on_rows < GROUPS:
            return min(trials, TRIED)
        return 0 if by_graphs <= self.on_rows.mean else trials


def is_cheapest(graph: BatchGraph, from_tape: float) -> bool:
    """Whether a graph is the cheapest evaluation of its batch; ``from_tape``: seconds of the output from the tape."""
    return graph.seconds <= min(PLAIN_ABOVE * graph.plain_seconds, from_tape + graph.verdict_seconds)
