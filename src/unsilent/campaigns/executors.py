"""Executors, which run trials: in this process, in worker processes or on a cluster.

All give the same rows, bit for bit. They differ in cost and in the crashes that they survive.

inline      in this process; for live objects and for debugging. Exceptions are outcomes; a crash or a hang is not survived.
serial      one worker process; crash and hang are outcomes of the trial that was running.
processes   several worker processes.
ray         several worker processes on the nodes of a Ray cluster; a lost node is not an outcome, its trials run elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

from unsilent.basics.child_processes import INSIDE
from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import check_count
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.processes import ProcessExecutor, default_job_count
from unsilent.campaigns.runner import MakeRunner, WorkerJob
from unsilent.campaigns.spec import Baseline, CampaignRow, Spec, TrialId, WorkerSettings

EXECUTORS = ("serial", "processes", "ray")
MOST_JOBS = 4096


class Executor(Protocol):
    """The interface of executors: a context manager that runs the trials of one campaign."""

    def establish_baseline(self) -> Baseline:
        """Load the workload, once, and return the baseline of the campaign."""

    def run(self, trials: Iterable[TrialId]) -> Iterator[Sequence[CampaignRow]]:
        """Run trials and yield lists of rows that are verified, in any order.

        A list may be empty.
        """

    def wall_seconds(self, work: float) -> float:
        """Expected wall seconds for trials that would keep one worker busy for ``work`` seconds."""

    def salvage(self) -> Sequence[CampaignRow]:
        """After an interrupt: the finished rows not yet yielded that can still be verified."""

    def seconds_since_last_call(self) -> tuple[float, float]:
        """Wall and CPU seconds of this process and its workers since the previous call.

        The first call counts from construction.
        """

    def close(self) -> None:
        """End all workers."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


class LocalExecutor(Executor, Protocol):
    """The interface of executors on this machine, which can also forward questions to their runner."""

    def ask_runner(self, what: str, *arguments: Any) -> Any:
        """Forward a question to the runner and return its answer; see `Runner`."""


def make_executor(
    name: str | None,
    make_runner: MakeRunner,
    spec: Spec,
    *,
    jobs: int | None = None,
    deadline: float | None = None,
    observer: Observer | None = None,
    worker_settings: WorkerSettings | None = None,
    address: str | None = None,
) -> Executor:
    """An executor by its name; without a name, ``jobs`` and ``address`` decide.

    Raises ``UsageError`` for an unknown name and for jobs that do not fit.

    Without ``jobs``, `default_job_count` gives the number. ``address`` is that of an existing Ray cluster, and selects ``ray``.
    """
    name = resolve_executor_name(name, jobs=jobs, deadline=deadline, address=address)
    observer = observer or Observer()
    job = WorkerJob(make_runner, spec, deadline, worker_settings or WorkerSettings())
    if name == "ray":
        from unsilent.campaigns.ray_executor import RayExecutor

        return RayExecutor(job, jobs or 1, observer, address)
    return ProcessExecutor(job, chosen_job_count(name, spec, jobs), observer, grows_slowly=jobs is None)


def chosen_job_count(name: str | None, spec: Spec, jobs: int | None, address: str | None = None) -> int:
    """The number of workers of an executor: ``jobs``, or a default if that is None."""
    if jobs is not None:
        return jobs
    return 1 if name in ("serial", "ray") or address is not None else default_job_count(spec)


def resolve_executor_name(
    name: str | None, *, jobs: int | None = None, deadline: float | None = None, address: str | None = None
) -> str:
    """The name of the executor that `make_executor` would create; raises ``UsageError``.

    Nothing is loaded.
    """
    if INSIDE in os.environ:
        raise UsageError(
            "the file of the workload starts a campaign when a worker loads it; put that call under: if __name__ == '__main__':"
        )
    name = name or ("ray" if address is not None else "serial" if jobs == 1 else "processes")
    if name not in EXECUTORS:
        raise unknown_name_error("executor", name, EXECUTORS)
    if address is not None and name != "ray":
        raise UsageError(
            f"--ray {address} needs --executor ray, but --executor is {name}; leave out --ray or --executor"
        )
    check_count("--jobs", 1 if jobs is None else jobs, 1, MOST_JOBS)
    if name == "serial" and jobs is not None and jobs > 1:
        raise UsageError(f"--executor serial runs one job, but --jobs is {jobs}; use --executor processes")
    if deadline is not None and deadline <= 0:
        raise UsageError(f"--deadline is {deadline}; expected a number of seconds above 0")
    return name
