"""One run of a campaign of any kind, from its options to its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.options import Request
from unsilent.campaigns.options import store_or_temporary
from unsilent.campaigns.spec import Spec

if TYPE_CHECKING:
    from unsilent.campaigns.driver import Planner
    from unsilent.campaigns.executors import Executor
    from unsilent.campaigns.expected_end import ExpectedEnd
    from unsilent.campaigns.kinds import Kind
    from unsilent.campaigns.observer import Observer

TrialNumbers = Mapping[tuple[str, int | None], range]
"""Numbers of trials by stratum: target, and number of flips."""


def open_executor_of_options(run: CampaignRun, observer: Observer | None) -> AbstractContextManager[Executor]:
    """The executor of a campaign, created from the campaign's options."""
    executor: AbstractContextManager[Executor] = run.request[run.kind.execution_options].open_executor(
        run.kind.runner, run.spec, observer
    )
    return executor


@dataclass(frozen=True)
class CampaignRun:
    """A campaign that is about to run: its options, its open store, and hooks of the caller.

    Attributes:
        spec: Settings of the campaign, from the given options.
        store: Open for writing.
        command: The command line or call that repeats the campaign.
        observe: Opens the observer of progress; its argument is the noun for the counted items.
        make_executor: Opens the executor of the trials.
        floor_file: Opens the file that keeps fault-free runs, given the requested path and their spec.
    """

    kind: Kind[Any, Any, Any]
    request: Request
    spec: Any
    store: Any
    command: str = ""
    observe: Callable[[str], AbstractContextManager[Any]] = lambda noun: nullcontext()
    make_executor: Callable[[CampaignRun, Any], AbstractContextManager[Any]] = open_executor_of_options
    floor_file: Callable[[Path | None, Spec], AbstractContextManager[Path]] = lambda path, spec: store_or_temporary(
        path, "floor.sqlite"
    )

    @contextmanager
    def open_executor(self) -> Iterator[tuple[Executor, Observer | None]]:
        """The executor, and the observer that is notified of trials, inside a ``with`` block."""
        with self.observe("trial") as observer, self.make_executor(self, observer) as executor:
            yield executor, observer

    def run_planned_trials(self, executor: Executor, observer: Observer | None, planner: Planner | None = None) -> None:
        """Run the trials that are within the budget and not yet in the store."""
        from unsilent.campaigns.driver import run_campaign

        budget = self.kind.resolve_budget(self.request)
        run_campaign(self.spec, budget, executor, self.store, planner=planner, observer=observer, command=self.command)

    def analyse(self) -> Any:
        """The result that is computed from the store, with the campaign's analysis options."""
        return self.store.analyse(**vars(self.request[self.kind.analysis_options]))


def run_and_analyse(run: CampaignRun) -> Any:
    """Run the missing trials and analyse the store: the default run of a kind."""
    with run.open_executor() as (executor, observer):
        run.run_planned_trials(executor, observer)
    return run.analyse()


def planned_trial_numbers(run: CampaignRun, baseline: Any) -> TrialNumbers:
    """The trial numbers that the budget gives for each stratum."""
    from unsilent.campaigns.driver import trial_numbers_by_stratum

    return trial_numbers_by_stratum(run.spec, baseline, run.kind.resolve_budget(run.request))


@dataclass(frozen=True)
class DryRun:
    """Functions of a kind that describe a campaign before any trial runs.

    The `CampaignRun` that they get has no store.

    Attributes:
        trial_numbers: Function that returns the trials of the campaign.
        fault_free_seconds: Function from the baseline to the seconds of a fault-free run.
        notes: Function that returns further sentences. It also gets the path of the store, which may not exist yet.
        has_open_number: Whether the campaign itself decides how many trials it runs, up to ``trial_numbers``.
        expected_end: For such campaigns, function that returns the end expected from the trials in the store at a path, for the
            given executor; ``None`` if they do not show it yet.
    """

    trial_numbers: Callable[[CampaignRun, Any], TrialNumbers] = planned_trial_numbers
    fault_free_seconds: Callable[[Any], float] = lambda baseline: float(baseline.golden_seconds)
    notes: Callable[[CampaignRun, Any, Path], Iterable[str]] = lambda run, baseline, path: ()
    has_open_number: Callable[[Request], bool] = lambda request: False
    expected_end: Callable[[CampaignRun, Path, Executor], ExpectedEnd | None] = lambda run, path, executor: None
