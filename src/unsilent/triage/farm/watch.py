"""The monitor's series and alarms for a simulated job, computed for all ranks in one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from unsilent.detectors.nonfinite import Nonfinite
from unsilent.detectors.rule import ALARM
from unsilent.detectors.rules import make_rule
from unsilent.detectors.series import GRADIENT, L2, LARGEST, LOSS, NUMBER, Floats, Series
from unsilent.events.event_kinds import FINGERPRINT, Alarm
from unsilent.incidents.planted_job import RULE
from unsilent.monitor.attribution import Suspect, divergent_replicas, suspect_of
from unsilent.monitor.exchange import RankInfo, RankRow
from unsilent.monitor.reporter import Reporter
from unsilent.monitor.rule_streams import Finding, RuleStreams, fingerprint_finding
from unsilent.monitor.signals.fingerprints import StateEntry, state_entries
from unsilent.monitor.signals.row import SignalValues
from unsilent.recovery.digests import digests_of
from unsilent.triage.farm.simulated_job import SimulatedJob

RULES = (RULE, Nonfinite.name)
SETTINGS = {"rules": RULES, "fingerprint": "full", "sampling": "fixed:1", "on_alarm": "log"}
DEVICE = "cpu"


def host_of(rank: int) -> str:
    """The made-up name of a rank's host."""
    return f"node-{rank}"


class Watch:
    """The monitor of all ranks in a simulated job.

    Args:
        first: The step from which alarms count. Earlier alarms were examined and dismissed, and bits are not compared before
            it.

    Attributes:
        series: Series that are read.
        rows: float64[ranks, series] of each step.
        alarms: Alarms of all ranks, from ``first`` on.
        first_suspect: Suspect of the first step with an alarm; ``None`` if there was none.
    """

    def __init__(self, job: SimulatedJob, first: int) -> None:
        self._job, self._first = job, first
        named = [*job.replicas[0].model.named_parameters()]
        self.series = (
            *(
                Series(GRADIENT, name, kind, parameter.numel(), parameter.dim())
                for name, parameter in named
                for kind in (L2, LARGEST)
            ),
            Series(LOSS, "", NUMBER),
        )
        self._streams = [RuleStreams([make_rule(text) for text in RULES]) for _ in job.replicas]
        infos = [RankInfo(replica.rank, host_of(replica.rank), DEVICE, {}, ()) for replica in job.replicas]
        self._reporters = [Reporter(info, infos, []) for info in infos]
        self._entries: list[list[StateEntry]] = []
        self._digests: list[list[int]] = []
        self._versions: list[list[list[tuple[int, int]]]] = []
        self._changed: list[list[str]] = [[] for _ in job.replicas]
        self._replicas = [0] * len(job.replicas)
        self.rows: list[Floats] = []
        self.first_suspect: Suspect | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms ordered by step and rank, with the step as their time."""
        every = [replace(alarm, time=float(alarm.step)) for reporter in self._reporters for alarm in reporter.alarms]
        return sorted(every, key=lambda alarm: (alarm.step, alarm.rank))

    def begin(self) -> None:
        """Find tensors whose bits changed since the previous step without a write by torch."""
        now = [digests_of([entry.bits() for entry in entries]).tolist() for entries in self._entries]
        self._changed = [
            [
                entry.name
                for entry, old, new, version in zip(entries, before, after, versions, strict=True)
                if old != new and entry.versions() == version
            ]
            for entries, before, after, versions in zip(self._entries, self._digests, now, self._versions, strict=True)
        ] or [[] for _ in self._job.replicas]

    def read(self) -> bool:
        """Judge the gradients and losses of the step, and return whether there is an alarm."""
        row = np.array([self._values(rank) for rank in range(len(self._job.replicas))])
        self.rows.append(row)
        step, counts = self._job.step, self._job.step >= self._first
        rows = []
        for rank, values in enumerate(row):
            changed = self._changed[rank]
            names = [entry.name for entry in self._entries[rank]] if changed else []
            signals = SignalValues(values, np.ones(len(values), np.bool_), (), (), np.zeros(0, np.int64))
            findings: list[Finding] = fingerprint_finding(changed, names, len(names)) if changed else []
            findings += self._streams[rank].judge(self.series, signals, float(step))
            if counts:
                self._reporters[rank].findings(step, findings)
            worst = max(findings, key=lambda finding: (finding.level, finding.score), default=None)
            level, score, number = (worst.level, worst.score, worst.number) if worst else (0, 0.0, -1)
            rows.append(RankRow(step, level, score, number, changed=len(changed), replicas=self._replicas[rank]))
        if not counts:
            return False
        divergent = divergent_replicas(self._replicas)
        for reporter in self._reporters:
            reporter.replicas(step, divergent, len(set(self._replicas)), not any(row.changed for row in rows))
        is_alarm = any(row.level == ALARM for row in rows) or bool(divergent)
        if is_alarm and self.first_suspect is None:
            self.first_suspect = suspect_of(rows)
        return is_alarm

    def end(self) -> None:
        """Compute the digests of parameters and optimizer state after a step."""
        if self._job.step < self._first - 1:
            return
        if not self._entries:
            self._entries = [
                state_entries([*replica.model.named_parameters()], replica.optimizer, 0)
                for replica in self._job.replicas
            ]
        self._digests = [digests_of([entry.bits() for entry in entries]).tolist() for entries in self._entries]
        self._versions = [[entry.versions() for entry in entries] for entries in self._entries]
        self._replicas = [
            hash(tuple(number for entry, number in zip(entries, numbers, strict=True) if entry.is_parameter))
            for entries, numbers in zip(self._entries, self._digests, strict=True)
        ]

    @torch.no_grad()
    def _values(self, rank: int) -> list[float]:
        replica = self._job.replicas[rank]
        norms, largest = torch._foreach_norm(replica.gradients), torch._foreach_norm(replica.gradients, float("inf"))
        pairs = torch.stack([torch.stack(norms), torch.stack(largest)], 1).double().flatten().tolist()
        return [*pairs, replica.loss]


def tensor_of(alarms: list[Alarm], suspect: Suspect) -> str:
    """Name of the series with the worst alarm of the suspect, or of all ranks without a suspect."""
    of_suspect = [alarm for alarm in alarms if suspect.rank in (-1, alarm.rank)]
    worst = max(of_suspect, key=lambda alarm: (alarm.feature == FINGERPRINT, alarm.score), default=None)
    return worst.series_name if worst else ""
