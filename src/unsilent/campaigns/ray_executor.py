"""The executor on a Ray cluster, of one machine or many: plans and hands out trials, takes rows, survives lost nodes.

Every worker is held by a supervisor on its node (`unsilent.campaigns.ray_supervisor`), so crash and hang are outcomes by the
rules of one machine. A supervisor that is lost, or its node, is no outcome: rows that no proof covered and trials that it
had not answered go back into the queue. Its later messages are not heard, so nothing is stored twice. This process
imports no Ray (see `unsilent.campaigns.ray_bridge`).
"""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import Any

from unsilent.campaigns.line import Message
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.processes import SALVAGE_SECONDS, Refillable
from unsilent.campaigns.ray_launch import Cluster, Link, check_address
from unsilent.campaigns.ray_supervisor import Event, Job, given
from unsilent.campaigns.spec import CampaignSpec, Description, Json, Means, TrialId, TrialRow
from unsilent.campaigns.stopwatch import Stopwatch
from unsilent.errors import UnsilentError, UsageError

DEPTH_SECONDS = 2.0
DEEPEST = 2000
"""Work that is queued at a supervisor, in seconds and at most in trials, so that it never waits for the driver."""
PATIENCE = 120.0
"""Seconds without a single supervisor after which a campaign ends."""
MOST_LOSSES = 5
"""Supervisors that may be lost with the same trial, or one after the other while loading: then it is no accident."""


@dataclass(eq=False)
class _Supervisor:
    """A supervisor as the driver knows it: what it was given and no proof covers yet (oldest first), and rows of that."""

    number: int
    node: str = ""
    placed: bool = False
    ready: bool = False
    salvaged: bool = False
    given: dict[TrialId, None] = field(default_factory=dict)
    held: dict[TrialId, TrialRow] = field(default_factory=dict)
    cpu: float = 0.0
    pace: float = 0.05

    def release(self, trials: Iterable[TrialId]) -> list[TrialRow]:
        """The rows of these trials, now proven."""
        rows = [
            self.held.pop(trial) for trial in trials if trial in self.held
        ]  # all, but for an interrupt between them
        for row in rows:
            del self.given[row.trial]
        return rows


