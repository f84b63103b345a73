"""Plans a campaign, runs what is missing and stores what happened."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from unsilent.campaigns.executors import Executor
from unsilent.campaigns.kinds import Found, Spec, TrialFile
from unsilent.campaigns.observer import Observer, Silent
from unsilent.campaigns.rounds import Planner, current, trials_of
from unsilent.campaigns.spec import Description, TrialId
from unsilent.campaigns.store import Store
from unsilent.errors import UsageError
from unsilent.sizes import lasting

MOST_EXHAUSTIVE = 20_000_000
"""Trials of an exhaustive campaign at most: a store of some ten gigabytes."""
PROBES = 16
"""Trials of each target that its time is estimated from."""


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


def plan(spec: Spec, description: Found, budget: Budget) -> Iterator[TrialId]:
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
    store: TrialFile,
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
        if any(store.rounds()):
            raise UsageError(
                "this store holds a campaign that was run until it was precise, whose looks say which trials count; go on with "
                "--ci or --rel, or give another --store"
            )
        store.note_budget(budget.trials, command)
    if spec.enumerated:
        _probe(spec, description, budget, executor, store, watcher)
    if planner is None:
        run_trials(plan(spec, description, budget), executor, store, watcher)
        return
    noted = False
    while True:
        run_trials(trials_of(current(store.rounds()).values()), executor, store, watcher)
        decided = planner.decide(cast(Description, description), cast(Store, store))  # planners are for these alone
        if not decided:
            return
        if not noted:  # a command that decides nothing does not make these trials
            store.note_budget(budget.trials, command)
            noted = True
        store.add_round(decided)


def _probe(
    spec: Spec, description: Found, budget: Budget, executor: Executor, store: TrialFile, watcher: Observer
) -> None:
    """Say how long all faults will take, from a few trials of each target; refuse what is more than can be stored."""
    total = sum(t.slots for t in description.targets)
    if total > MOST_EXHAUSTIVE:
        plain = total * description.golden_seconds
        raise UsageError(
            f"--exhaustive would run {total:,} trials (at most {lasting(plain)} of CPU time), {MOST_EXHAUSTIVE:,} is the most; "
            "narrow it with --at or --fault bitflip:bits=30, or sample: --rel 20%"
        )
    begun = time.perf_counter()
    part, parts = budget.shard
    first = [
        TrialId(t.name, spec.flips[0], k) for t in description.targets for k in range(part - 1, t.slots, parts)[:PROBES]
    ]
    new = run_trials(first, executor, store, watcher)
    if new:
        each = (time.perf_counter() - begun) / new
        left = total // parts - len(first)
        watcher.say(
            f"{total:,} faults: about {lasting(max(0, left) * each)} more, at {1e3 * each:.2g} ms each ({new} tried)"
        )


def run_trials(
    trials: Iterable[TrialId], executor: Executor, store: TrialFile, observer: Observer | None = None
) -> int:
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
