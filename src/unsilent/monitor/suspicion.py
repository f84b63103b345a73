"""Follows what all ranks say from step to step: which rank is suspected, and whether that is new."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unsilent.detectors.rule import NORMAL
from unsilent.monitor.attribution import Suspect, divergent_replicas, suspect_of
from unsilent.monitor.exchange import NOT_COMPARED, RankRow
from unsilent.monitor.sinks import LOGGER


class Suspicion:
    """The same in every rank, for it depends on what all of them know alone.

    Args:
        has_replicas: Whether all ranks train tensors of the same names, so that their bits may be compared.
        lowest: Level of a finding from which on a rank is suspected.

    Attributes:
        suspect: Of the last step; None where no rank reported anything.
    """

    def __init__(self, has_replicas: bool, lowest: int) -> None:
        self._has_replicas, self._lowest = has_replicas, lowest
        self._divergent: dict[int, int] = {}  # rank: the last step in which it was
        self.suspect: Suspect | None = None

    def relevant(self, rows: Sequence[RankRow]) -> list[RankRow]:
        """The rows, without findings of lower levels."""
        return [row if row.level >= self._lowest else row._replace(level=NORMAL) for row in rows]

    def follow(self, rows: Sequence[RankRow], interval: int) -> bool:
        """Find the suspect of a step; whether it is another one than that of the step before, or for something else.

        Args:
            rows: That are relevant, of every rank.
            interval: Steps until every parameter was compared among ranks.
        """
        is_comparable = self._has_replicas and all(row.replicas != NOT_COMPARED for row in rows)
        divergent = set(divergent_replicas([row.replicas for row in rows])) if is_comparable else set()
        if divergent and rows[0].step <= interval + 2:
            self._has_replicas = False
            logging.getLogger(LOGGER).info(
                "parameters differ between the ranks from the start, so they are not compared"
            )
            divergent = set()
        is_new = self._is_new(divergent, rows[0].step, interval)
        before, self.suspect = self.suspect, suspect_of(rows, is_comparable and is_new)
        if any(row.changed for row in rows):  # replicas differ from now on
            self._divergent |= dict.fromkeys(range(len(rows)), rows[0].step)
        has_found_more = any(row.is_new and row.level > NORMAL for row in rows)
        return self.suspect is not None and (self.suspect != before or has_found_more)

    def _is_new(self, divergent: set[int], step: int, interval: int) -> bool:
        """Whether one of these ranks was like the others in the last steps: a rank that differs does so in every interval."""
        known = {rank: last for rank, last in self._divergent.items() if step - interval <= last <= step}
        self._divergent = known | dict.fromkeys(divergent, step)
        return not divergent <= known.keys()
