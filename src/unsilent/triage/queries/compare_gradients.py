"""Whether one rank's gradients are unlike those of the others, and unlike its own past."""

from __future__ import annotations

from unsilent.detectors.series import GRADIENT
from unsilent.report.text import count_text, number_text
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.history import FAR, past_end, past_scores, peer_scores, window


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """The first step in which gradients of a rank are far from those of the other ranks."""
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
                "is not finite there alone"
                if score == float("inf")
                else f"is {number_text(score)} deviations from the others"
            )
            return placed(
                f"{name} {size}, and far from its own past", sorted(far_by_rank), "several ranks differ from each other",
                kind=FindingKind.GRADIENT, tensor=name, step=step, numbers={"score": score}, missing=missing,
            )  # fmt: skip
    text = f"in steps {first} to {last}, no gradient of {count_text(len(series), 'rank')} is far from the others and its own past"
    return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
