"""What an evaluation costs by a CUDA graph, plainly, from the tape, and on rows: measured, so that the cheapest way is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

from unsilent.engine.trial_costs import ENOUGH, PLAIN_ABOVE, MeasuredCost

GROUPS = 2
"""Groups of trials on rows before their cost is believed; the first one finds cold caches."""


@dataclass
class GraphCosts:
    """Seconds of evaluations.

    Attributes:
        graph, plain: Of one evaluation with its verdict, by batch, as measured when the graph was made.
        trial: Of trials by graphs, preparation and reading included.
        on_rows: Of trials of some samples that were evaluated in another way.
    """

    graph: dict[int, float] = field(default_factory=dict)
    plain: dict[int, float] = field(default_factory=dict)
    trial: MeasuredCost = field(default_factory=MeasuredCost)
    on_rows: MeasuredCost = field(default_factory=MeasuredCost)
    _groups_on_rows: int = 0

    @property
    def trial_seconds(self) -> float:
        """Of a trial by graphs, at most."""
        return self.trial.mean if self.trial.trials >= ENOUGH else sum(self.graph.values())

    def add_on_rows(self, seconds: float, trials: int) -> None:
        """A group of trials of some samples that went another way."""
        self._groups_on_rows += 1
        if self._groups_on_rows > 1:
            self.on_rows.add(seconds / trials)

    def prefers_graph(self, batch: int, from_tape: float) -> bool:
        """Whether the graph is cheapest; ``from_tape``: seconds of the same evaluation from the tape."""
        return self.graph[batch] <= min(PLAIN_ABOVE * self.plain[batch], from_tape)

    @property
    def prefers_graph_to_rows(self) -> bool:
        """Whether trials of some samples are cheaper by graphs of whole batches than on rows; rows are tried first."""
        return self._groups_on_rows >= GROUPS and self.trial_seconds <= self.on_rows.mean
