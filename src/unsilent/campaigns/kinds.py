"""The kinds of campaigns there are, for what runs them without caring which: executors, workers, the driver.

A spec says what its runner is (`make_runner`), a description which campaign it is and what trials are drawn for, a row which
trial it is of and how long that took.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from unsilent.campaigns.rounds import CellPlan
from unsilent.campaigns.spec import CampaignSpec, Description, Means, TrialId, TrialRow
from unsilent.campaigns.trainings.spec import TrainingFound, TrainingRow, TrainingSpec

Spec = CampaignSpec | TrainingSpec
Found = Description | TrainingFound
Row = TrialRow | TrainingRow


class TrialFile(Protocol):
    """A store as the driver sees it; rows and descriptions are those of its kind."""

    def bind(self, spec: Any, description: Any) -> None: ...

    def note_budget(self, trials: int, command: str) -> None: ...

    def note_usage(self, seconds: float, cpu_seconds: float) -> None: ...

    def rounds(self) -> list[list[CellPlan]]: ...

    def add_round(self, cells: Sequence[CellPlan]) -> None: ...

    def done(self) -> set[TrialId]: ...

    def add(self, rows: Iterable[Any]) -> None: ...


def make_runner(spec: Spec, told: Any, means: Means) -> Any:
    """What runs trials of this campaign, in a worker: it loads torch."""
    if isinstance(spec, TrainingSpec):
        from unsilent.campaigns.trainings.runner import TrainingRunner

        return TrainingRunner(spec, told, means)
    from unsilent.campaigns.runner import TrialRunner

    return TrialRunner(spec, progress=told, means=means)
