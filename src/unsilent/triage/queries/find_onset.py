"""Query for the series of a rank that left its own past first."""

from __future__ import annotations

import numpy as np

from unsilent.report.text import count_text, number_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome
from unsilent.triage.history import FAR, past_end, past_scores, window


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """The first step in which a series is far from its values before. That is a place to look at, and localises nothing."""
    series, missing = bundle.series(blanks.rank)
    (first, last), before = window(bundle, blanks), past_end(bundle, blanks)
    judged = 0
    far_by_step: dict[int, dict[int, tuple[float, str]]] = {}
    for rank, rank_series in series.items():
        scores = past_scores(rank_series, before)
        scores = np.where(((rank_series.steps >= first) & (rank_series.steps <= last))[:, None], scores, np.nan)
        judged += int((scores >= 0).sum())
        for row in np.flatnonzero((scores >= FAR).any(1))[:1].tolist():
            column = int(np.nanargmax(scores[row]))
            name = " ".join(filter(None, rank_series.names[column]))
            far_by_step.setdefault(int(rank_series.steps[row]), {})[rank] = (float(scores[row, column]), name)
    if not judged:
        text = f"no series has enough values before step {before} to judge one in steps {first} to {last}"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    if not far_by_step:
        read = f"{judged:,} values of {count_text(len(series), 'rank')}"
        text = f"in steps {first} to {last}, none of {read} is far from those before"
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    step = min(far_by_step)
    score, name = max(far_by_step[step].values())
    far = "is not finite" if np.isinf(score) else f"is {number_text(score)} deviations from its past"
    ranks = sorted(far_by_step[step])
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return Finding(
        outcome=Outcome.DIFFERS, text=f"{name} {far}, in {where} first: a place to look at, for a past alone names no fault",
        kind=FindingKind.ONSET, ranks=tuple(ranks), tensor=name, step=step, numbers={"score": score}, missing=missing,
    )  # fmt: skip
