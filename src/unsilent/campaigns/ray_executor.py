"""The executor that runs trials on a Ray cluster of one or many machines, and survives the loss of nodes.

Every worker is held by a supervisor on its node (`unsilent.campaigns.ray_supervisor`), so crash and hang are outcomes by the
rules of one machine. The loss of a supervisor or of its node is not an outcome: trials whose rows no proof covered, and trials
that it had not answered, return to the queue. Its later messages are ignored, so nothing is stored twice. This process does not
import Ray (see `unsilent.campaigns.ray_bridge`).
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from unsilent.basics.closing import Closing
from unsilent.basics.errors import UnsilentError
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.process_connection import Message
from unsilent.campaigns.processes import SALVAGE_SECONDS, RefillableIterator
from unsilent.campaigns.ray_launch import BridgeProcess, Cluster, check_address
from unsilent.campaigns.ray_supervisor import Event, SupervisorJob, environment_to_send
from unsilent.campaigns.ray_supervisor_pool import PooledSupervisor, SupervisorPool
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.spec import Baseline, CampaignRow, TrialId
from unsilent.campaigns.stopwatch import Stopwatch

DEPTH_SECONDS = 2.0
DEEPEST = 2000
"""Work queued at a supervisor, in seconds and at most in trials, so that it never waits for the driver."""


class RayExecutor(Closing):
    """An executor with ``jobs`` workers on a Ray cluster.

    ``address`` is that of the cluster; ``None`` starts a cluster on this machine, which ends with the executor.

    Raises:
        UsageError: Ray is not installed, or no cluster answers at ``address``.
    """

    def __init__(self, job: WorkerJob, jobs: int, observer: Observer, address: str | None = None) -> None:
        check_address(address)
        local, self._observer = address is None, observer
        self._cluster = Cluster(address, jobs * job.spec.threads)
        settings, environment = replace(job.worker_settings, jobs=jobs), environment_to_send(os.environ, local)
        self._job = SupervisorJob(job.make_runner, job.spec, job.deadline, settings, os.getcwd(), environment, local)
        self._crew = SupervisorPool(job.spec, jobs, self._cluster, observer, self._send)
        self._link: BridgeProcess | None = None
        self._backlog: deque[TrialId] = deque()
        self._numbers: dict[tuple[int, int], int] = {}
        self._bridge_cpu = self._reported = 0.0
        self._watch = Stopwatch()

    def establish_baseline(self) -> Baseline:
        """Join the cluster, start a first worker, and return the baseline of the campaign."""
        if self._crew.baseline is None:
            self._link = self._link or BridgeProcess(self._cluster, self._job)
            self._crew.start_placement_timeout()
            while self._crew.baseline is None:
                self._crew.start_missing_supervisors(1)
                self._listen()
        assert self._crew.baseline is not None
        return self._crew.baseline

    # -- messages ----------------------------------------------------------------------------------------------

    def _send(self, *message: object) -> None:
        assert self._link is not None
        self._link.send(*message)

    def _give(self, member: PooledSupervisor, trials: list[TrialId], *requests: str) -> None:
        member.unfinished_trials.update(dict.fromkeys(trials))
        self._send("give", member.number, pickle.dumps(trials), requests)

    def _listen(self) -> list[CampaignRow]:
        """Handle one message, if one arrives soon, and return the rows that it verifies."""
        assert self._link is not None
        message = self._link.receive(0.2)
        self._crew.check_placement_timeout()
        return [] if message is None else self._handle(message)

    def _handle(self, message: Message) -> list[CampaignRow]:
        kind, number = message[0], message[1]
        if kind == "seen":
            self._crew.note_cluster_nodes(message[1])
            return []
        member = self._crew.members.get(number)
        if member is None:
            return []  # dropped in the meantime
        if kind == "gone":
            self._gone(member, *message[2:])
            return []
        _, _, events, member.cpu_seconds, self._bridge_cpu = message
        member.is_placed = True
        batch: list[Event] = pickle.loads(events)  # noqa: S301 - our own supervisor's
        return [row for event in batch for row in self._take(member, event)]

    def _gone(self, member: PooledSupervisor, why: str, unfit: bool) -> None:
        if unfit:
            self._crew.reject_supervisor(
                member, f"cannot start a worker ({why}); install the same version of Unsilent on that node"
            )
        else:
            self._backlog.extendleft(reversed(self._crew.handle_lost_supervisor(member, why)))

    def _take(self, member: PooledSupervisor, event: Event) -> list[CampaignRow]:
        kind = event[0]
        if kind == "row":
            self._note(member, event[1])
        elif kind == "proven":
            return self._crew.take_verified_rows(member, event[1])
        elif kind == "ready":
            self._crew.admit_supervisor(member, *event[1:])
        elif kind == "loading":
            if self._crew.baseline is None:
                self._observer.loading(*event[1:])
        elif kind == "lost":
            self._observer.worker_lost(*event[1:])
        elif kind == "said":
            self._observer.say(*event[1:])
        elif kind == "salvaged":
            member.salvaged = True
        elif kind == "failed":
            member.node = event[2]
            if member.ready or self._crew.baseline is None:
                raise event[1]
            self._crew.reject_supervisor(member, f"cannot load the workload ({event[1]})")
        return []

    def _note(self, member: PooledSupervisor, row: CampaignRow) -> None:
        """Store a row as not verified yet, with a worker number that is unique on the cluster."""
        number = self._numbers.setdefault((member.number, row.worker), len(self._numbers))
        member.unverified_rows[row.trial] = row = row.with_worker(number)
        member.seconds_per_trial = 0.9 * member.seconds_per_trial + 0.1 * max(row.seconds, 1e-5)
        self._observer.trial(row)

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, trials: Iterable[TrialId]) -> Iterator[list[CampaignRow]]:
        """Run trials on all nodes and yield lists of rows that are verified."""
        self.establish_baseline()
        self._backlog = deque()
        source = RefillableIterator(self._backlog, iter(trials))
        self._crew.start_placement_timeout()
        while True:
            members = list(self._crew.members.values())
            for member in members:
                if member.ready:
                    self._feed(member, source)
            if source.any_left():
                self._crew.start_missing_supervisors()
            elif not any(member.unfinished_trials for member in members):
                return
            yield self._listen()

    def _feed(self, member: PooledSupervisor, source: RefillableIterator) -> None:
        want = max(self._crew.max_trials_together, min(DEEPEST, int(DEPTH_SECONDS / member.seconds_per_trial))) + 1
        queued = len(member.unfinished_trials) - len(member.unverified_rows)
        if queued <= want // 2 and (chunk := list(islice(source, want - queued))):
            self._give(member, chunk)

    # -- end ---------------------------------------------------------------------------------------------------

    def wall_seconds(self, work: float) -> float:
        """Expected wall seconds for ``work`` seconds of one worker, if all requested workers run."""
        return work / self._job.worker_settings.jobs

    def seconds_since_last_call(self) -> tuple[float, float]:
        """Wall and CPU seconds since the previous call, including the CPU seconds that supervisors reported.

        The first call counts from construction.
        """
        wall, cpu = self._watch.lap()
        before, self._reported = self._reported, self._crew.cpu_seconds + self._bridge_cpu
        return wall, cpu + self._reported - before

    def salvage(self) -> list[CampaignRow]:
        """After an interrupt: the finished rows that workers can still verify within a short time."""
        rows: list[CampaignRow] = []
        waiting = [member for member in self._crew.members.values() if member.unverified_rows]
        for m in waiting:
            m.salvaged = False
            self._give(m, [], "salvage")
        end = time.monotonic() + SALVAGE_SECONDS + 1
        try:
            while time.monotonic() < end and any(not m.salvaged for m in waiting if m.number in self._crew.members):
                rows += self._listen()
        except UnsilentError:
            pass  # proven rows are kept
        return rows

    def close(self) -> None:
        """End all workers, and the cluster if this executor started it."""
        if self._link is not None:
            self._link.close()
            self._link = None
