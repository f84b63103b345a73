"""Follows from step to step which rank is suspected, and whether the suspicion is new."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unsilent.detectors.rule import NORMAL
from unsilent.events.event_kinds import LOGGER
from unsilent.monitor.attribution import Suspect, divergent_replicas, suspect_of
from unsilent.monitor.exchange import NOT_COMPARED, RankRow


class Suspicion:
    """The rank that is suspected, computed from the rows of all ranks; the same in every rank.

    Args:
        has_replicas: Whether all ranks train tensors of the same names, so that their bits may be compared.
        lowest: Lowest level of a finding for which a rank is suspected.
        begins_alike: Whether the ranks are known to begin with the same parameters. If not, parameters that differ from the first
            steps on are taken as intended, and are not compared.

    Attributes:
        suspect: Suspect of the last step; ``None`` if no rank reported anything.
        differing: Ranks whose parameters differ from those of the majority in the last step; all ranks if there is no majority.
            If bits are known to have changed in some of them, only those ranks.
        is_difference_new: Whether one of these ranks agreed with the others in the steps before.
    """

    def __init__(self, has_replicas: bool, lowest: int, begins_alike: bool = False) -> None:
        self._has_replicas, self._lowest, self._begins_alike = has_replicas, lowest, begins_alike
        self._divergent: dict[int, int] = {}  # rank: the last step in which it differed
        self._changed: set[int] = set()
        self.suspect: Suspect | None = None
        self.differing: tuple[int, ...] = ()
        self.is_difference_new = False

    def relevant(self, rows: Sequence[RankRow]) -> list[RankRow]:
        """The rows, without findings below the level that counts."""
        return [row if row.level >= self._lowest else row._replace(level=NORMAL) for row in rows]

    def follow(self, rows: Sequence[RankRow], interval: int) -> bool:
        """Find the suspect of a step, and return whether the suspicion is new.

        A suspicion is new if it is of another rank than in the step before, or if there is a further finding.

        Args:
            rows: Relevant rows of every rank.
            interval: Steps until every parameter was compared among ranks.
        """
        is_comparable = self._has_replicas and all(row.replicas != NOT_COMPARED for row in rows)
        divergent = set(divergent_replicas([row.replicas for row in rows])) if is_comparable else set()
        if divergent and rows[0].step <= interval + 2 and not self._begins_alike:
            self._has_replicas = False
            logging.getLogger(LOGGER).warning(
                "parameters differ between the ranks from the start; this is taken as meant, and they are not compared"
            )
            divergent = set()
        is_new = self._is_new(divergent, rows[0].step, interval)
        self.differing = tuple(sorted(divergent & self._changed or divergent))
        self.is_difference_new = is_new
        self._changed |= {rank for rank, row in enumerate(rows) if row.changed}
        before, self.suspect = self.suspect, suspect_of(rows, is_comparable and is_new)
        if any(row.changed for row in rows):  # replicas differ from now on
            self._divergent |= dict.fromkeys(range(len(rows)), rows[0].step)
        has_found_more = any(row.is_new and row.level > NORMAL for row in rows)
        return self.suspect is not None and (self.suspect != before or has_found_more)

    def _is_new(self, divergent: set[int], step: int, interval: int) -> bool:
        """Whether one of the divergent ranks did not differ in the last steps.

        A rank that differs does so in every interval.
        """
        known = {rank: last for rank, last in self._divergent.items() if step - interval <= last <= step}
        if not known:
            self._changed.clear()
        self._divergent = known | dict.fromkeys(divergent, step)
        return not divergent <= known.keys()
