"""Plans a campaign, runs what is missing and stores what happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer, Silent
from unsilent.campaigns.spec import CampaignSpec, Description, TrialId
from unsilent.campaigns.store import Store
from unsilent.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """How much may be spent; raising it extends a campaign. ``trials`` is per stratum (target and number of flips)."""

    trials: int = 1000

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UsageError(f"--trials is {self.trials}; expected 1 or more")


def plan(spec: CampaignSpec, description: Description, budget: Budget) -> Iterator[TrialId]:
    """All trials, one of every stratum after the other, so that a campaign cut short is even over its strata."""
    for k in range(budget.trials):
        for target in description.targets:
            for flips in spec.flips:
                yield TrialId(target.name, flips, k)


def run_campaign(
    spec: CampaignSpec,
    budget: Budget,
    executor: Executor,
    store: Store,
    *,
    observer: Observer | None = None,
    command: str = "",
) -> None:
    """Bind the store to the campaign and run every planned trial it does not hold yet.

    Rows are committed as soon as a proof covers them. The time since the executor was made, its set-up included, is added to
    the store's where rows were: asking again for what is there already costs nothing that a report should tell.
    """
    watcher = observer or Silent()
    description = executor.describe()
    store.bind(spec, description)
    store.note_budget(budget.trials, command)
    done = store.done()
    todo = (t for t in plan(spec, description, budget) if t not in done)
    total = budget.trials * len(description.targets) * len(spec.flips)
    watcher.planned(sum(t.k < budget.trials for t in done), total)
    stored = 0
    try:
        for rows in executor.run(todo):
            if rows:
                store.add(rows)
                stored += len(rows)
    except KeyboardInterrupt:
        rows = executor.salvage()
        store.add(rows)
        stored += len(rows)
        raise
    finally:
        if stored:
            store.note_usage(*executor.spent())
