"""What the renderers of a trace say and show: the finding in words, runs of one phase, which rows fit into a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from unsilent.report.text import clean, counted
from unsilent.traced import BEFORE, Placed, Trace, TraceRow

MOST = 60
"""Lines of the table in a terminal."""
_ALWAYS = 8
"""Rows struck by faults that are shown whatever happens to them."""
PHASE_NAMES = {"fwd": "forward", "recomputed": "run again", "bwd": "backward", "outside": "outside", "update": "update"}


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """A trace and what it is of: a title, and pairs of term and text."""

    trace: Trace
    title: str
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``first`` to ``last`` that one phase has without a break."""

    phase: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that are left out between two that are shown, and how many of them differ."""

    rows: int
    changed: int

    @property
    def text(self) -> str:
        """One line."""
        if not self.changed:
            return f"… {counted(self.rows, 'output')} unchanged"
        return f"… {counted(self.rows, 'output')}, {self.changed:,} of them changed"


def headline(trace: Trace) -> str:
    """The finding in one sentence, without a full stop."""
    changed, every = list(trace.changed), counted(len(trace.rows), "output")
    what = "the fault" if len(trace.faults) == 1 else "the faults"
    if not trace.rows:
        return "nothing could be compared: the runs part at once"
    if not trace.faults and not changed:
        return f"there was no fault, and nothing differs in {every}"
    if not changed:
        return f"{what} changed nothing: {every} of operations, all golden bit for bit"
    first, last = (clean(trace.rows[i].label) for i in (changed[0], changed[-1]))
    where = f"at {first}" if first == last else f"first {first}, last {last}"
    return f"{what} changed {len(changed):,} of {every} of operations: {where}"


def worst(trace: Trace) -> list[str]:
    """The largest relative change, and where NaN or infinity come first."""
    told = []
    rated = [(row.change.relative, row) for row in trace.rows if row.change.relative is not None]
    if rated:
        value, row = max(rated, key=lambda pair: pair[0])
        told.append(f"largest relative change {magnitude(value)} at {clean(row.label)}")
    bad = next((row for row in trace.rows if row.change.nonfinite), None)
    if bad is not None:
        told.append(
            f"NaN or infinity first at {clean(bad.label)}: {bad.change.nonfinite:,} of {bad.elements:,} elements"
        )
    if trace.parting is not None:
        told.append(clean(trace.parting.text))
    return told


def segments(rows: Sequence[TraceRow]) -> list[Segment]:
    """Runs of rows of one phase, in order."""
    found: list[Segment] = []
    start = 0
    for phase, group in groupby(rows, key=lambda row: row.phase):
        mine = list(group)
        found.append(Segment(phase, start, start + len(mine) - 1))
        start += len(mine)
    return found


def marks(trace: Trace) -> dict[int, list[Placed]]:
    """The faults by the number of the row they strike; a place that is not known is the first row that differs."""
    found: dict[int, list[Placed]] = {}
    first = next(trace.changed, BEFORE)
    for fault in trace.faults:
        found.setdefault(first if fault.row is None else fault.row, []).append(fault)
    return dict(sorted(found.items()))


def folded_rows(trace: Trace, most: int = MOST) -> list[int | Gap]:
    """Numbers of the rows to show, and gaps, at most ``most`` together.

    Shown are rows that differ and those that a fault strikes; where they are too many, the first and the last of them.
    """
    struck = [i for i in marks(trace) if i != BEFORE][:_ALWAYS]
    bad = next((i for i, row in enumerate(trace.rows) if row.change.nonfinite), None)
    always = {*struck, *([] if bad is None else [bad])}
    changed = list(trace.changed)
    lines = _lines(trace, always | set(changed))
    room = most
    while len(lines) > most:
        room -= 1
        head = max(room * 3 // 4, 0)
        lines = _lines(trace, always | set(changed[:head]) | set(changed[len(changed) - max(room - head, 0) :]))
    return lines


def magnitude(value: float | None) -> str:
    """Two digits and a power of ten, as a column of them needs it; ``–`` for none."""
    if value is None:
        return "–"
    return f"{value:.2g}" if value == 0 or 1e-3 <= value < 1e4 else f"{value:.1e}"


def share_text(row: TraceRow) -> str:
    """Changed elements in percent, two or three digits, never rounded to 0 or 100."""
    if row.change.changed in (0, row.elements):
        return f"{100 * row.share:.0f}"
    share = min(100 * row.share, 99.9)
    return f"{share:.3g}" if share > 99 else magnitude(share)


def _lines(trace: Trace, kept: set[int]) -> list[int | Gap]:
    found: list[int | Gap] = []
    for inside, group in groupby(range(len(trace.rows)), key=kept.__contains__):
        numbers = list(group)
        if inside:
            found += numbers
        else:
            found.append(Gap(len(numbers), sum(trace.rows[i].change.changed > 0 for i in numbers)))
    return found
