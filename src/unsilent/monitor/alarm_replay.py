"""Replay of an alarm: the step is executed again, and a verdict says what kind of fault it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.detectors.rule import NORMAL
from unsilent.detectors.series import GRADIENT, LOSS, Series
from unsilent.events.event_kinds import FINGERPRINT, LOGGER, Verdict
from unsilent.events.host import first_step
from unsilent.monitor.exchange import RankRow
from unsilent.monitor.recorder import Recorder
from unsilent.recovery.earlier_incidents import (
    incident_of,
    read_earlier_incidents,
    with_earlier_incidents,
    write_earlier_incidents,
)
from unsilent.recovery.evidence import Evidence
from unsilent.recovery.fault_verdict import SOON_AFTER_LOAD, FaultVerdict, judge
from unsilent.recovery.neighbour_check import Findings, Signals
from unsilent.recovery.rank_link import RankLink
from unsilent.recovery.step_replay import ReplayedSteps, StepReplay, batch_problem, text_of_suspect

MOST_REPLAYS = 10
"""Maximum number of alarms in one run whose steps are executed again; each costs the time of ten steps or more."""
TOO_MANY = f"the steps of {MOST_REPLAYS} alarms of this run were executed again already"
BEGAN_BEFORE = "the step of the alarm began before the oldest state that is kept, so that it was not executed again"
_log = logging.getLogger(LOGGER)


class AlarmReplay:
    """Replay of one alarm, which finds the kind of fault; all ranks get the same result.

    Args:
        verdict: Verdict with the rank that is suspected.
        steps_since_load: Number of steps, as in `Evidence`.
        link: The other ranks.
        series: Series of the signals.
        original: The last signals of this rank, up to the alarm.
        load_earlier: Function as in `StepReplay`.

    Attributes:
        is_running: Whether steps are being executed again.
        recorder: Recorder of the signals of this rank in steps that are executed again.
    """

    def __init__(
        self,
        verdict: Verdict,
        steps_since_load: int | None,
        link: RankLink,
        series: Sequence[Series],
        original: Recorder,
        load_earlier: Callable[[], object] | None = None,
    ) -> None:
        self._verdict, self._steps_since_load, self._link, self._series = verdict, steps_since_load, link, series
        is_recent = steps_since_load is not None and steps_since_load <= SOON_AFTER_LOAD
        self._load_earlier = load_earlier if is_recent else None
        self._rows: list[Sequence[RankRow]] = []
        self._first_step = verdict.step
        self.recorder = Recorder()
        self._original = dict(zip(original.steps, self._local(original), strict=True))
        self.is_running = False

    def add(self, rows: Sequence[RankRow]) -> None:
        """Add the rows of all ranks for a step that was executed again."""
        self._rows.append(rows)

    def run(self, steps: ReplayedSteps) -> Iterator[object]:
        """Yield the item of each iteration that is executed again.

        The result of `evidence` is available afterwards.
        """
        self._engine = StepReplay(steps, self._take_findings, self._link, self._verdict.suspect, self._load_earlier)
        self.is_running = True
        try:
            yield from self._engine.run()
        finally:
            self.is_running = False
        if self._engine.no_neighbour:
            _log.info(
                "step %d: no execution of another rank is evidence: %s", self._verdict.step, self._engine.no_neighbour
            )
        if self._engine.far:
            _log.warning("step %d: the result of %s is far from that in float64", self._verdict.step, self._engine.far)

    def evidence(self, problem: str = "") -> Evidence:
        """The evidence on the alarm.

        ``problem``: why its steps were not executed again, or not completely.
        """
        verdict, prefix = self._verdict, f"{FINGERPRINT} of "
        has_changed = verdict.tensor.startswith(prefix)
        known = Evidence(
            step=verdict.step, rank=verdict.suspect, host=verdict.host, device=verdict.device,
            feature=FINGERPRINT if has_changed else verdict.tensor,
            tensor=verdict.tensor.removeprefix(prefix) if has_changed else "",
            world_size=self._link.world_size, steps_since_load=self._steps_since_load,
        )  # fmt: skip
        if not problem and self._first_step > verdict.step:
            problem = BEGAN_BEFORE
        if problem:
            return replace(known, problem=problem)
        engine = self._engine
        return replace(
            known, executions=tuple(engine.executions), steps_per_execution=engine.steps_per_execution,
            problem=engine.problem, no_neighbour=engine.no_neighbour, apart=engine.apart,
            is_neighbour_checked=engine.is_neighbour_checked,
            tolerance=engine.tolerance, batch_problem=engine.batch_problem,
        )  # fmt: skip

    def not_executed(self, problem: str, batches: Sequence[Any]) -> Evidence:
        """The evidence on an alarm whose steps cannot be executed again.

        It contains the reason, and problems of the last batches.

        All ranks call this together.
        """
        texts = self._link.gather(batch_problem(batches))
        return replace(self.evidence(problem), batch_problem=text_of_suspect(texts, self._verdict.suspect))

    def _take_findings(self) -> Findings:
        """The findings of the first replayed iteration that has any.

        Later iterations do not count: from there on ranks pass errors to each other.
        """
        iterations, self._rows = self._rows, []
        steps, signals = self.recorder.steps, self._local(self.recorder)
        self.recorder.clear()
        unknown = np.full(signals.shape[1], np.nan)
        known = [self._original.get(step, unknown) if step < self._verdict.step else unknown for step in steps]
        original = np.array(known).reshape(signals.shape)
        if iterations:
            self._first_step = iterations[0][0].step
        for number, rows in enumerate(iterations):
            with_finding = [(rank, row) for rank, row in enumerate(rows) if row.level > NORMAL or row.changed]
            if with_finding:
                not_shared = frozenset(rank for rank, row in with_finding if row.changed or not row.is_shared)
                are_own = bool(not_shared) and not any(row.has_shared for row in rows)
                ranks = not_shared or frozenset(rank for rank, _ in with_finding)
                return Findings(ranks, are_own, number, signals, original)
        return Findings(frozenset(), True, len(iterations), signals, original)

    def _local(self, recorder: Recorder) -> Signals:
        """Signals that this rank computed before any reduction among ranks, in each step."""
        recording = recorder.recording(self._series)
        are_local = [entry.feature in (GRADIENT, LOSS) for entry in self._series]
        return np.where(recording.seen, recording.values, np.nan)[:, are_local]


class FaultJudge:
    """Judges the alarms of a run, together with incidents of earlier runs; all ranks get the same result.

    Args:
        link: Link to the other ranks; rank 0 sends them at the start what it has read.
        path: File of earlier incidents, read and written by rank 0; ``None`` if only incidents of this run count.
    """

    def __init__(self, link: RankLink, path: Path | None) -> None:
        self._path, earlier = (path if link.rank == 0 else None), []
        try:
            earlier = read_earlier_incidents(self._path) if self._path else []
        except UsageError as error:
            self._path = None  # unknown content: it is not replaced
            _log.warning("earlier incidents are not counted: %s", error)
        self._earlier = link.gather(earlier)[0]
        self._first_step = first_step() or 0

    def training_step_text(self, step: int) -> str:
        """The step of the whole training as text, or an empty text if the run began at step 0."""
        return f" (step {self._first_step + step} of the training)" if self._first_step else ""

    def judge(self, evidence: Evidence) -> FaultVerdict:
        """The verdict on the kind of fault.

        The alarm counts as an earlier incident from then on.
        """
        of_training = replace(evidence, step=self._first_step + evidence.step)
        verdict_in_training = judge(with_earlier_incidents(of_training, self._earlier))
        verdict = replace(verdict_in_training, step=evidence.step)
        if (incident := incident_of(verdict_in_training)) is None:
            return verdict
        self._earlier.append(incident)
        try:
            if self._path:
                write_earlier_incidents(self._path, self._earlier)
        except OSError as error:
            _log.warning("%s: this incident cannot be remembered: %s", self._path, kind_and_line(error))
        return verdict
