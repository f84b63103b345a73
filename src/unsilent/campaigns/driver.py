"""Plans a campaign, runs what is missing and stores what happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer, Silent
from unsilent.campaigns.spec import Baseline, Json, Spec, TrialId
from unsilent.campaigns.store import Store
from unsilent.errors import UsageError

ROUND = "round"
"""The name of records of what a planner decided."""
AnyStore = Store[Any, Any, Any]


class Planner(Protocol):
    """Decides, from completed rounds alone, what a campaign runs next."""

    def trials(self, store: Any) -> Iterable[TrialId]:
        """All trials that the rounds so far ask for."""
        ...

    def decide(self, store: Any) -> list[Json]:
        """The next round, to be stored; empty when the campaign has come to its end."""
        ...


@dataclass(frozen=True)
class Budget:
    """How much may be spent; raising it extends a campaign. ``trials`` is per stratum (target and number of flips)."""

    trials: int = 1000
    shard: tuple[int, int] = (1, 1)
    """Part I of N: of every stratum the trials I-1, I-1+N, I-1+2N …, so that each part is a fair sample of the whole."""

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UsageError(f"--trials is {self.trials}; expected 1 or more")
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise UsageError(f"--shard is {part}/{parts}; expected I/N with I from 1 to N, like 2/4")
        if part > self.trials:
            raise UsageError(f"--shard {part}/{parts} of --trials {self.trials} is empty; ask for fewer parts")


def plan(spec: Spec, description: Baseline, budget: Budget) -> Iterator[TrialId]:
    """All trials, one of every stratum after the other, so that a campaign cut short is even over its strata."""
    part, parts = budget.shard
    ends = [
        (t.name, flips, t.slots if spec.enumerated else budget.trials)
        for t in description.targets
        for flips in spec.flips
    ]
    for k in range(part - 1, max(end for *_, end in ends), parts):
        for target, flips, end in ends:
            if k < end:
                yield TrialId(target, flips, k)


def run_campaign(
    spec: Spec,
    budget: Budget,
    executor: Executor,
    store: AnyStore,
    *,
    planner: Planner | None = None,
    observer: Observer | None = None,
    command: str = "",
) -> None:
    """Bind the store to the campaign and run every planned trial it does not hold yet.

    With a ``planner`` that is, round for round, what it decides from the complete rounds before; else ``budget`` says all.

    Rows are committed as soon as a proof covers them. The time since the executor was made, its set-up included, is added to
    the store's where rows were: asking again for what is there already costs nothing that a report should tell.
    """
    watcher = observer or Silent()
    description = executor.describe()
    store.bind(spec, description)
    if planner is None:
        if store.records(ROUND):
            raise UsageError(
                "this store holds a campaign that was run until it was precise, whose looks say which trials count; go on with "
                "--ci or --rel, or give another --store"
            )
        store.note_budget(budget.trials, command)
    if planner is None:
        run_trials(plan(spec, description, budget), executor, store, watcher)
        return
    noted = False
    while True:
        run_trials(planner.trials(store), executor, store, watcher)
        decided = planner.decide(store)
        if not decided:
            return
        if not noted:  # a command that decides nothing does not make these trials
            store.note_budget(budget.trials, command)
            noted = True
        store.add_record(ROUND, decided)


def run_trials(trials: Iterable[TrialId], executor: Executor, store: AnyStore, observer: Observer | None = None) -> int:
    """Run and store the trials that are not there yet, in a store that is bound already; how many those were."""
    watcher = observer or Silent()
    done = store.done()
    wanted = list(trials)
    if not wanted:
        return 0
    todo = [t for t in wanted if t not in done]
    watcher.planned(len(wanted) - len(todo), len(wanted))
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
    return stored
