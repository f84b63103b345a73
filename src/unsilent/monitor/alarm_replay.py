"""What a monitor does with ``on_alarm="replay"``: the step is executed again, and a verdict says what kind of fault it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from unsilent.detectors.rule import NORMAL
from unsilent.events.event_kinds import FINGERPRINT, Verdict
from unsilent.events.sinks import LOGGER
from unsilent.monitor.exchange import RankRow
from unsilent.recovery.evidence import Evidence
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.recovery.rank_link import RankLink
from unsilent.recovery.step_replay import ReplayedSteps, StepReplay

MOST_REPLAYS = 10
"""Alarms of one run whose steps are executed again; each costs as much time as some ten steps, and more."""
TOO_MANY = f"the steps of {MOST_REPLAYS} alarms of this run were executed again already"
_log = logging.getLogger(LOGGER)


class AlarmReplay:
    """One alarm, from its verdict to what kind of fault it was; the same in all ranks.

    Args:
        verdict: Which rank is suspected.
        steps_since_load: As of `Evidence`.
        link: The other ranks.

    Attributes:
        is_running: Whether steps are being executed again.
    """

    def __init__(self, verdict: Verdict, steps_since_load: int | None, link: RankLink) -> None:
        self._verdict, self._steps_since_load, self._link = verdict, steps_since_load, link
        self._rows: list[Sequence[RankRow]] = []
        self.is_running = False

    def add(self, rows: Sequence[RankRow]) -> None:
        """What the ranks say of a step that was executed again."""
        self._rows.append(rows)

    def run(self, steps: ReplayedSteps) -> Iterator[object]:
        """Yield what iterations begin with, to have their bodies executed; `evidence` is there afterwards."""
        self._engine = StepReplay(steps, self._take_alarm_ranks, self._link, self._verdict.suspect)
        self.is_running = True
        try:
            yield from self._engine.run()
        finally:
            self.is_running = False
        if self._engine.no_neighbour:
            _log.info("step %d: no neighbour was asked: %s", self._verdict.step, self._engine.no_neighbour)
        if self._engine.far:
            _log.warning("step %d: the result of %s is far from that in float64", self._verdict.step, self._engine.far)

    def evidence(self, problem: str = "") -> Evidence:
        """What is known of the alarm; ``problem``: why its steps were not executed again, or not to their end."""
        verdict, prefix = self._verdict, f"{FINGERPRINT} of "
        has_changed = verdict.tensor.startswith(prefix)
        known = Evidence(
            step=verdict.step, rank=verdict.suspect, host=verdict.host, device=verdict.device,
            feature=FINGERPRINT if has_changed else verdict.tensor,
            tensor=verdict.tensor.removeprefix(prefix) if has_changed else "",
            world_size=self._link.world_size, problem=problem, steps_since_load=self._steps_since_load,
        )  # fmt: skip
        if problem:
            return known
        engine = self._engine
        return replace(
            known, executions=tuple(engine.executions), problem=engine.problem, tolerance=engine.tolerance,
            batch_problem=engine.batch_problem,
        )  # fmt: skip

    def _take_alarm_ranks(self) -> frozenset[int]:
        """Ranks with a finding in what they do not share; where there is no such rank, those with any finding."""
        found = [
            (rank, row) for rows in self._rows for rank, row in enumerate(rows) if row.level > NORMAL or row.changed
        ]
        self._rows = []
        own = frozenset(rank for rank, row in found if row.changed or not row.is_shared)
        return own or frozenset(rank for rank, _ in found)


def judge(evidence: Evidence) -> FaultVerdict:
    """What kind of fault it was."""
    reason = evidence.problem or "what the executions say is not judged"
    return FaultVerdict(
        kind="undetermined",
        step=evidence.step,
        rank=evidence.rank,
        host=evidence.host,
        device=evidence.device,
        reason=reason,
    )
