"""Converts the times of all ranks to one clock.

The clock is that of rank 0, or of the first rank if no offset was measured.

Offsets measured by messages are used, interpolated linearly in time between the measurements. Otherwise an offset is the median
difference between the ends of collectives on two ranks. Its interval shows how well the median is known, not that collectives end
at the same moment on all ranks. Begins are converted here, and ends with them in `load`: a drift of 50 ppm changes 0.1 s by 5 µs,
so that an operation would no longer begin when another one ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.report.text import count_text, listed
from unsilent.statistics.intervals import median_interval
from unsilent.timeline.job import COLLECTIVE, Operations

OTHER_RUN = 1.0
"""Ranks are not of one run if most collectives would have ended more than this many seconds before they began."""
FEW_COLLECTIVES = 300
"""With fewer collectives than this, errors of up to a millisecond were measured."""
_ENDS_TOGETHER = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.IGNORECASE)
"""Names of collectives that no rank ends before all have begun. Broadcasts and messages are not among them."""


@dataclass(frozen=True)
class Clocks:
    """Start times of operations on one common clock, and the clock offsets of ranks.

    Attributes:
        start: Seconds of each operation, float64[n].
        offsets: Seconds that a rank's clock is ahead, in the middle of its recording, by rank; unknown ones are left out.
        notes: Notes for the reader, one sentence each.
    """

    start: NDArray[np.float64]
    offsets: dict[int, Interval]
    notes: tuple[str, ...]


def align_clocks(operations: Operations, anchors: Mapping[int, NDArray[np.float64]]) -> Clocks:
    """Start times of the operations of all ranks on one common clock.

    Args:
        operations: Operations of ranks, each on its own clock.
        anchors: Rows by rank: seconds on its clock (like the times of operations), offset of its clock (its time minus that of
            rank 0) and bound of the offset's error.
    """
    start, offsets = operations.start.copy(), dict[int, Interval]()
    bounds = np.searchsorted(operations.rank, np.arange(operations.rank[-1] + 2 if len(operations) else 1))
    members = {int(rank): slice(bounds[rank], bounds[rank + 1]) for rank in np.unique(operations.rank)}
    measured = {rank: rows for rank, rows in anchors.items() if len(rows) and rank in members and rank}
    if 0 in members or not measured:
        offsets[min(members, default=0)] = Interval(0.0, 0.0, 0.0, 1.0, 0, "reference")
    for rank, rows in measured.items():
        part, rows = members[rank], rows[np.argsort(rows[:, 0])]
        start[part] -= np.interp(start[part], rows[:, 0], rows[:, 1])
        middle, bound = float(rows[[0, -1], 1].mean()), float(rows[:, 2].max())
        offsets[rank] = Interval(middle, middle - bound, middle + bound, 1.0, len(rows), "messages")
    together = _ending_together(operations)
    notes = _infer(operations, together, members, start, offsets)
    return Clocks(start, offsets, (*notes, *_contradictions(operations, together, start, offsets)))


def _ending_together(operations: Operations) -> NDArray[np.intp]:
    """Indices of operations of collectives that end on all ranks at the same time."""
    by_name = np.array([bool(_ENDS_TOGETHER.search(name)) for name in operations.names], bool)
    return np.flatnonzero((operations.kind == COLLECTIVE) & (operations.collective >= 0) & by_name[operations.name])


def _infer(
    operations: Operations,
    together: NDArray[np.intp],
    members: Mapping[int, slice],
    start: NDArray[np.float64],
    offsets: dict[int, Interval],
) -> list[str]:
    """Infer the missing clock offsets of ranks from the times at which collectives ended.

    Corrects ``start`` of these ranks and adds their offsets to ``offsets``; a chain of other ranks may connect two
    ranks. Returns notes.
    """
    rest, inferred = [rank for rank in members if rank not in offsets], []
    ends = np.full(operations.collective.max(initial=-1) + 1, np.nan)  # on the first rank whose clock is known

    def take(rank: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        part = members[rank]
        rows = together[slice(*np.searchsorted(together, (part.start, part.stop)))]
        return operations.collective[rows], start[rows] + operations.duration[rows]

    def know(rank: int) -> None:
        collective, end = take(rank)
        ends[collective] = np.where(np.isnan(ends[collective]), end, ends[collective])

    for rank in offsets:
        know(rank)
    has_changed = True
    while rest and has_changed:
        has_changed = False
        for rank in list(rest):
            collective, end = take(rank)
            differences = (end - ends[collective])[~np.isnan(ends[collective])]
            if len(differences):
                offsets[rank] = interval = median_interval(differences)
                start[members[rank]] -= interval.estimate or 0.0
                know(rank)
                rest.remove(rank)
                inferred.append(interval)
                has_changed = True
    return [*_inference_notes(inferred), *_unknown_notes(rest)]


def _inference_notes(inferred: list[Interval]) -> list[str]:
    if not inferred:
        return []
    fewest = min(inference.n for inference in inferred)
    widest = max(inference.high - inference.low for inference in inferred)
    clocks = "The clock of 1 rank was" if len(inferred) == 1 else f"The clocks of {len(inferred)} ranks were"
    note = f"{clocks} inferred from when collectives ended, not measured; the widest 95 % interval spans {1e6 * widest:,.0f} µs"
    few = f", from {count_text(fewest, 'collective')}, fewer than {FEW_COLLECTIVES}" if fewest < FEW_COLLECTIVES else ""
    return [f"{note}{few}."]


def _unknown_notes(ranks: list[int]) -> list[str]:
    if not ranks:
        return []
    clocks = (
        f"The clock of rank {ranks[0]} is"
        if len(ranks) == 1
        else f"The clocks of ranks {listed(map(str, ranks), 5)} are"
    )
    return [f"{clocks} used as recorded: no offset was measured, and no collective connects them with the first rank."]


def _contradictions(
    operations: Operations, together: NDArray[np.intp], start: NDArray[np.float64], offsets: Mapping[int, Interval]
) -> list[str]:
    """A note if a collective ended on one rank clearly before it began on another.

    The difference has to exceed the error of the offsets.
    """
    known = np.isin(operations.rank[together], list(offsets))
    together = together[known]
    collectives, number = np.unique(operations.collective[together], return_inverse=True)
    if not len(together):
        return []
    slack = np.zeros(operations.rank.max() + 1)
    for rank, interval in offsets.items():
        slack[rank] = interval.half_width if np.isfinite(interval.half_width) else np.inf
    margin = slack[operations.rank[together]]
    begun = start[together] - margin
    ended = start[together] + operations.duration[together] + margin
    latest, earliest = np.full(len(collectives), -np.inf), np.full(len(collectives), np.inf)
    np.maximum.at(latest, number, begun)
    np.minimum.at(earliest, number, ended)
    early = latest - earliest
    if early.max() <= 0:
        return []
    if np.median(early) > OTHER_RUN:
        raise UsageError(
            f"in most of {count_text(len(collectives), 'collective')} a rank had ended more than {OTHER_RUN:g} s before another "
            "one began; give traces of one run"
        )
    worst = np.flatnonzero(number == early.argmax())
    first, last = (int(operations.rank[together[worst[i]]]) for i in (ended[worst].argmin(), begun[worst].argmax()))
    return [
        f"In {(early > 0).sum():,} of {count_text(len(collectives), 'collective')}, a rank had ended before another one began, "
        f"as rank {first} before rank {last} by {1e6 * early.max():,.0f} µs more than their clocks are uncertain: the clocks, "
        "or which operations belong together, are wrong."
    ]
