"""Plan a campaign, run the missing trials and store their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from unsilent.basics.errors import UsageError
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import Budget
from unsilent.campaigns.spec import Baseline, Json, Spec, TrialId, strata_of

if TYPE_CHECKING:
    from unsilent.campaigns.executors import Executor
    from unsilent.campaigns.store import AnyStore

ROUND = "round"
"""Name of the records of a planner's decisions."""
MOST_PLANNED = 20_000_000
"""Most trials of one command, which give a store of some ten gigabytes."""


class Planner(Protocol):
    """Decides, from completed rounds alone, which trials a campaign runs next."""

    def requested_trials(self, store: Any) -> Iterable[TrialId]:
        """All trials that the rounds so far request."""

    def decide_next_round(self, store: Any) -> list[Json]:
        """The next round, as JSON to be stored; empty if the campaign is complete."""

    def describe_round(self, store: Any) -> str:
        """A sentence on the purpose of the round that was decided last."""


def check_strata(spec: Spec, baseline: Baseline) -> None:
    """Raise ``UsageError`` if two strata have the same name and number of flips."""
    for noun, names in (("flips", spec.flips), ("targets", [target.name for target in baseline.targets])):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise UsageError(
                f"the {noun} of this campaign contain {twice[0]} more than once; expected each of them once"
            )


def plan_trials(spec: Spec, baseline: Baseline, budget: Budget) -> Iterator[TrialId]:
    """All trials, alternating between strata, so that an interrupted campaign covers all of them evenly."""
    strata = trial_numbers_by_stratum(spec, baseline, budget)
    return (
        TrialId(target, flips, k)
        for k in max(strata.values(), key=len, default=range(0))
        for (target, flips), numbers in strata.items()
        if k < numbers.stop
    )


def trial_numbers_by_stratum(spec: Spec, baseline: Baseline, budget: Budget) -> dict[tuple[str, int | None], range]:
    """The trial numbers planned for every stratum (target and number of flips).

    Raises ``UsageError`` if there are more than one store should hold.
    """
    strata = {
        (target.name, flips): budget.trial_numbers(target.slots if spec.is_enumerated else None)
        for target, flips in strata_of(spec, baseline)
    }
    total = sum(map(len, strata.values()))
    if total > MOST_PLANNED:
        raise UsageError(
            f"{total:,} trials are asked for, of all targets together, but a store should hold at most {MOST_PLANNED:,}; "
            "lower --trials, choose fewer targets, or split the campaign with --shard"
        )
    return strata


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
    """Bind the store to the campaign, then run and store every planned trial that it lacks.

    A ``planner`` plans the trials round by round, from the complete earlier rounds; without one, ``budget`` determines all
    trials.

    Rows are committed as soon as a proof covers them. If there were any, the time since the executor was created, including its
    set-up, is added to the time in the store. A repeated command that adds no rows adds no time.
    """
    watcher = observer or Observer()
    description = executor.establish_baseline()
    check_strata(spec, description)
    store.bind_campaign(spec, description)
    if planner is None:
        if store.records(ROUND):
            raise UsageError(
                "the campaign in this store was planned with --ci or --rel, so a number of trials alone cannot continue it; "
                "add --ci or --rel, or give another --store"
            )
        planned = plan_trials(spec, description, budget)
        store.record_budget(budget.trials, command)
        run_trials(planned, executor, store, watcher)
        return
    noted = False
    while True:
        run_trials(planner.requested_trials(store), executor, store, watcher)
        decided = planner.decide_next_round(store)
        if not decided:
            return
        if not noted:  # a command without a decision does not create these trials
            store.record_budget(budget.trials, command)
            noted = True
        store.add_record(ROUND, decided)
        watcher.say(planner.describe_round(store))


def run_trials(trials: Iterable[TrialId], executor: Executor, store: AnyStore, observer: Observer | None = None) -> int:
    """Run and store the trials that a bound store lacks, and return how many were stored."""
    watcher = observer or Observer()
    done = store.stored_trial_ids()
    wanted = list(trials)
    if not wanted:
        return 0
    todo = [t for t in wanted if t not in done]
    watcher.planned(len(wanted) - len(todo), len(wanted))
    stored = 0
    try:
        for rows in executor.run(todo):
            if rows:
                store.add_rows(rows)
                stored += len(rows)
    except KeyboardInterrupt:
        rows = executor.salvage()
        store.add_rows(rows)
        stored += len(rows)
        raise
    finally:
        if stored:
            store.add_session_seconds(*executor.seconds_since_last_call())
    return stored
