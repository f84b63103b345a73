"""Runs trials whose row says how they ended, also where user code raised an error or the worker was lost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

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
        empty_values: What fields of a row without a result hold, where that is not what their types say.
    """

    row_type: Any
    empty_values: ClassVar[Mapping[str, str]] = {}

    def run_trial(self, trial: TrialId, rng: np.random.Generator) -> R:
        """One trial; what user code raises in it is its outcome."""
        begun = time.perf_counter()
        try:
            with user_code(self.spec.workload):
                row = self.try_trial(trial, rng)
        except (UserCodeError, InternalError) as error:
            row = self._row(trial, "raised", error=_error_text(first_line(error)))
        timed: R = replace(cast("Any", row), seconds=time.perf_counter() - begun)
        return timed

    def try_trial(self, trial: TrialId, rng: np.random.Generator) -> R:
        """The row of one trial, without its time; what user code raises goes through."""
        raise NotImplementedError(f"{type(self).__name__} has no try_trial")

    def lost_trial_row(self, trial: TrialId, ended: Outcome, seconds: float, reason: str) -> R:
        """The row of a trial that took its worker with it."""
        return self._row(trial, ended.name.lower(), error=_error_text(reason), seconds=seconds)

    def _row(self, trial: TrialId, end: str, **known: Any) -> R:
        """A row of which no more than this is known."""
        row: R = self.row_type.without_result(trial, end=end, **{**self.empty_values, **known})
        return row


def _error_text(text: str) -> str:
    """The part of an error that a row keeps."""
    return escape_unprintable(text)[:500]
