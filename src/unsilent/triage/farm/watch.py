"""What a monitor reads of a simulated job and finds in it: the real rules and digests, in all ranks of one process."""

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
    """The name of the host that a rank is said to be on."""
    return f"node-{rank}"


class Watch:
    """The monitor of all ranks.

    Args:
        first: The step from which alarms count; those before it were looked at and dismissed, and bits are not compared.

    Attributes:
        series: That are read.
        rows: float64[ranks, series] of each step.
        alarms: Of all ranks, from ``first`` on.
        first_suspect: Of the first step with an alarm; None: there was none.
    """

    def __init__(self, job: SimulatedJob, first: int) -> None:
        self._job, self._first = job, first
        named = [*job.replicas[0].model.named_parameters()]
        self.series = (
            *(Series(GRADIENT, name, kind, one.numel(), one.dim()) for name, one in named for kind in (L2, LARGEST)),
            Series(LOSS, "", NUMBER),
        )
        self._streams = [RuleStreams([make_rule(text) for text in RULES]) for _ in job.replicas]
        infos = [RankInfo(one.rank, host_of(one.rank), DEVICE, {}, ()) for one in job.replicas]
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
        """By step and rank; their time is their step."""
        every = [replace(one, time=float(one.step)) for reporter in self._reporters for one in reporter.alarms]
        return sorted(every, key=lambda one: (one.step, one.rank))

    def begin(self) -> None:
        """Compare bits with those after the step before: what changed without that torch wrote it is a fault."""
        now = [digests_of([entry.bits() for entry in own]).tolist() for own in self._entries]
        self._changed = [
            [
                entry.name
                for entry, old, new, version in zip(own, before, after, versions, strict=True)
                if old != new and entry.versions() == version
            ]
            for own, before, after, versions in zip(self._entries, self._digests, now, self._versions, strict=True)
        ] or [[] for _ in self._job.replicas]

    def read(self) -> bool:
        """Read and judge the gradients of the step; whether a rank, or a comparison of ranks, raises an alarm."""
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
            worst = max(findings, key=lambda one: (one.level, one.score), default=None)
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
        """Take the digests after a step."""
        if self._job.step < self._first - 1:
            return
        if not self._entries:
            self._entries = [
                state_entries([*one.model.named_parameters()], one.optimizer, 0) for one in self._job.replicas
            ]
        self._digests = [digests_of([entry.bits() for entry in own]).tolist() for own in self._entries]
        self._versions = [[entry.versions() for entry in own] for own in self._entries]
        self._replicas = [
            hash(tuple(number for entry, number in zip(own, numbers, strict=True) if entry.is_parameter))
            for own, numbers in zip(self._entries, self._digests, strict=True)
        ]

    @torch.no_grad()
    def _values(self, rank: int) -> list[float]:
        own = self._job.replicas[rank]
        norms, largest = torch._foreach_norm(own.gradients), torch._foreach_norm(own.gradients, float("inf"))
        pairs = torch.stack([torch.stack(norms), torch.stack(largest)], 1).double().flatten().tolist()
        return [*pairs, own.loss]


def tensor_of(alarms: list[Alarm], suspect: Suspect) -> str:
    """The series of the worst alarm of the suspect, or of all where none is known; as a verdict has it."""
    own = [one for one in alarms if suspect.rank in (-1, one.rank)]
    worst = max(own, key=lambda one: (one.feature == FINGERPRINT, one.score), default=None)
    return worst.series_name if worst else ""
