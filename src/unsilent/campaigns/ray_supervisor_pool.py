"""The supervisors that run a campaign on a cluster: started, admitted or rejected, and replaced when lost.

The loss of supervisors never loses rows: trials of a lost supervisor that no proof covered run again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.ray_launch import Cluster
from unsilent.campaigns.spec import Baseline, CampaignRow, Spec, TrialId

PLACEMENT_TIMEOUT = 120.0
"""Seconds without a single supervisor placed on a node, after which a campaign ends."""
ANSWER_SECONDS = 30.0
"""Further seconds for the cluster to list its nodes."""
MOST_LOSSES = 5
"""Most supervisors that may be lost with the same trial, or one after the other while loading; more are not a coincidence."""


@dataclass(eq=False)
class PooledSupervisor:
    """The driver's record of a supervisor: its trials that are not verified yet (oldest first) and their rows."""

    number: int
    node: str = ""
    is_placed: bool = False
    ready: bool = False
    salvaged: bool = False
    unfinished_trials: dict[TrialId, None] = field(default_factory=dict)
    unverified_rows: dict[TrialId, CampaignRow] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    seconds_per_trial: float = 0.05


class SupervisorPool:
    """The supervisors of a campaign.

    ``jobs`` is the number of processes, and ``send`` sends a command to the bridge.
    """

    def __init__(self, spec: Spec, jobs: int, cluster: Cluster, observer: Observer, send: Callable[..., None]) -> None:
        self._spec, self._jobs, self._cluster, self._observer, self._send = spec, jobs, cluster, observer, send
        self.members: dict[int, PooledSupervisor] = {}
        self.baseline: Baseline | None = None
        self.max_trials_together = 1
        self._gang = 1
        self._count = self._refused = self._stillborn = 0
        self._losses: Counter[TrialId] = Counter()
        self._gone_cpu = 0.0
        self._asked = False
        self._nodes: list[dict[str, Any]] | None = None
        self._lonely = time.monotonic()

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that all supervisors have reported, including those of lost supervisors."""
        return self._gone_cpu + sum(member.cpu_seconds for member in self.members.values())

    @property
    def wanted_supervisors(self) -> int:
        """The number of supervisors that the campaign should have, without those that were rejected."""
        return self._jobs // self._gang - self._refused

    def start_missing_supervisors(self, most: int | None = None) -> None:
        """Start supervisors until all wanted ones exist, or at most ``most``."""
        while len(self.members) < min(self.wanted_supervisors, most or self.wanted_supervisors):
            self._hire()

    def _hire(self) -> None:
        number, self._count = self._count, self._count + 1
        self.members[number] = PooledSupervisor(number)
        self._send("hire", number, self._gang * self._spec.threads)

    def admit_supervisor(self, supervisor: PooledSupervisor, baseline: Baseline, pack: int, node: str) -> None:
        """Admit a supervisor that has loaded the workload.

        The first one defines the campaign; others with another baseline are rejected.
        """
        supervisor.node = node
        if self.baseline is None:
            self.baseline, self.max_trials_together = baseline, pack
            if self._measure_gang(supervisor, baseline) > 1:
                return
        first = self.baseline
        changed = [k for k in baseline.fingerprint if baseline.fingerprint[k] != first.fingerprint.get(k)]
        changed += ["unsilent"] if baseline.versions.get("unsilent") != first.versions.get("unsilent") else []
        if changed or baseline.campaign != first.campaign:
            what = ", ".join(changed) or "its targets"
            self.reject_supervisor(supervisor, f"does not reproduce the golden run of the first worker ({what} differ)")
            return
        supervisor.ready, supervisor.seconds_per_trial, self._stillborn = True, max(baseline.golden_seconds, 1e-4), 0

    def _measure_gang(self, member: PooledSupervisor, baseline: Baseline) -> int:
        """The number of processes that one trial starts: ``world_size`` of the workload.

        A node must have CPUs for all of them.
        """
        self._gang = baseline.info.get("world_size", 1)
        if not isinstance(self._gang, int) or self._gang < 1:
            raise UsageError(
                f"world_size of {self._spec.workload!r} is {self._gang!r}; expected a whole number above 0"
            )
        if self._gang > self._jobs:
            raise UsageError(
                f"a trial of {self._spec.workload!r} runs {self._gang} processes, but --jobs is {self._jobs}; "
                f"use --jobs {self._gang} or more"
            )
        if self._gang > 1:  # its place is too small
            self._drop(member)
            self._hire()
        return self._gang

    def reject_supervisor(self, supervisor: PooledSupervisor, why: str) -> None:
        """Remove a supervisor without a replacement, as Ray would choose the same node again."""
        self._drop(supervisor)
        self._refused += 1
        node = f"node {supervisor.node}" if supervisor.node else "a node"
        if self.wanted_supervisors <= 0:
            raise UsageError(f"no node is left to run trials on: {node} {why}")
        self._observer.say(f"{node} {why}: the campaign continues without this worker")

    def _drop(self, member: PooledSupervisor) -> None:
        del self.members[member.number]
        self._gone_cpu += member.cpu_seconds
        self._send("drop", member.number)

    def handle_lost_supervisor(self, supervisor: PooledSupervisor, why: str) -> list[TrialId]:
        """Remove a lost supervisor and return the trials to run again.

        Raises ``UnsilentError`` if this has happened too often, as a trial may crash its node each time.
        """
        del self.members[supervisor.number]
        self._gone_cpu += supervisor.cpu_seconds
        node = supervisor.node or "a node"
        self._observer.say(
            f"a worker on {node} was lost ({why}); its {len(supervisor.unfinished_trials)} unfinished trials run on other workers"
        )
        self._stillborn += not supervisor.ready
        if self._stillborn > max(MOST_LOSSES, 2 * self._jobs):
            raise UnsilentError(
                f"{self._stillborn} workers were lost while loading the workload ({why}); run the workload alone to see why"
            )
        self._losses.update(list(supervisor.unfinished_trials))
        for trial in supervisor.unfinished_trials:
            if self._losses[trial] >= MOST_LOSSES:
                raise UnsilentError(
                    f"{MOST_LOSSES} workers were lost while they had trial {trial} to run ({why}); stored results are safe: "
                    "find out what ends the workers, or run the same command again with --executor serial"
                )
        return list(supervisor.unfinished_trials)

    def take_verified_rows(self, supervisor: PooledSupervisor, trials: list[TrialId]) -> list[CampaignRow]:
        """Remove and return the rows of these trials, which are verified now."""
        rows = [supervisor.unverified_rows.pop(trial) for trial in trials if trial in supervisor.unverified_rows]
        for row in rows:
            del supervisor.unfinished_trials[row.trial]
        for trial in trials:
            self._losses.pop(trial, None)
        return rows

    # -- room on the cluster -----------------------------------------------------------------------------------

    def start_placement_timeout(self) -> None:
        """Start the timeout for placing the first supervisor on a node."""
        self._lonely = time.monotonic()

    def check_placement_timeout(self) -> None:
        """Raise ``UnsilentError`` if no supervisor was placed on a node in time.

        The bridge is asked for the nodes of the cluster shortly before.
        """
        now = time.monotonic()
        if any(member.is_placed for member in self.members.values()):
            self._lonely, self._asked, self._nodes = now, False, None
        elif now - self._lonely > PLACEMENT_TIMEOUT + (ANSWER_SECONDS if self._nodes is None else 0):
            raise UnsilentError(
                f"no worker could be placed on {self._cluster} for {PLACEMENT_TIMEOUT:.0f} s ({self._seen()}); "
                "stored results are safe: run the same command again when resources are free"
            )
        elif now - self._lonely > 0.8 * PLACEMENT_TIMEOUT and not self._asked:
            self._asked = True
            self._send("look")

    def note_cluster_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """Store the nodes that the cluster has."""
        self._nodes = nodes

    def _seen(self) -> str:
        nodes = self._nodes
        if nodes is None:
            return "the cluster does not report its nodes"
        largest = max((node["CPU"] for node in nodes), default=0)
        takes = self._gang * self._spec.threads
        return f"{len(nodes)} nodes, the largest with {largest:g} CPUs; a worker needs {takes}"
