"""Exchange of rows among ranks: when a rank sends the row of a step, and how long it waits for other ranks.

If all ranks must act alike on an alarm, each waits for the rows of all ranks before it goes on. If an alarm is only logged, ranks
need not act alike: a rank waits no longer than its budget allows, goes on, and takes the rows when they arrive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from unsilent.monitor.exchange import NOT_COMPARED, Exchange, RankRow, RanksApart
from unsilent.monitor.settings import MonitorSettings

ACTING_SECONDS = 300.0
"""Longest wait in seconds if all ranks must act alike: on a device, ranks wait here for a rank that writes a checkpoint."""
LOGGING_SECONDS = 1.0
"""Most seconds of waiting in total if ranks need not act alike, unless the budget allows more."""
LONGEST_WAIT = 10.0
"""Longest single wait in seconds if ranks need not act alike."""
MOST_AHEAD = 1000
"""Maximum number of steps that a rank may be ahead of another one."""


class Agreement:
    """Sends the rows of this rank, and receives the rows of all ranks in the order of steps.

    Attributes:
        must_act_alike: Whether the verdict on a step must be known in all ranks before the next one.
        is_behind: Whether rows of other ranks were missing before the last step.
        seconds_waited: Seconds spent waiting for other ranks so far.
    """

    def __init__(self, exchange: Exchange, settings: MonitorSettings) -> None:
        self._exchange, self._budget = exchange, settings.budget
        self.must_act_alike = settings.on_alarm != "log"
        self.is_behind, self.seconds_waited = False, 0.0
        self._begun = time.perf_counter()
        self._replicas = NOT_COMPARED
        self._step = 0

    def send(self, row: RankRow, is_comparable: bool) -> None:
        """Send the row of a step.

        ``is_comparable``: whether no row of another rank was missing before it.

        The fingerprint of replicas is sent one row later. If all ranks have made the step by then, its number means the same step
        in all of them, with the same intervals of sampling.
        """
        before, self._replicas = self._replicas, row.replicas if is_comparable else NOT_COMPARED
        self._step = row.step
        self._exchange.begin(row._replace(replicas=NOT_COMPARED if self.is_behind else before))

    def receive(self, seconds: float | None = None, step: int = 0) -> Iterator[list[RankRow]]:
        """Yield the rows of all ranks, one step after the other.

        This rank waits for rows that are missing.

        Args:
            seconds: Longest wait at the end of a training; ``None`` for the usual wait before a step.
            step: Step that this rank is at.

        Raises:
            RanksApart: the ranks do not make the same steps, so that they cannot agree.
        """
        while self._exchange.outstanding:
            begun = time.perf_counter()
            rows = self._exchange.end(self._patience() if seconds is None else seconds)
            self.seconds_waited += time.perf_counter() - begun
            if rows is None:
                break
            yield self._of_one_step(rows)
        count = self._exchange.outstanding
        ahead = max(count, step - self._step) if count else 0
        self.is_behind = count > 0
        if count and self.must_act_alike and seconds is None:
            raise RanksApart(f"another rank has not made a step after {ACTING_SECONDS:g} s")
        if ahead >= MOST_AHEAD:
            raise RanksApart(f"this rank is {ahead} steps ahead of another one")

    def _of_one_step(self, rows: list[RankRow]) -> list[RankRow]:
        """The rows, without fingerprints of replicas if the ranks are at different steps.

        Raises ``RanksApart`` for different steps if ranks must act alike.
        """
        steps = [row.step for row in rows if not (row.failed or row.ended)]
        if len(set(steps)) <= 1:
            return rows
        if self.must_act_alike:
            steps_text = ", ".join(f"rank {rank} at {row.step}" for rank, row in enumerate(rows))
            raise RanksApart(f"the ranks are at different steps: {steps_text}")
        return [row._replace(replicas=NOT_COMPARED) for row in rows]

    def drop(self) -> None:
        """Forget all rows that were sent, because the training goes back in all ranks."""
        self._exchange.drop()
        self._replicas = NOT_COMPARED

    def _patience(self) -> float:
        """Seconds that this rank may wait for other ranks now.

        0 while another rank is behind, unless ranks must act alike.
        """
        if self.must_act_alike:
            return ACTING_SECONDS
        allowed = (time.perf_counter() - self._begun) * self._budget / 100
        left = max(LOGGING_SECONDS, allowed) - self.seconds_waited
        return 0.0 if self.is_behind else min(LONGEST_WAIT, max(0.0, left))
