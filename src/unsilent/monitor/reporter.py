"""Turns the findings of a monitor into events, and passes them to sinks."""

from __future__ import annotations

import functools
import logging
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from unsilent.basics.errors import kind_and_line
from unsilent.detectors.rule import ALARM, NORMAL
from unsilent.detectors.series import GRADIENT, L2, LOSS, Series
from unsilent.events.event_kinds import (
    FINGERPRINT,
    LOGGER,
    REPLICAS,
    Alarm,
    AlarmExplained,
    Ended,
    Event,
    IncidentBegan,
    MonitorFailed,
    SamplingChanged,
    Started,
    StepSummary,
    Verdict,
    since_text,
)
from unsilent.events.host import first_step, pid_namespace
from unsilent.events.run_history import OK, health_after
from unsilent.events.sinks import Sink
from unsilent.monitor.attribution import UNDETERMINED, Suspect
from unsilent.monitor.exchange import RankInfo, RankRow
from unsilent.monitor.incident_writer import IncidentWriter
from unsilent.monitor.rule_streams import Finding
from unsilent.monitor.signals.row import SignalValues
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.version import __version__

E = TypeVar("E", bound=Event)
SUMMARY_SECONDS, LATER_SECONDS = 1.0, 10.0
"""Seconds between two summaries of steps, at first and in a job of many hours, whose events can so be read in seconds."""
LATER = 3600.0
"""The time between two summaries is the time so far divided by this number, within these bounds."""
REPEAT_SECONDS = 60.0
"""Seconds between two alarms on parameters that continue to differ between ranks."""
LEVELS = {ALARM: "alarm"}
NO_ALARM = "no alarm: somebody noticed"
"""Reason of the verdict on a step that is recorded without an alarm."""
log = logging.getLogger(LOGGER)


