"""Who works for a campaign on a cluster: supervisors are hired, welcomed or refused, and lost.

What may be lost are places to run trials, never rows: a supervisor that is lost hands back what no proof covered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from unsilent.campaigns.observer import Observer
from unsilent.campaigns.ray_launch import Cluster
from unsilent.campaigns.spec import Baseline, Row, Spec, TrialId
from unsilent.errors import UnsilentError, UsageError

PATIENCE = 120.0
"""Seconds without a single supervisor that has a place, after which a campaign ends."""
ANSWER_SECONDS = 30.0
"""Seconds more in which the cluster may say what it has."""
MOST_LOSSES = 5
"""Supervisors that may be lost with the same trial, or one after the other while loading: then it is no accident."""


@dataclass(eq=False)
class Member:
    """A supervisor as the driver knows it: what it was given and no proof covers yet (oldest first), and rows of that."""

    number: int
    node: str = ""
    placed: bool = False
    ready: bool = False
    salvaged: bool = False
    given: dict[TrialId, None] = field(default_factory=dict)
    held: dict[TrialId, Row] = field(default_factory=dict)
    cpu: float = 0.0
    pace: float = 0.05

    def release(self, trials: Iterable[TrialId]) -> list[Row]:
        """The rows of these trials, now proven."""
        rows = [
            self.held.pop(trial) for trial in trials if trial in self.held
        ]  # all, but for an interrupt between them
        for row in rows:
            del self.given[row.trial]
        return rows


class Crew:
    """The supervisors of a campaign of ``spec`` with ``jobs`` processes; ``send`` takes orders to the bridge."""

    def __init__(self, spec: Spec, jobs: int, cluster: Cluster, observer: Observer, send: Callable[..., None]) -> None:
        self._spec, self._jobs, self._cluster, self._observer, self._send = spec, jobs, cluster, observer, send
        self.members: dict[int, Member] = {}
        self.description: Baseline | None = None
        self.pack = 1
        self._gang = 1
        self._count = self._refused = self._stillborn = 0
        self._losses: Counter[TrialId] = Counter()
        self._gone_cpu = 0.0
        self._asked = False
        self._nodes: list[dict[str, Any]] | None = None
        self._lonely = time.monotonic()

    @property
    def cpu(self) -> float:
        """CPU seconds that all supervisors have told, those that are gone included."""
        return self._gone_cpu + sum(one.cpu for one in self.members.values())

    @property
    def places(self) -> int:
        """How many supervisors there should be: as asked, less those that were refused."""
        return self._jobs // self._gang - self._refused

    def staff(self, most: int | None = None) -> None:
        """Hire until all places (or ``most`` of them) are taken."""
        while len(self.members) < min(self.places, most or self.places):
            self._hire()

    def _hire(self) -> None:
        number, self._count = self._count, self._count + 1
        self.members[number] = Member(number)
        self._send("hire", number, self._gang * self._spec.threads)

    def welcome(self, one: Member, baseline: Baseline, pack: int, node: str) -> None:
        """It has loaded the workload. The first one says what the campaign is; who finds something else is refused."""
        one.node = node
        if self.description is None:
            self.description, self.pack = baseline, pack
            if self._measure_gang(one, baseline) > 1:
                return
        first = self.description
        changed = [k for k in baseline.fingerprint if baseline.fingerprint[k] != first.fingerprint.get(k)]
        changed += ["unsilent"] if baseline.versions.get("unsilent") != first.versions.get("unsilent") else []
        if changed or baseline.campaign != first.campaign:
            what = ", ".join(changed) or "its targets"
            self.refuse(one, f"does not reproduce the golden fingerprint ({what} differ)")
            return
        one.ready, one.pace, self._stillborn = True, max(baseline.golden_seconds, 1e-4), 0

    def _measure_gang(self, one: Member, baseline: Baseline) -> int:
        """A workload that says ``world_size`` starts so many processes itself: its node must have CPUs for them all."""
        self._gang = baseline.info.get("world_size", 1)
        if not isinstance(self._gang, int) or self._gang < 1:
            raise UsageError(
                f"world_size of {self._spec.workload!r} is {self._gang!r}; expected a whole number above 0"
            )
        if self._gang > self._jobs:
            raise UsageError(
                f"a trial of {self._spec.workload!r} runs {self._gang} processes, --jobs is {self._jobs}; "
                f"use --jobs {self._gang} or more"
            )
        if self._gang > 1:  # its place is too small
            self._drop(one)
            self._hire()
        return self._gang

    def refuse(self, one: Member, why: str) -> None:
        """Go on without it, and without another in its place: Ray would choose the same node again."""
        self._drop(one)
        self._refused += 1
        node = f"node {one.node}" if one.node else "a node"
        if self.places <= 0:
            raise UsageError(f"no node is left to run trials on: {node} {why}")
        self._observer.say(f"{node} {why}: its worker is not used")

    def _drop(self, one: Member) -> None:
        del self.members[one.number]
        self._gone_cpu += one.cpu
        self._send("drop", one.number)

    def lose(self, one: Member, why: str) -> list[TrialId]:
        """It is gone; returns the trials to run again.

        Raises ``UnsilentError`` where that has happened too often: a trial may bring down its node each time.
        """
        del self.members[one.number]
        self._gone_cpu += one.cpu
        node = one.node or "a node"
        self._observer.say(f"a worker on {node} was lost ({why}); {len(one.given)} trials of it are run elsewhere")
        self._stillborn += not one.ready
        if self._stillborn > max(MOST_LOSSES, 2 * self._jobs):
            raise UnsilentError(
                f"{self._stillborn} workers were lost while loading ({why}); run the workload alone to see why"
            )
        self._losses.update(list(one.given))
        for trial in one.given:
            if self._losses[trial] >= MOST_LOSSES:
                raise UnsilentError(
                    f"{MOST_LOSSES} workers in turn were lost with trial {trial} ({why}); what was stored is safe: "
                    "see what ends them, or run the same command again with --executor serial"
                )
        return list(one.given)

    def proven(self, one: Member, trials: list[TrialId]) -> list[Row]:
        """The rows of these trials."""
        for trial in trials:
            self._losses.pop(trial, None)
        return one.release(trials)

    # -- room on the cluster -----------------------------------------------------------------------------------

    def expect(self) -> None:
        """From now on somebody should have a place."""
        self._lonely = time.monotonic()

    def check_alone(self) -> None:
        """Raise ``UnsilentError`` where nobody has had a place for long; what the cluster has is asked a little before."""
        now = time.monotonic()
        if any(one.placed for one in self.members.values()):
            self._lonely, self._asked, self._nodes = now, False, None
        elif now - self._lonely > PATIENCE + (ANSWER_SECONDS if self._nodes is None else 0):
            raise UnsilentError(
                f"no worker has found a place on {self._cluster} for {PATIENCE:.0f} s ({self._seen()}); "
                "what was stored is safe: run the same command again when there is room"
            )
        elif now - self._lonely > 0.8 * PATIENCE and not self._asked:
            self._asked = True
            self._send("look")

    def seen(self, nodes: list[dict[str, Any]]) -> None:
        """What the cluster has."""
        self._nodes = nodes

    def _seen(self) -> str:
        nodes = self._nodes
        if nodes is None:
            return "it does not say what it has"
        largest = max((node["CPU"] for node in nodes), default=0)
        takes = self._gang * self._spec.threads
        return f"{len(nodes)} nodes, the largest with {largest:g} CPUs; a worker takes {takes}"
