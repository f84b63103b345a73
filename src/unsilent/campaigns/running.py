"""Checks of a runner in the process that runs trials: one row for each trial, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.campaigns.spec import Runner, TrialId


def run_trials_in_order(runner: Runner, trials: Sequence[TrialId], alone: bool = False) -> Iterator[Any]:
    """The rows of some trials; raises ``UsageError`` where a runner returns other rows than those."""
    waiting = list(trials)
    for row in runner.run_all(trials, alone):
        yield check_row_of_trial(runner, row, waiting.pop(0) if waiting else None)
    if waiting:
        raise UsageError(f"{_name(runner)} returned no row for trial {waiting[0]}; {_EXPECTED}")


def check_row_of_trial(runner: Runner, row: Any, trial: TrialId | None) -> Any:
    """The row; raises ``UsageError`` unless it is that of this trial."""
    found = getattr(row, "trial", None)
    if trial is None or found != trial:
        what = f"a {type(row).__name__}" if found is None else f"a row of trial {found}"
        wanted = "after those of all its trials" if trial is None else f"where that of trial {trial} was due"
        raise UsageError(f"{_name(runner)} returned {what} {wanted}; {_EXPECTED}")
    return row


_EXPECTED = "expected one row for each trial, in the order of the trials: change the runner"


def _name(runner: Runner) -> str:
    return f"the runner {type(runner).__name__}"
