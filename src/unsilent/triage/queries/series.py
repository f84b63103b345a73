"""Queries on recorded series: values that are not finite or unusual, and differing gradients."""

from __future__ import annotations

import numpy as np

from unsilent.detectors.series import GRADIENT
from unsilent.report.text import count_text, listed, number_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.history import FAR, past_end, past_scores, peer_scores, window


def scan_nonfinite(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find the first step with a value that is not finite, in the series of all ranks or of one."""
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


def find_onset(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find the first step in which a series is far from its earlier values.

    The finding is only a place to look at, and never counts as localised.
    """
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
        text = f"in steps {first} to {last}, none of {read} is far from the earlier values of its series"
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    step = min(far_by_step)
    score, name = max(far_by_step[step].values())
    far = "is not finite" if np.isinf(score) else f"is {number_text(score)} typical deviations from its earlier values"
    ranks = sorted(far_by_step[step])
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return Finding(
        outcome=Outcome.DIFFERS, text=f"{name} {far}, first in {where}: a place to look at; earlier values alone prove no fault",
        kind=FindingKind.ONSET, ranks=tuple(ranks), tensor=name, step=step, numbers={"score": score}, missing=missing,
    )  # fmt: skip


def compare_gradients(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find the first step in which gradients of a rank are far from those of the other ranks."""
    series, missing = bundle.series()
    if len(series) < 2:
        text = f"gradients of ranks are compared, and series of {count_text(len(series), 'rank')} can be read"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    before, (first, last) = past_end(bundle, blanks), window(bundle, blanks)
    steps, names, of_peers = peer_scores(series, before)
    columns = [n for n, name in enumerate(names) if name[0] == GRADIENT and blanks.tensor in (None, name[1])]
    in_window = (steps >= first) & (steps <= last)
    if not columns or not any((scores[in_window][:, columns] >= 0).any() for scores in of_peers.values()):
        text = "no gradient has enough earlier values in all ranks to say how far they usually are from each other"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    scores_by_step = {
        rank: dict(zip(rank_series.steps.tolist(), past_scores(rank_series, before), strict=True))
        for rank, rank_series in series.items()
    }
    for row in in_window.nonzero()[0].tolist():
        step = int(steps[row])
        far_by_rank: dict[int, tuple[float, str]] = {}
        for rank, scores in of_peers.items():
            # A rank that always differs, by its data, is far from the others and not from its own past.
            places = {name: place for place, name in enumerate(series[rank].names)}
            far = [
                (float(scores[row, n]), " ".join(names[n]))
                for n in columns
                if scores[row, n] >= FAR and scores_by_step[rank][step][places[names[n]]] >= FAR
            ]
            if far:
                far_by_rank[rank] = max(far)
        if far_by_rank:
            score, name = max(far_by_rank.values())
            size = (
                "is not finite, on no other rank"
                if score == float("inf")
                else f"is {number_text(score)} typical deviations from the other ranks"
            )
            return placed(
                f"{name} {size}, and far from its own earlier values", sorted(far_by_rank),
                "several ranks differ from each other",
                kind=FindingKind.GRADIENT, tensor=name, step=step, numbers={"score": score}, missing=missing,
            )  # fmt: skip
    text = (
        f"in steps {first} to {last}, no gradient of {count_text(len(series), 'rank')} is far both from the other ranks and from "
        "its own earlier values"
    )
    return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
