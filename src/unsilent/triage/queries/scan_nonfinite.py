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
    found: dict[int, dict[int, list[str]]] = {}
    read = 0
    for rank, one in series.items():
        rows = (one.steps >= first) & (one.steps <= last)
        read += int(one.seen[rows].sum())
        for row, column in np.argwhere(one.seen & ~np.isfinite(one.values) & rows[:, None]).tolist():
            found.setdefault(int(one.steps[row]), {}).setdefault(rank, []).append(
                " ".join(filter(None, one.names[column]))
            )
    if not read:
        text = f"no series has a value in steps {first} to {last}"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    if not found:
        text = (
            f"in steps {first} to {last}, all {read:,} values of series of {count_text(len(series), 'rank')} are finite"
        )
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    step = min(found)
    ranks = sorted(found[step])
    names = found[step][ranks[0]]
    text = f"the first values that are not finite are {listed(names, 3)}"
    return placed(
        text, ranks, "several ranks have them in this step", len(series) > 1, kind=FindingKind.NONFINITE,
        tensor=names[0], step=step, numbers={"series": len(names)}, missing=missing,
    )  # fmt: skip
