"""Attribution of a fault to a rank, from the rows of all ranks in one step.

Every rank computes the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from unsilent.detectors.rule import NORMAL
from unsilent.events.event_kinds import ONE_RANK
from unsilent.monitor.exchange import RankRow

UNDETERMINED = -1
CLEAR = 3.0
"""Least ratio of the largest score to the second largest if several ranks raise an alarm."""


class Suspect(NamedTuple):
    """The rank that is suspected, or `UNDETERMINED`, and the reason."""

    rank: int
    reason: str


def divergent_replicas(sums: Sequence[int]) -> list[int]:
    """Ranks whose fingerprint of the parameters differs from the majority.

    All ranks if there is no majority.
    """
    if len(set(sums)) <= 1:
        return []
    most, count = Counter(sums).most_common(1)[0]
    return [rank for rank, checksum in enumerate(sums) if count * 2 <= len(sums) or checksum != most]


def suspect_of(rows: Sequence[RankRow], replicas_count: bool = True) -> Suspect | None:
    """The rank where the fault is, or None if no rank reports anything.

    Bits that changed between two steps are proof. Next come replicas: one rank that has other parameters than the majority. Then
    what each rank found in its own signals, before any reduction: a faulty rank departs from its own history. Updates follow from
    the gradients of all ranks, and count only if no rank found anything else.

    Args:
        rows: Rows of every rank.
        replicas_count: Whether all ranks should have the same parameters.
    """
    changed = [rank for rank, row in enumerate(rows) if row.changed]
    divergent = divergent_replicas([row.replicas for row in rows]) if replicas_count else []
    alarmed = [rank for rank, row in enumerate(rows) if row.level > NORMAL]
    alarmed = [rank for rank in alarmed if not rows[rank].is_shared] or alarmed
    if not (changed or divergent or alarmed):
        return None
    if len(rows) == 1:
        return Suspect(0, ONE_RANK)
    if len(changed) == 1:
        return Suspect(changed[0], "fingerprint")
    if changed:
        return Suspect(UNDETERMINED, f"bits changed in {len(changed)} ranks")
    if len(divergent) == 1:
        return Suspect(divergent[0], "vote")
    if len(alarmed) == 1:
        return Suspect(alarmed[0], "own history")
    if divergent and not alarmed:
        versions = f"{len({row.replicas for row in rows})} versions of the parameters without a majority"
        deviating = f"{len(divergent)} ranks differ from the majority"
        return Suspect(UNDETERMINED, versions if len(divergent) == len(rows) else deviating)
    first, second = sorted((rows[rank].score for rank in alarmed), reverse=True)[:2]
    if first > CLEAR * second:
        return Suspect(next(rank for rank in alarmed if rows[rank].score == first), "own history")
    causes = "data, software, or a fault in a state that they share"
    return Suspect(UNDETERMINED, f"{len(alarmed)} ranks found something alike: {causes}")
