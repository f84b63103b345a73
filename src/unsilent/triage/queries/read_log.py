"""Query for the first error that only one rank logged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from unsilent.report.text import count_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.history import past_end
from unsilent.triage.log_errors import LoggedError

USUAL = 2
"""A line that was logged in at least this many steps before the incident is a usual one."""


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find the first error that only one rank logged, or else one that several ranks logged.

    Errors that were repeatedly logged in earlier steps are left out.
    """
    logs, missing = bundle.logs()
    if not logs or (blanks.rank is not None and blanks.rank not in logs):
        which = "any rank" if blanks.rank is None else f"rank {blanks.rank}"
        text = f"no log of {which} can be read; unsilent triage collect adds those of a job"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    first = _unusual(bundle, logs, past_end(bundle, blanks))
    of_rank = [by_rank for by_rank in first if blanks.rank in (None, *by_rank)]
    count = count_text(len(logs), "log")
    if not of_rank:
        text = f"no line of {count} looks like an error that was not logged in several earlier steps as well"
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    alone = [
        by_rank for by_rank in of_rank if len(by_rank) == 1 and all(error.names_rank for error in by_rank.values())
    ]
    best = min(alone or of_rank, key=lambda by_rank: (len(by_rank), *_earliest_error(bundle, by_rank)))
    step, number, rank = _earliest_error(bundle, best)
    text = f"line {number:,} of the log of rank {rank}: {best[rank].text}"
    known = None if math.isinf(step) else int(step)
    if not alone:
        why = (
            f"{len(best)} of {count} have it"
            if len(best) > 1
            else "its cause may lie in another rank than the one that logged it"
        )
        ranks = tuple(best) if 1 < len(best) < len(logs) else ()
        return Finding(
            outcome=Outcome.DIFFERS, text=f"{text}; {why}", kind=FindingKind.LOGGED_ERROR, ranks=ranks, step=known,
            missing=missing,
        )  # fmt: skip
    at_once = {rank for by_rank in alone for rank in by_rank if _earliest_error(bundle, by_rank)[0] == step}
    return placed(
        text, sorted(at_once), "other ranks log errors of their own in this step", len(logs) > 1,
        kind=FindingKind.LOGGED_ERROR, step=known, missing=missing,
    )  # fmt: skip


def _unusual(bundle: Bundle, logs: Mapping[int, tuple[LoggedError, ...]], before: int) -> list[dict[int, LoggedError]]:
    """The first line of each rank for every unusual error; errors that are equal once masked are one."""
    first: dict[str, dict[int, LoggedError]] = {}
    for rank, errors in logs.items():
        places = {(error.masked, _step(bundle, error)) for error in errors}
        earlier = Counter(masked for masked, step in places if step < before)
        for error in errors:
            if earlier[error.masked] < USUAL:
                first.setdefault(error.masked, {}).setdefault(rank, error)
    return [*first.values()]


def _earliest_error(bundle: Bundle, by_rank: Mapping[int, LoggedError]) -> tuple[float, int, int]:
    """Step, line number and rank of the earliest of some errors."""
    return min((_step(bundle, error), error.number, rank) for rank, error in by_rank.items())


def _step(bundle: Bundle, error: LoggedError) -> float:
    """Step of the run at which an error was logged, or infinity if unknown.

    Step numbers that count from the start of the training are converted.
    """
    if error.step is None:
        return math.inf
    first = bundle.incident.first_step
    return error.step - first if error.step >= first else error.step