class Reporter:
    """Creates the events of one rank, and passes them to its sinks.

    Attributes:
        alarms, verdicts: All alarms and all verdicts so far.
        ranks: Identities of all ranks.
        health: Health of the device of this rank.
        incident: Writer that records the first verdict; ``None`` if it is not recorded.
    """

    def __init__(
        self, info: RankInfo, ranks: Sequence[RankInfo], sinks: Sequence[Sink], incident: IncidentWriter | None = None
    ) -> None:
        self._info, self.ranks, self._sinks, self.incident = info, list(ranks), list(sinks), incident
        self._since = ""
        self.alarms: list[Alarm] = []
        self.verdicts: list[Verdict] = []
        self._begun, self._summed = time.perf_counter(), -float("inf")
        self._skipped: Callable[[], object] = lambda: None
        self._repeat_at = float("inf")
        self.health = OK

    def silent(self) -> Reporter:
        """A reporter without sinks, for steps that are executed again."""
        return Reporter(self._info, self.ranks, [])

    def start(self, settings: Mapping[str, Any], series: Sequence[Series], notes: Sequence[str]) -> None:
        """Report the start of the monitor."""
        self._started = self._emit(
            Started, 0, host=self._info.host, device=self._info.device, process=os.getpid(), world_size=len(self.ranks),
            settings=dict(settings), series=dict(Counter(entry.feature for entry in series)),
            versions={"unsilent": __version__, "torch": torch.__version__, "python": platform.python_version()},
            notes=tuple(notes), pid_namespace=pid_namespace(), first_step=first_step(),
        )  # fmt: skip

    def findings(self, step: int, findings: Sequence[Finding]) -> bool:
        """Report the new findings in a step, and return whether there are any.

        A rule that keeps finding something in a series is reported once.
        """
        known = len(self.alarms)
        for finding in findings:
            if finding.is_new:
                series, level = finding.series, LEVELS.get(finding.level, "warning")
                self._raise_alarm(
                    step, rule=finding.rule, feature=series.feature, tensor=series.tensor, statistic=series.statistic,
                    level=level, value=finding.value, baseline=finding.baseline, score=finding.score,
                    series_flagged=finding.flagged, series_judged=finding.judged,
                )  # fmt: skip
        return len(self.alarms) > known

    def replicas(self, step: int, differing: Sequence[int], versions: int, is_new: bool) -> None:
        """Report that parameters of these ranks differ from other ranks.

        Repeated from time to time while it lasts.

        The difference is not new if changed bits were found before: that raised its own alarm.
        """
        if not differing:
            return
        now = time.perf_counter()
        is_due = is_new or now >= self._repeat_at
        self._repeat_at = now + REPEAT_SECONDS if is_due else min(self._repeat_at, now + REPEAT_SECONDS)
        if is_due and self._info.rank in differing:
            self._raise_alarm(
                step, rule=REPLICAS, feature=REPLICAS, tensor="", statistic="bits", level=LEVELS[ALARM],
                value=float(versions), baseline=1.0, score=float("inf"), series_flagged=len(differing),
                series_judged=len(self.ranks), ranks=tuple(differing),
            )  # fmt: skip

    def _raise_alarm(self, step: int, **values: Any) -> None:
        """Report an alarm on the device of this rank."""
        place = {"host": self._info.host, "device": self._info.device, "since": self._since}
        self.alarms.append(self._emit(Alarm, step, **place, **values))

    def summary(
        self,
        step: int,
        series: Sequence[Series],
        signals: SignalValues,
        score: Callable[[], float | None],
        cost: float,
        is_wanted: bool,
    ) -> None:
        """Report the values of a step, about once a second.

        After ten hours, every ten seconds. Also if ``is_wanted``, and for the last step.
        """
        now = time.perf_counter()
        between = min(max(SUMMARY_SECONDS, (now - self._begun) / LATER), LATER_SECONDS)
        if now - self._summed < between and not is_wanted:
            self._skipped = functools.partial(self.summary, step, series, signals, score, cost, True)
            return
        self._summed, self._skipped = now, lambda: None
        series = series[: len(signals.values)]  # others came later
        seen = [n for n in range(len(series)) if signals.seen[n]]
        norms = [signals.values[n] for n in seen if series[n].feature == GRADIENT and series[n].statistic == L2]
        loss = next((n for n in seen if series[n].feature == LOSS), None)
        self._emit(
            StepSummary, step, loss=None if loss is None else float(signals.values[loss]),
            gradient_norm=math.hypot(*norms) if norms else None, score=score(), cost=cost,
            health=self.health,
        )  # fmt: skip

    def sampling(self, step: int, interval: int, reason: str) -> None:
        """Report a change of the sampling intervals."""
        self._emit(SamplingChanged, step, interval=interval, reason=reason)

    def verdict(
        self,
        step: int,
        rows: Sequence[RankRow],
        differing: Sequence[int],
        suspect: Suspect,
        names: Sequence[str],
        action: str,
        outcome: str,
    ) -> Verdict:
        """Report the verdict of all ranks.

        Args:
            step: Step that it is about.
            rows: Rows of all ranks.
            differing: Ranks whose parameters differ.
            suspect: Suspect of the verdict.
            names: Names of the tensors whose bits are compared.
            action: Requested action.
            outcome: Outcome of the action.
        """
        known = suspect.rank != UNDETERMINED
        who = self.ranks[suspect.rank] if known else None
        row = rows[suspect.rank] if known else max(rows, key=lambda rank_row: (rank_row.level, rank_row.score))
        series = names if row.changed else (who or self._info).series
        # Found in a step that is not read.
        own_tensor = next((alarm.series_name for alarm in reversed(self.alarms) if alarm.step == step), "")
        tensor = (
            series[row.series] if 0 <= row.series < len(series) else own_tensor if who in (None, self._info) else ""
        )
        reporting = [n for n, rank_row in enumerate(rows) if rank_row.level > NORMAL or rank_row.changed]
        ranks = tuple(sorted({*reporting, *differing}))
        result = self._emit(
            Verdict, step, suspect=suspect.rank, reason=suspect.reason, action=action, outcome=outcome,
            host=who.host if who else "", device=who.device if who else "",
            tensor=f"{FINGERPRINT} of {tensor}" if row.changed else tensor, ranks=ranks,
            since=self._since,
        )  # fmt: skip
        self.verdicts.append(result)
        self._record(result)
        return result

    def fault_verdict(self, verdict: FaultVerdict) -> None:
        """Report the kind of fault behind an alarm; all ranks report the same."""
        self._emit(
            AlarmExplained, verdict.step, fault=verdict.kind, suspect=verdict.rank, host=verdict.host,
            device=verdict.device, code=verdict.code, level=verdict.level, action=verdict.action, reason=verdict.reason,
            exit_code=verdict.exit_code,
        )  # fmt: skip
        if self.incident is not None:
            self.incident.add_fault_verdict(verdict)

    def notice(self, step: int) -> None:
        """Record a step without an alarm as an incident, unless there is an incident already."""
        if not self._since:
            self._record(Verdict(
                time=time.time(), rank=self._info.rank, step=step, suspect=UNDETERMINED, reason=NO_ALARM, action="log",
                outcome="recorded", host="", device="", tensor="", ranks=(),
            ))  # fmt: skip

    def _record(self, verdict: Verdict) -> None:
        """Record the first verdict as an incident; add later verdicts to it."""
        if self._since:
            if self.incident is not None:
                self.incident.add_verdict(verdict)
            return
        self._since = since_text(verdict.step, verdict.suspect, verdict.tensor or verdict.reason)
        if self.incident is not None:
            try:
                folder = self.incident.begin(verdict, self.alarms, self._started)
            except Exception as error:  # the monitor goes on
                self.incident = None
                log.warning("cannot record the incident: %s; the job goes on", kind_and_line(error))
                return
            self._emit(
                IncidentBegan, verdict.step, folder=str(folder), suspect=verdict.suspect, tensor=verdict.tensor,
                reason=verdict.reason,
            )  # fmt: skip

    def failure(self, step: int, error: str) -> None:
        """Report an error of the monitor itself."""
        self._emit(MonitorFailed, step, error=error)

    def end(self, step: int, **values: Any) -> None:
        """Report the end of the monitor, and close its sinks.

        ``values``: fields of `Ended`.
        """
        self._skipped()
        self._emit(Ended, step, steps=step, alarms=len(self.alarms), **values)
        if self.incident is not None:
            self.incident.close()
        for sink in self._sinks:
            if (close := getattr(sink, "close", None)) is not None:
                close()

    def _emit(self, kind: type[E], step: int, **values: Any) -> E:
        event = kind(time=time.time(), rank=self._info.rank, step=step, **values)
        self.health = health_after(self.health, event)
        for sink in self._sinks:
            sink(event)
        return event
