"""Shows in a report how much accuracy, or how much of the workload's own score, a fault costs."""

from __future__ import annotations

from collections.abc import Iterator

from unsilent.outcomes.base import LOG_LIKELIHOOD
from unsilent.report.estimates import NO_ESTIMATE_KEY
from unsilent.report.model import TextCell
from unsilent.report.text import EstimateText, estimate_text, number_text, ratio_text, signed
from unsilent.studies.pvf.records import LostScore, PvfResult, PvfRow

PERPLEXITY_RATIO = "perplexity ratio"


def lost_columns(result: PvfResult) -> tuple[str, ...]:
    """The names of the columns that `lost_cells` fills; empty if there is no task metric."""
    if not result.score_name:
        return ()
    ratio = (PERPLEXITY_RATIO,) if result.score_name == LOG_LIKELIHOOD else ()
    return (f"{result.score_name} lost", *ratio)


def lost_cells(result: PvfResult, row: PvfRow) -> tuple[TextCell, ...]:
    """The cells of a row for the lost task metric."""
    if row.score_lost is None:
        return ()
    return tuple(_cell(text, lost) for text, lost in _score_texts(result, row.score_lost))


def _cell(text: EstimateText, lost: LostScore) -> TextCell:
    shown = f"{text.estimate} {text.limits}" if lost.estimate else text.estimate
    return TextCell(shown, NO_ESTIMATE_KEY if lost.estimate is None else lost.estimate)


def _score_texts(result: PvfResult, lost: LostScore) -> Iterator[tuple[EstimateText, LostScore]]:
    if result.golden_score is None:
        yield estimate_text(lost), lost
        return
    yield signed(lost, scale=1.0), lost
    if result.score_name == LOG_LIKELIHOOD:
        yield ratio_text(lost.perplexity_ratio), lost.perplexity_ratio


def lost_numbers(result: PvfResult, row: PvfRow) -> Iterator[tuple[str, str, str]]:
    """Key numbers on the lost task metric, for the head of the page: term, value and small text."""
    if row.score_lost is None or row.score_lost.estimate is None:
        return
    for name, (text, lost) in zip(lost_columns(result), _score_texts(result, row.score_lost), strict=True):
        points = " points" if result.golden_score is None else ""
        yield f"{name} per fault", f"{text.estimate}{points}", text.limits if lost.estimate else ""
    if result.golden_score is not None:
        yield f"fault-free {result.score_name}", number_text(result.golden_score), ""


def lost_meaning(result: PvfResult) -> str:
    """An explanation of the columns of the lost task metric; empty if there are none."""
    if not result.score_name:
        return ""
    if result.golden_score is None:
        return (
            " Accuracy lost is in percentage points: right answers that a fault changes, or that end without one; wrong answers "
            "that become right are not subtracted."
        )
    name = result.score_name
    meaning = (
        f" {name[:1].upper()}{name[1:]} lost is the mean fault-free score minus the mean faulty score; detectable outputs "
        "and scores that are not finite, count as the lowest score."
    )
    if name == LOG_LIKELIHOOD:
        meaning += f" The {PERPLEXITY_RATIO} is exp(lost): the geometric mean of faulty over fault-free perplexity."
    return meaning
