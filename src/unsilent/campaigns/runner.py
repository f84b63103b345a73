"""The base class of runners, which run the trials of a campaign in a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.lazy_numpy import np
from unsilent.campaigns.spec import B, DeferredTrial, R, S, Spec, TrialId, WorkerSettings, trial_seed

if TYPE_CHECKING:
    from unsilent.workloads.model_fitting import Progress

MakeRunner = Callable[..., "Runner[Any, Any, Any]"]
"""Function that makes a runner from the spec, ``progress`` and ``worker_settings``. Workers import it by its name."""


@dataclass(frozen=True)
class WorkerJob:
    """The job of an executor's workers.

    ``deadline`` is the maximum time of a trial in seconds; ``None``: derived from the golden run.
    """

    make_runner: MakeRunner
    spec: Spec
    deadline: float | None = None
    worker_settings: WorkerSettings = field(default_factory=WorkerSettings)


class Runner(Generic[S, B, R]):
    """A base class that runs trials of one campaign in this process.

    A study defines `make_baseline` and `run_trial`. If the replay of its kind needs more than a row, the study also defines a
    method ``answer(what, *arguments)``, which returns it.

    Args:
        spec: The campaign.
        progress: Called with the progress of loading: a description, the completed amount, and the total.
        worker_settings: Limits on the cost of trials.

    Attributes:
        max_trials_together: Most trials that are run together.
        unverified_row_count: Number of rows that no proof covers yet.
        workload: The loaded workload, which has a ``name``; ``None`` if there is none.
    """

    max_trials_together: int = 1
    unverified_row_count: int = 0
    workload: Any = None

    def __init__(
        self, spec: S, progress: Progress | None = None, worker_settings: WorkerSettings | None = None
    ) -> None:
        self.spec = spec

    def close(self) -> None:
        """Restore everything that the runner changed in this process."""

    @property
    def workload_name(self) -> str:
        """The name of the workload, used in messages."""
        return self.spec.workload if self.workload is None else str(self.workload.name)

    @cached_property
    def baseline(self) -> B:
        """The baseline, computed at the first access.

        Every worker of a campaign must find the same one.
        """
        return self.make_baseline()

    def make_baseline(self) -> B:
        """Compute the baseline; called once."""
        raise NotImplementedError(f"{type(self).__name__} has no make_baseline")

    def establish_baseline(self) -> B:
        """The baseline, computed at the first call."""
        return self.baseline

    def run_trial(self, trial: TrialId, rng: np.random.Generator) -> R:
        """Run a trial and return its row.

        All randomness comes from ``rng``, so the row is the same anywhere and in any order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run_trial")

    def run_all(self, trials: Sequence[TrialId], alone: bool = False) -> Iterator[R | DeferredTrial]:
        """Run trials and yield a row for each of them, in their order.

        Args:
            alone: Whether nothing else of the campaign runs meanwhile. Otherwise a result may be a `DeferredTrial`, whose trial
                is run again alone.
        """
        for trial in trials:
            seed = trial_seed(self.baseline.campaign, self.spec.seed, trial)
            yield self.run_trial(trial, np.random.default_rng(seed))

    def run(self, trial: TrialId) -> R:
        """Run one trial alone and return its row."""
        (row,) = self.run_all([trial], alone=True)
        assert not isinstance(row, DeferredTrial)
        return row

    def lost_trial_row(self, trial: TrialId, outcome: Any, seconds: float, reason: str) -> R:
        """The row of a trial that ended its process.

        Raises ``UnsilentError`` if a lost process is not an outcome in this study.
        """
        raise UnsilentError(
            f"the process of trial {trial} was lost ({reason}), which is no outcome of this study; stored results are safe: "
            "find out what ends the process and run the same command again"
        )

    def verify_restored_state(self) -> None:
        """Raise an error if trials changed state that later trials use.

        Rows are stored only after this check.
        """


def run_trials_in_order(runner: Runner[Any, Any, Any], trials: Sequence[TrialId], alone: bool = False) -> Iterator[Any]:
    """The rows of some trials; raises ``UsageError`` if the runner returns rows of other trials."""
    waiting = list(trials)
    for row in runner.run_all(trials, alone):
        yield check_row_of_trial(runner, row, waiting.pop(0) if waiting else None)
    if waiting:
        raise UsageError(f"{_name(runner)} returned no row for trial {waiting[0]}; {_EXPECTED}")


def check_row_of_trial(runner: Runner[Any, Any, Any], row: Any, trial: TrialId | None) -> Any:
    """The row itself; raises ``UsageError`` if it is the row of another trial."""
    row_trial = getattr(row, "trial", None)
    if trial is None or row_trial != trial:
        what = f"a {type(row).__name__}" if row_trial is None else f"a row of trial {row_trial}"
        wanted = "after those of all its trials" if trial is None else f"where that of trial {trial} was due"
        raise UsageError(f"{_name(runner)} returned {what} {wanted}; {_EXPECTED}")
    return row


_EXPECTED = "expected one row for each trial, in the order of the trials: change the runner"


def _name(runner: Runner[Any, Any, Any]) -> str:
    return f"the runner {type(runner).__name__}"
