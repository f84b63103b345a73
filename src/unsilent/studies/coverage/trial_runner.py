"""A base class of runners whose trials may raise errors or lose their worker."""

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
    """A base class of runners whose trials may raise errors.

    Attributes:
        row_type: Class of the rows, which must have the fields ``end`` and ``error``.
        empty_values: Values of fields in a row without a result, if they are not the empty values of their types.
    """

    row_type: Any
    empty_values: ClassVar[Mapping[str, str]] = {}

    def run_trial(self, trial: TrialId, rng: np.random.Generator) -> R:
        """Run one trial; an error in user code becomes its outcome."""
        begun = time.perf_counter()
        try:
            with user_code(self.spec.workload):
                row = self.try_trial(trial, rng)
        except (UserCodeError, InternalError) as error:
            row = self._row(trial, "raised", error=_error_text(first_line(error)))
        timed: R = replace(cast("Any", row), seconds=time.perf_counter() - begun)
        return timed

    def try_trial(self, trial: TrialId, rng: np.random.Generator) -> R:
        """Run one trial without measuring its time; an error in user code is not caught."""
        raise NotImplementedError(f"{type(self).__name__} has no try_trial")

    def lost_trial_row(self, trial: TrialId, ended: Outcome, seconds: float, reason: str) -> R:
        """The row of a trial during which the worker process was lost."""
        return self._row(trial, ended.name.lower(), error=_error_text(reason), seconds=seconds)

    def _row(self, trial: TrialId, end: str, **known: Any) -> R:
        """A row with the given fields; all other fields are empty."""
        row: R = self.row_type.without_result(trial, end=end, **{**self.empty_values, **known})
        return row


def _error_text(text: str) -> str:
    """The text of an error, shortened for a row."""
    return escape_unprintable(text)[:500]
