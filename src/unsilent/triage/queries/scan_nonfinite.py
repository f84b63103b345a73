"""Where the first value that is not finite was read."""

from __future__ import annotations

import numpy as np

from unsilent.report.text import count_text, listed
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.history import window


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """The first step with such a value, in series of all ranks or of one."""
    series, missing = bundle.series(blanks.rank)
    first, last = window(bundle, blanks)
    nonfinite: dict[int, dict[int, list[str]]] = {}
    read = 0
    for rank, rank_series in series.items():
        rows = (rank_series.steps >= first) & (rank_series.steps <= last)
        read += int(rank_series.seen[rows].sum())
        for row, column in np.argwhere(rank_series.seen & ~np.isfinite(rank_series.values) & rows[:, None]).tolist():
            nonfinite.setdefault(int(rank_series.steps[row]), {}).setdefault(rank, []).append(
                " ".join(filter(None, rank_series.names[column]))
            )
    if not read:
        text = f"no series has a value in steps {first} to {last}"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    if not nonfinite:
        text = (
            f"in steps {first} to {last}, all {read:,} values of series of {count_text(len(series), 'rank')} are finite"
        )
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    step = min(nonfinite)
    ranks = sorted(nonfinite[step])
    names = nonfinite[step][ranks[0]]
    text = f"the first values that are not finite are {listed(names, 3)}"
    return placed(
        text, ranks, "several ranks have them in this step", len(series) > 1, kind=FindingKind.NONFINITE,
        tensor=names[0], step=step, numbers={"series": len(names)}, missing=missing,
    )  # fmt: skip
