"""The actor on a node of a Ray cluster that runs one worker process, using the executor of worker processes.

If a trial ends its process, this is the trial's outcome, by the same rules as on one machine. The loss of the actor or its node
is not an outcome, and its trials are run elsewhere. The actor's only caller (`unsilent.campaigns.ray_bridge`) has one open call
at any time, `exchange`, which delivers trials and returns the events since the previous call. Events, oldest first:

``("loading", what, done, total)``, ``("ready", description, pack, node)``, ``("row", row)``, ``("proven", [trial, ...])``,
``("lost", trial, why)``, ``("said", sentence)``, ``("salvaged",)``, ``("failed", error, node)``.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unsilent.campaigns.observer import Observer
from unsilent.campaigns.processes import ProcessExecutor, RefillableIterator
from unsilent.campaigns.runner import WorkerJob
from unsilent.campaigns.spec import CampaignRow, TrialId
from unsilent.campaigns.worker import as_picklable_error

Event = tuple[Any, ...]
CLOSE_SECONDS = 2.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that Ray sets for its own purposes. They determine the number of threads of a workload, so the driver's values are
used."""
SENT_VARIABLES = ("PYTHONPATH", "UNSILENT_CACHE")
"""Variables of the driver's environment that a worker on another machine gets if they are set."""


@dataclass(frozen=True)
class SupervisorJob(WorkerJob):
    """The job of a supervisor, with the folder and environment variables of the driver for its worker."""

    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_local: bool = False
    """Whether the node is the driver's machine, so that its whole environment is used."""

    def worker_environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment variables of a worker.

        ``env`` is the environment of its actor.
        """
        if self.is_local:
            result = dict(self.environment)
        else:
            result = {
                key: value for key, value in env.items() if not key.startswith("RAY_") and key not in THREAD_VARIABLES
            }
            result |= self.environment
        if self.spec.device.startswith("cuda") and "CUDA_VISIBLE_DEVICES" in env:
            result["CUDA_VISIBLE_DEVICES"] = env["CUDA_VISIBLE_DEVICES"]  # the one that Ray assigned
        return result


def environment_to_send(env: Mapping[str, str], local: bool) -> dict[str, str]:
    """The variables of the driver's environment that a job carries.

    Other machines get only the variables that they need.
    """
    return dict(env) if local else {key: env[key] for key in (*THREAD_VARIABLES, *SENT_VARIABLES) if key in env}


class Supervisor(Observer):
    """The actor that runs one worker, in a thread of its own."""

    def __init__(self, job: SupervisorJob) -> None:
        self._inbox: deque[TrialId] = deque()
        self._asked: deque[str] = deque()
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._urgent = False
        self._cpu = 0.0
        # The kernel ends a worker with the thread that started it, so this thread lives as long as the actor.
        self._thread = threading.Thread(target=self._serve, args=(job,), daemon=True)
        self._thread.start()

    # -- for the bridge ----------------------------------------------------------------------------------------

    def exchange(self, trials: list[bytes], requests: list[str], max_wait_seconds: float) -> tuple[bytes, float]:
        """Accept trials and requests (``salvage``), and return events and the CPU seconds so far.

        Waits ``max_wait_seconds`` seconds at most, so that events are sent together; urgent events are sent at once. Lists are
        pickled here and in the driver, as Ray's own pickling of so many small objects costs several times as much.
        """
        with self._changed:
            self._inbox.extend(trial for some in trials for trial in pickle.loads(some))  # noqa: S301 - the driver's
            self._asked.extend(requests)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._urgent, max_wait_seconds)
            events, self._events, self._urgent = self._events, [], False
        return pickle.dumps(events), self._cpu

    def close(self) -> None:
        """End the worker and all processes that it has started."""
        with self._changed:
            self._asked.append("close")
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    # -- what the executor tells -------------------------------------------------------------------------------

    def loading(self, description: str, done: float, total: float) -> None:
        """Record the progress of loading, replacing a previous record that was not sent yet."""
        with self._changed:
            if self._events and self._events[-1][0] == "loading":
                self._events.pop()
            self._events.append(("loading", description, done, total))

    def trial(self, row: CampaignRow) -> None:
        """Record that a trial ended; its row is not verified yet."""
        self._tell("row", row)

    def say(self, sentence: str) -> None:
        """Record a sentence for the observer of the campaign."""
        self._tell("said", sentence)

    def worker_lost(self, trial: TrialId, why: str) -> None:
        """Record that the worker was lost during a trial."""
        self._tell("lost", trial, why)

    def _tell(self, *event: Any, urgent: bool = False) -> None:
        with self._changed:
            self._events.append(event)
            if urgent:
                self._hurry()

    def _hurry(self) -> None:
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------

    def _serve(self, job: SupervisorJob) -> None:
        node = socket.gethostname()
        try:
            if os.path.isdir(job.folder):
                os.chdir(job.folder)
            with ProcessExecutor(job, 1, self, job.worker_environment(os.environ)) as executor:
                description = executor.establish_baseline()
                self._count(executor)
                self._tell("ready", description, executor.max_trials_together, node, urgent=True)
                while (request := self._next()) != "close":
                    self._do(request, executor)
        except BaseException as error:
            self._tell("failed", as_picklable_error(error), node, urgent=True)

    def _next(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._inbox)
            return self._asked.popleft() if self._asked else "run"

    def _do(self, request: str, executor: ProcessExecutor) -> None:
        if request == "salvage":
            self._prove(executor.salvage())
            self._tell("salvaged", urgent=True)
        else:
            self._run(executor)

    def _run(self, executor: ProcessExecutor) -> None:
        """Run all queued trials until their rows are verified, or another request arrives."""
        for rows in executor.run(RefillableIterator(self._inbox, iter(()))):
            self._count(executor)
            self._prove(rows)
            if self._asked:
                return
        self._hurry()

    def _prove(self, rows: list[CampaignRow]) -> None:
        if rows:
            self._tell("proven", [row.trial for row in rows])

    def _count(self, executor: ProcessExecutor) -> None:
        self._cpu += executor.seconds_since_last_call()[1]
