"""Query for the rank that takes longer than the others, with the part of the step and the first step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unsilent.detectors.series import Floats
from unsilent.report.text import count_text, number_text
from unsilent.timeline.stragglers import LEAST_STEPS, Excess, array_excesses, differences_from_others
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Finding, FindingKind, Outcome, placed
from unsilent.triage.optional_parts import RecordedTimes

Rows = NDArray[np.intp]
FAR = 5.0
"""Least number of typical deviations of earlier steps by which a rank is later than before."""


def answer(bundle: Bundle, blanks: Blanks) -> Finding:
    """Find ranks that are late in all recorded steps, or else ranks that became late in the last ones."""
    times, missing = bundle.times()
    if times is None:
        text = "seconds of steps cannot be read; unsilent triage collect adds them, from traces of unsilent timeline record"
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    first, last = blanks.steps or (0, int(times.steps[-1]))
    rows = np.flatnonzero((times.steps >= first) & (times.steps <= last))
    excesses = _excesses(times, rows)
    if not excesses or (blanks.rank is not None and blanks.rank not in times.ranks):
        text = (
            f"seconds of {count_text(len(times.ranks), 'rank')} in {count_text(len(rows), 'step')} are recorded; a comparison "
            f"needs at least two ranks and {LEAST_STEPS} steps"
        )
        return Finding(outcome=Outcome.UNANSWERED, text=text, missing=missing)
    late, looked_at = _late(excesses, blanks), len(rows) // 2
    while not late and looked_at >= LEAST_STEPS:
        in_last = _late(_excesses(times, rows[-looked_at:]), blanks)
        late = [excess for excess in in_last if _has_left_its_past(times, rows, excess)]
        looked_at //= 2
    steps = f"recorded steps {times.steps[rows[0]]} to {times.steps[rows[-1]]}"
    if not late:
        text = f"no rank takes longer than the others, beyond noise, in {steps} or in the last of these"
        return Finding(outcome=Outcome.NOTHING, text=text, missing=missing)
    excess = late[0]
    step = int(times.steps[rows[_onset(times, rows, excess)]])
    text = (
        f"in {steps}, {excess.part} takes {number_text(1e3 * excess.seconds)} ms longer on rank {excess.rank} than on the other "
        f"ranks (median), from step {step} on"
    )
    return placed(
        text, sorted({late_rank.rank for late_rank in late}), "other ranks are late as well",
        kind=FindingKind.LATE_RANK, tensor=excess.part, step=step, missing=missing,
        numbers={"seconds": excess.seconds, "noise": excess.floor},
    )  # fmt: skip


def _excesses(times: RecordedTimes, rows: Rows) -> list[Excess]:
    """How late every rank is in every part of the selected steps, the clearest first."""
    seconds = times.seconds[:, rows]
    if len(times.ranks) < 2 or len(rows) < LEAST_STEPS:
        return []
    wholes = np.nansum(seconds, 2)
    is_awaited = np.array(
        [np.median(wholes[n] - np.median(np.delete(wholes, n, 0), 0)) >= 0 for n in range(len(wholes))], np.bool_
    )
    return array_excesses(seconds, times.ranks, times.parts, float(np.median(wholes)), is_awaited)


def _late(excesses: list[Excess], blanks: Blanks) -> list[Excess]:
    return [excess for excess in excesses if excess.is_separable and blanks.rank in (None, excess.rank)]


def _has_left_its_past(times: RecordedTimes, rows: Rows, late: Excess) -> bool:
    """Whether a rank is later than it was in earlier steps.

    False if there are too few earlier steps.
    """
    differences = _differences(times, rows[: _onset(times, rows, late)], late)
    differences = differences[np.isfinite(differences)]
    if len(differences) < LEAST_STEPS:
        return False
    centre = np.median(differences)
    return bool(late.seconds > centre + FAR * 1.4826 * np.median(np.abs(differences - centre)))


def _differences(times: RecordedTimes, rows: Rows, late: Excess) -> Floats:
    """Seconds of a part on the late rank minus the median of the other ranks, float64[rows]."""
    differences = differences_from_others(times.seconds[:, rows], times.ranks.index(late.rank))
    return differences[:, times.parts.index(late.part)]


def _onset(times: RecordedTimes, rows: Rows, late: Excess) -> int:
    """The row from which on the rank is late, chosen so that the fewest steps contradict it."""
    is_late = _differences(times, rows, late) > late.seconds / 2
    late_before = np.concatenate([[0], np.cumsum(is_late)[:-1]])
    in_time_after = np.cumsum(~is_late[::-1])[::-1]
    return int((late_before + in_time_after).argmin())
