"""Runs trials whose row says how they ended, also where user code raised an error or the worker was lost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from unsilent.basics.errors import InternalError, UserCodeError, first_line
from unsilent.basics.printable import escape_unprintable
from unsilent.basics.user_code import user_code
from unsilent.campaigns.runner import Runner
from unsilent.campaigns.spec import B, R, S, TrialId
from unsilent.outcomes.base import Outcome


class TrialRunner(Runner[S, B, R]):
    """A base of runners of trials that may raise.

    Attributes:
        row_type: The class of rows, which have fields ``end`` and ``error``.
    """

    row_type: Any

    def run_trial(self, trial: TrialId, rng: np.random.Generator) -> R:
        """One trial; what user code raises in it is its outcome."""
        begun = time.perf_counter()
        try:
            with user_code(self.spec.workload):
                row: Any = self.try_trial(trial, rng)
        except (UserCodeError, InternalError) as error:
            row = self._ended_row(trial, "raised", first_line(error))
        timed: R = replace(row, seconds=time.perf_counter() - begun)
        return timed

    def try_trial(self, trial: TrialId, rng: np.random.Generator) -> R:
        """The row of one trial, without its time; what user code raises goes through."""
        raise NotImplementedError(f"{type(self).__name__} has no try_trial")

    def lost_trial_row(self, trial: TrialId, ended: Outcome, seconds: float, reason: str) -> R:
        """The row of a trial that took its worker with it."""
        row: R = replace(self._ended_row(trial, ended.name.lower(), reason), seconds=seconds)
        return row

    def _ended_row(self, trial: TrialId, end: str, error: str) -> Any:
        return self.row_type.without_result(trial, end=end, error=escape_unprintable(error)[:500])