class RayExecutor:
    """``jobs`` workers on a cluster: the one at ``address``, or (None) one on this machine that ends with the executor."""

    def __init__(
        self,
        spec: CampaignSpec,
        *,
        jobs: int,
        deadline: float | None,
        observer: Observer,
        means: Means,
        address: str | None = None,
    ) -> None:
        check_address(address)
        self._cluster = Cluster(address, jobs * spec.threads)
        self._job = Job(
            spec, deadline, replace(means, jobs=jobs), os.getcwd(), given(os.environ, address is None), address is None
        )
        self._spec, self._jobs, self._observer = spec, jobs, observer
        self._gang = 1
        self._link: Link | None = None
        self._crew: dict[int, _Supervisor] = {}
        self._count = self._refused = self._stillborn = 0
        self._unlucky: Counter[TrialId] = Counter()
        self._numbers: dict[tuple[int, int], int] = {}
        self._backlog: deque[TrialId] = deque()
        self._description: Description | None = None
        self._pack = 1
        self._explanation: Json | None = None
        self._nodes: list[dict[str, Any]] | None = None
        self._lonely = time.monotonic()
        self._cpu = self._bridge_cpu = self._told = 0.0
        self._watch = Stopwatch()

    # -- the crew ----------------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Join the cluster, let a first worker load the workload, and return what it found."""
        if self._description is None:
            self._link = self._link or Link(self._cluster, self._job)
            self._until(lambda: self._description is not None)
        assert self._description is not None
        return self._description

    def explain(self) -> Json:
        """What the engine of a worker does."""
        self.describe()
        self._give(next(iter(self._crew.values())), [], "explain")
        self._until(lambda: self._explanation is not None)
        assert self._explanation is not None
        return self._explanation

    def _until(self, done: Callable[[], bool]) -> None:
        self._lonely = time.monotonic()
        while not done():
            if not self._crew:
                self._hire()
            self._listen()

    def _hire(self) -> None:
        number, self._count = self._count, self._count + 1
        self._crew[number] = _Supervisor(number)
        self._send("hire", number, self._gang * self._spec.threads)

    def _staff(self) -> None:
        """Have as many supervisors as were asked for, less those that were refused."""
        while len(self._crew) < self._jobs // self._gang - self._refused:
            self._hire()

    def _welcome(self, one: _Supervisor, found: Description, pack: int, node: str) -> None:
        one.node = node
        if self._description is None:
            self._description, self._pack = found, pack
            self._measure_gang(one, found)
        first = self._description
        changed = [k for k in found.fingerprint if found.fingerprint[k] != first.fingerprint.get(k)]
        changed += [k for k in ("unsilent",) if found.versions[k] != first.versions[k]]
        if changed or found.campaign != first.campaign:
            self._refuse(
                one, f"does not reproduce the golden fingerprint ({', '.join(changed) or 'its targets'} differ)"
            )
            return
        one.ready, one.pace, self._stillborn = True, max(found.golden_seconds, 1e-4), 0

    def _measure_gang(self, one: _Supervisor, found: Description) -> None:
        """A workload that says ``world_size`` starts so many processes itself: its node must have CPUs for them all."""
        self._gang = found.info.get("world_size", 1)
        if not isinstance(self._gang, int) or self._gang < 1:
            raise UsageError(
                f"world_size of {self._spec.workload!r} is {self._gang!r}; expected a whole number above 0"
            )
        if self._gang > self._jobs:
            raise UsageError(
                f"a trial of {self._spec.workload!r} runs {self._gang} processes, --jobs is {self._jobs}; "
                f"use --jobs {self._gang} or more"
            )
        if self._gang > 1:
            self._drop(one)
            self._hire()

    def _refuse(self, one: _Supervisor, why: str) -> None:
        """Go on without it, and without another in its place: Ray would choose the same node again."""
        self._drop(one)
        self._refused += 1
        node = f"node {one.node}" if one.node else "a node"
        if self._description is None or self._jobs // self._gang <= self._refused:
            raise UsageError(f"no node is left to run trials on: {node} {why}")
        self._observer.say(f"{node} {why}: its worker is not used")

    def _drop(self, one: _Supervisor) -> None:
        del self._crew[one.number]
        self._cpu += one.cpu
        self._send("drop", one.number)

    def _lose(self, one: _Supervisor, why: str, unfit: bool) -> None:
        """It is gone: what it had not proven is run again, at the head of the queue. ``unfit``: it could not even start."""
        if unfit:
            self._refuse(one, f"cannot start a worker ({why}); install the same Unsilent there")
            return
        del self._crew[one.number]
        self._cpu += one.cpu
        self._backlog.extendleft(reversed(one.given))
        self._observer.say(
            f"a worker on {one.node or 'a node'} was lost ({why}); {len(one.given)} trials of it are run elsewhere"
        )
        self._stillborn += not one.ready
        if self._stillborn > max(MOST_LOSSES, 2 * self._jobs):
            raise UnsilentError(
                f"{self._stillborn} workers were lost while loading ({why}); run the workload alone to see why"
            )
        self._unlucky.update(list(one.given))
        for trial in one.given:
            if self._unlucky[trial] >= MOST_LOSSES:
                raise UnsilentError(
                    f"{MOST_LOSSES} workers in turn were lost with trial {trial} ({why}); what was stored is safe: "
                    "see what ends them, or run the same command again without --executor ray"
                )

    # -- messages ----------------------------------------------------------------------------------------------

    def _send(self, *message: object) -> None:
        assert self._link is not None
        self._link.send(*message)

    def _give(self, one: _Supervisor, trials: list[TrialId], *asked: str) -> None:
        self._send("give", one.number, pickle.dumps(trials), asked)

    def _listen(self) -> list[TrialRow]:
        """Handle one message, if one comes soon, and return the rows it proves."""
        assert self._link is not None
        message = self._link.receive(0.2)
        self._check_alone()
        return [] if message is None else self._handle(message)

    def _handle(self, message: Message) -> list[TrialRow]:
        kind, number = message[0], message[1]
        if kind == "seen":
            self._nodes = message[1]
        elif number not in self._crew:
            pass  # dropped in the meantime
        elif kind == "gone":
            self._lose(self._crew[number], *message[2:])
        elif kind == "news":
            one = self._crew[number]
            one.placed, one.cpu, self._bridge_cpu = True, message[3], message[4]
            events: list[Event] = pickle.loads(message[2])  # noqa: S301 - our own supervisor's
            return [row for event in events for row in self._take(one, event)]
        return []

    def _take(self, one: _Supervisor, event: Event) -> list[TrialRow]:
        kind = event[0]
        if kind == "row":
            self._note(one, event[1])
        elif kind == "proven":
            for trial in event[1]:
                self._unlucky.pop(trial, None)
            return one.release(event[1])
        elif kind == "ready":
            self._welcome(one, *event[1:])
        elif kind == "loading":
            if self._description is None:
                self._observer.loading(*event[1:])
        elif kind == "lost":
            self._observer.worker_lost(*event[1:])
        elif kind == "explained":
            self._explanation = event[1]
        elif kind == "salvaged":
            one.salvaged = True
        elif kind == "failed":
            one.node = event[2]
            if one.ready or self._description is None:
                raise event[1]
            self._refuse(one, f"cannot load the workload ({event[1]})")
        return []

    def _note(self, one: _Supervisor, row: TrialRow) -> None:
        """A row that is not proven yet. Workers are numbered over all supervisors."""
        number = self._numbers.setdefault((one.number, row.worker), len(self._numbers))
        one.held[row.trial] = row = replace(row, worker=number)
        one.pace = 0.9 * one.pace + 0.1 * max(row.seconds, 1e-5)
        self._observer.trial(row)

    def _check_alone(self) -> None:
        """End where no supervisor has had a place for long; what the cluster looks like is asked a little before."""
        now = time.monotonic()
        if any(one.placed for one in self._crew.values()):
            self._lonely, self._nodes = now, None
        elif now - self._lonely > PATIENCE:
            raise UnsilentError(
                f"no worker has found a place on {self._cluster} for {PATIENCE:.0f} s ({self._seen()}); "
                "what was stored is safe: run the same command again when there is room"
            )
        elif now - self._lonely > 0.8 * PATIENCE and self._nodes is None:
            self._nodes = []
            self._send("look")

    def _seen(self) -> str:
        nodes = self._nodes or []
        largest = max((node["CPU"] for node in nodes), default=0)
        return (
            f"{len(nodes)} nodes, the largest with {largest:g} CPUs; a worker takes {self._gang * self._spec.threads}"
        )

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[TrialRow]]:
        """Run trials on all nodes; rows come together as they are proven."""
        self.describe()
        self._backlog = deque()
        source = Refillable(self._backlog, iter(trials))
        self._lonely = time.monotonic()
        while True:
            for one in [s for s in self._crew.values() if s.ready]:
                self._feed(one, source)
            if source.any_left():
                self._staff()
            elif not any(one.given for one in self._crew.values()):
                return
            yield self._listen()

    def _feed(self, one: _Supervisor, source: Refillable) -> None:
        want = max(self._pack, min(DEEPEST, int(DEPTH_SECONDS / one.pace))) + 1
        queued = len(one.given) - len(one.held)
        if queued > want // 2:
            return
        chunk = list(islice(source, want - queued))
        if chunk:
            one.given.update(dict.fromkeys(chunk))
            self._give(one, chunk)

    # -- end ---------------------------------------------------------------------------------------------------

    def spent(self) -> tuple[float, float]:
        """Wall and CPU seconds since it was made or this was last asked; of supervisors and workers what they have told."""
        wall, cpu = self._watch.lap()
        told, self._told = self._told, self._cpu + self._bridge_cpu + sum(s.cpu for s in self._crew.values())
        return wall, cpu + self._told - told

    def salvage(self) -> list[TrialRow]:
        """After an interrupt: the rows that a proof, asked for now and waited for a little, still covers."""
        rows: list[TrialRow] = []
        asked = [s for s in self._crew.values() if s.held]
        for one in asked:
            one.salvaged = False
            self._give(one, [], "salvage")
        end = time.monotonic() + SALVAGE_SECONDS + 1
        try:
            while any(not s.salvaged and s.number in self._crew for s in asked) and time.monotonic() < end:
                rows += self._listen()
        except UnsilentError:
            pass  # what has been proven is kept
        return rows

    def close(self) -> None:
        """End all workers, and a cluster that is ours."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
