"""Judges the signals of one step in one rank, and makes the row that other ranks receive."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence

import numpy as np
import xxhash

from unsilent.detectors.series import CLIPPED_NORM, UPDATE, VALUE, Bools, Series
from unsilent.events.event_kinds import LOGGER, join_names
from unsilent.monitor.exchange import RankRow
from unsilent.monitor.program_writes import ProgramWrites
from unsilent.monitor.recorder import Recorder
from unsilent.monitor.reporter import Reporter
from unsilent.monitor.rule_streams import Finding, RuleStreams, fingerprint_finding
from unsilent.monitor.sampling import CostMeter
from unsilent.monitor.signals.collector import SignalCollector
from unsilent.monitor.signals.row import Ints, SignalRow, SignalValues


class Waits:
    """Longest waits of series and tensors between two readings, in steps.

    Attributes:
        longest: Largest number of steps from one reading to the next.
    """

    def __init__(self) -> None:
        self.longest = 0
        self._read: Ints = np.zeros(0, np.int64)
        self._compared: dict[str, int] = {}

    def add(self, step: int, signals: SignalValues) -> None:
        """Add a step.

        The wait of a series that was never read before counts from the step in which it was first known.
        """
        new = len(signals.seen) - len(self._read)
        self._read = np.pad(self._read, (0, new), constant_values=step - 1 if len(self._read) else -1)
        steps = [int((step - self._read[signals.seen]).max(initial=0))]
        self._read[signals.seen] = step
        steps += [step - self._compared.get(name, step) for name in signals.compared]
        self._compared.update(dict.fromkeys(signals.compared, step))
        self.longest = max(self.longest, *steps)


FIRST_VALUES = 5
"""Number of first readings; a value that is not finite in one of them need not be finite."""


class InfiniteValues:
    """Finds values inside the model that are not finite in normal operation.

    Findings on these values would hide findings in other series.
    """

    def __init__(self) -> None:
        self._is_value: Bools = np.zeros(0, np.bool_)
        self._is_infinite: Bools = np.zeros(0, np.bool_)
        self._readings: Ints = np.zeros(0, np.int64)

    def leave_out(self, step: int, series: Sequence[Series], signals: SignalValues) -> SignalValues:
        """The signals of a step, without NaN and infinity in series where they are normal."""
        further = series[len(self._is_value) :]
        if further:
            self._is_value = np.append(self._is_value, [entry.feature == VALUE for entry in further])
            self._is_infinite = np.pad(self._is_infinite, (0, len(further)))
            self._readings = np.pad(self._readings, (0, len(further)))
        if not self._is_value.any():
            return signals
        self._readings += signals.seen
        bad = self._is_value & signals.seen & ~np.isfinite(signals.values)
        new = bad & ~self._is_infinite & (self._readings <= FIRST_VALUES)
        if new.any():
            self._is_infinite |= new
            names = dict.fromkeys(series[number].tensor for number in np.flatnonzero(new).tolist())
            logging.getLogger(LOGGER).warning(
                "step %d: %s has an element that is not finite in one of the first steps; from now on it is judged only where "
                "all of its elements are finite",
                step, ", ".join(names),
            )  # fmt: skip
        return signals._replace(seen=signals.seen & ~(bad & self._is_infinite))


SHARED = (UPDATE, CLIPPED_NORM)
"""Features that are computed from the gradients of all ranks."""


class StepJudge:
    """Applies the rules to the signals of each step, and reports the findings.

    Args:
        collector: Collector that makes the rows.
        streams: Rules that judge the series.
        costs: Costs of the monitor.
        reporter: Reporter of this rank.

    Attributes:
        recorder: Recorder that keeps all rows; ``None`` if they are not kept.
        waits: Steps between two readings of a tensor.
    """

    def __init__(
        self,
        collector: SignalCollector,
        streams: RuleStreams,
        costs: CostMeter,
        reporter: Reporter,
        recorder: Recorder | None,
    ) -> None:
        self._collector, self._streams, self._costs = collector, streams, costs
        self._reporter, self.recorder = reporter, recorder
        self._writes = ProgramWrites()
        self._seen: Bools = np.zeros(0, np.bool_)
        self._infinite = InfiniteValues()
        self._waiting: list[Finding] = []
        self.waits = Waits()

    def apart(self, reporter: Reporter, recorder: Recorder) -> StepJudge:
        """A judge with the same rules that starts from a copy of what this one has learnt.

        The new judge reports and learns separately.
        """
        judge = StepJudge(self._collector, self._streams, self._costs, reporter, recorder)
        judge._writes, judge._infinite = copy.deepcopy((self._writes, self._infinite))
        return judge

    def judge(self, row: SignalRow) -> RankRow:
        """Judge the signals of a step, and return the row of this rank."""
        series = self._collector.series
        signals = row.read(len(series))
        seconds = time.perf_counter() - self._costs.begun
        self.waits.add(row.step, signals)
        if self.recorder is not None:
            self.recorder.add(row.step, signals, seconds)
        if self._reporter.incident is not None:
            self._reporter.incident.add_row(row.step, series, signals, seconds)
        changed = self._writes.faults(row.step, signals.changed, signals.compared)
        findings = fingerprint_finding(changed, self._collector.state_names, len(signals.compared)) if changed else []
        findings += self._streams.judge(series, self._infinite.leave_out(row.step, series, signals), seconds)
        self._seen = np.pad(self._seen, (0, len(series) - len(self._seen))) | signals.seen
        is_new = self._reporter.findings(row.step, findings)
        findings, self._waiting = [*findings, *self._waiting], []
        score, cost = self._streams.take_largest_score, self._costs.share()
        self._reporter.summary(row.step, series, signals, score, cost, is_wanted=is_new)
        replicas = xxhash.xxh3_64_intdigest(signals.replica_sums.tobytes()) >> 1
        return _row(row.step, findings)._replace(changed=len(changed), replicas=replicas)

    def report_checks(self, findings: Sequence[tuple[int, Finding]]) -> RankRow:
        """Report findings of `StepChecks`, and return the row of this rank for the last of the steps."""
        for step, finding in findings:
            self._reporter.findings(step, [finding])
        return _row(findings[-1][0], [finding for _, finding in findings])

    def keep_for_next_row(self, findings: Sequence[tuple[int, Finding]]) -> None:
        """Keep findings until the next step that is read, when other ranks receive them."""
        self._waiting += [finding for _, finding in findings]

    def unseen(self) -> list[str]:
        """Names of the series that were never read."""
        series = self._collector.series
        seen = [*self._seen.tolist(), *[False] * (len(series) - len(self._seen))]
        return [full_name(entry) for entry, was_seen in zip(series, seen, strict=True) if not was_seen]

    def unjudged(self) -> int:
        """Number of series that were read but never judged."""
        return self._streams.unjudged(self._seen)

    def close(self) -> None:
        """Write the recording."""
        if self.recorder is not None:
            self.recorder.save(self._collector.series)


def _row(step: int, findings: Sequence[Finding]) -> RankRow:
    """The row of a rank for a step with these findings."""
    if not findings:
        return RankRow(step)
    worst = max(findings, key=lambda finding: (finding.level, finding.series.feature not in SHARED, finding.score))
    is_shared = worst.series.feature in SHARED
    row = RankRow(step, worst.level, worst.score, worst.number, int(is_shared), int(worst.is_new))
    return row._replace(has_shared=int(any(finding.series.feature in SHARED for finding in findings)))


def full_name(series: Series) -> str:
    """Name of a series: feature, tensor and statistic."""
    return join_names(*series[:3])
