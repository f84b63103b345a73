"""The executor on a Ray cluster, of one machine or many: hands out trials, takes rows, survives lost nodes.

Every worker is held by a supervisor on its node (`unsilent.campaigns.ray_supervisor`), so crash and hang are outcomes by the
rules of one machine. A supervisor that is lost, or its node, is no outcome: rows that no proof covered and trials that it
had not answered go back into the queue. Its later messages are not heard, so nothing is stored twice. This process
imports no Ray (see `unsilent.campaigns.ray_bridge`).
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from unsilent.campaigns.line import Message
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.processes import SALVAGE_SECONDS, Refillable
from unsilent.campaigns.ray_crew import Crew, Member
from unsilent.campaigns.ray_launch import Cluster, Link, check_address
from unsilent.campaigns.ray_supervisor import Event, Job, given
from unsilent.campaigns.spec import Baseline, Means, Row, Spec, TrialId
from unsilent.campaigns.stopwatch import Stopwatch
from unsilent.closing import Closing
from unsilent.errors import UnsilentError

DEPTH_SECONDS = 2.0
DEEPEST = 2000
"""Work that is queued at a supervisor, in seconds and at most in trials, so that it never waits for the driver."""


class RayExecutor(Closing):
    """``jobs`` workers on a cluster: the one at ``address``, or (None) one on this machine that ends with the executor.

    Raises:
        UsageError: Ray is not installed, or nobody answers at ``address``.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        jobs: int,
        deadline: float | None,
        observer: Observer,
        means: Means,
        address: str | None = None,
    ) -> None:
        check_address(address)
        local, self._observer = address is None, observer
        self._cluster = Cluster(address, jobs * spec.threads)
        self._job = Job(spec, deadline, replace(means, jobs=jobs), os.getcwd(), given(os.environ, local), local)
        self._crew = Crew(spec, jobs, self._cluster, observer, self._send)
        self._link: Link | None = None
        self._backlog: deque[TrialId] = deque()
        self._numbers: dict[tuple[int, int], int] = {}
        self._bridge_cpu = self._reported = 0.0
        self._watch = Stopwatch()

    def describe(self) -> Baseline:
        """Join the cluster, let a first worker load the workload, and return what it found."""
        if self._crew.description is None:
            self._link = self._link or Link(self._cluster, self._job)
            self._crew.expect()
            while self._crew.description is None:
                self._crew.staff(1)
                self._listen()
        assert self._crew.description is not None
        return self._crew.description

    # -- messages ----------------------------------------------------------------------------------------------

    def _send(self, *message: object) -> None:
        assert self._link is not None
        self._link.send(*message)

    def _give(self, one: Member, trials: list[TrialId], *asked: str) -> None:
        one.given.update(dict.fromkeys(trials))
        self._send("give", one.number, pickle.dumps(trials), asked)

    def _listen(self) -> list[Row]:
        """Handle one message, if one comes soon, and return the rows it proves."""
        assert self._link is not None
        message = self._link.receive(0.2)
        self._crew.check_alone()
        return [] if message is None else self._handle(message)

    def _handle(self, message: Message) -> list[Row]:
        kind, number = message[0], message[1]
        if kind == "seen":
            self._crew.seen(message[1])
            return []
        one = self._crew.members.get(number)
        if one is None:
            return []  # dropped in the meantime
        if kind == "gone":
            self._gone(one, *message[2:])
            return []
        _, _, events, one.cpu, self._bridge_cpu = message
        one.placed = True
        batch: list[Event] = pickle.loads(events)  # noqa: S301 - our own supervisor's
        return [row for event in batch for row in self._take(one, event)]

    def _gone(self, one: Member, why: str, unfit: bool) -> None:
        if unfit:
            self._crew.refuse(one, f"cannot start a worker ({why}); install the same Unsilent there")
        else:
            self._backlog.extendleft(reversed(self._crew.lose(one, why)))

    def _take(self, one: Member, event: Event) -> list[Row]:
        kind = event[0]
        if kind == "row":
            self._note(one, event[1])
        elif kind == "proven":
            return self._crew.proven(one, event[1])
        elif kind == "ready":
            self._crew.welcome(one, *event[1:])
        elif kind == "loading":
            if self._crew.description is None:
                self._observer.loading(*event[1:])
        elif kind == "lost":
            self._observer.worker_lost(*event[1:])
        elif kind == "said":
            self._observer.say(*event[1:])
        elif kind == "salvaged":
            one.salvaged = True
        elif kind == "failed":
            one.node = event[2]
            if one.ready or self._crew.description is None:
                raise event[1]
            self._crew.refuse(one, f"cannot load the workload ({event[1]})")
        return []

    def _note(self, one: Member, row: Row) -> None:
        """A row that is not proven yet. Workers are numbered over all supervisors."""
        number = self._numbers.setdefault((one.number, row.worker), len(self._numbers))
        one.held[row.trial] = row = row.by_worker(number)
        one.pace = 0.9 * one.pace + 0.1 * max(row.seconds, 1e-5)
        self._observer.trial(row)

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[Row]]:
        """Run trials on all nodes; rows come together as they are proven."""
        self.describe()
        self._backlog = deque()
        source = Refillable(self._backlog, iter(trials))
        self._crew.expect()
        while True:
            members = list(self._crew.members.values())
            for one in members:
                if one.ready:
                    self._feed(one, source)
            if source.any_left():
                self._crew.staff()
            elif not any(one.given for one in members):
                return
            yield self._listen()

    def _feed(self, one: Member, source: Refillable) -> None:
        want = max(self._crew.pack, min(DEEPEST, int(DEPTH_SECONDS / one.pace))) + 1
        queued = len(one.given) - len(one.held)
        if queued <= want // 2 and (chunk := list(islice(source, want - queued))):
            self._give(one, chunk)

    # -- end ---------------------------------------------------------------------------------------------------

    def spent(self) -> tuple[float, float]:
        """Wall and CPU seconds since it was made or this was last asked; of supervisors and workers what they have told."""
        wall, cpu = self._watch.lap()
        before, self._reported = self._reported, self._crew.cpu + self._bridge_cpu
        return wall, cpu + self._reported - before

    def salvage(self) -> list[Row]:
        """After an interrupt: the rows that a proof, asked for now and waited for a little, still covers."""
        rows: list[Row] = []
        asked = [one for one in self._crew.members.values() if one.held]
        for one in asked:
            one.salvaged = False
            self._give(one, [], "salvage")
        end = time.monotonic() + SALVAGE_SECONDS + 1
        try:
            while time.monotonic() < end and any(not one.salvaged for one in asked if one.number in self._crew.members):
                rows += self._listen()
        except UnsilentError:
            pass  # what has been proven is kept
        return rows

    def close(self) -> None:
        """End all workers, and a cluster that is ours."""
        if self._link is not None:
            self._link.close()
            self._link = None
