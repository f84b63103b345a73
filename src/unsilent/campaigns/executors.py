"""Executors: where trials run. All give the same rows, bit for bit; they differ in cost and in what they survive.

inline      in this process; for live objects and for debugging. Exceptions are outcomes; a crash or a hang is not survived.
serial      one worker process; crash and hang are outcomes of the trial that was running.
processes   several worker processes.
ray         the same on the nodes of a Ray cluster; what happens to a node is nobody's outcome, its trials run elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

from unsilent.campaigns.observer import Observer, Silent
from unsilent.campaigns.processes import ProcessExecutor
from unsilent.campaigns.spec import Baseline, Means, Row, Spec, TrialId
from unsilent.errors import UsageError, unknown

EXECUTORS = ("serial", "processes", "ray")
INSIDE = "UNSILENT_INSIDE_WORKER"
"""Set in the environment of worker processes: a campaign must not start campaigns."""


class Executor(Protocol):
    """Runs trials of one campaign; a context manager that ends its workers."""

    def describe(self) -> Baseline:
        """Load the workload (once) and say what was found."""
        ...

    def run(self, trials: Iterable[TrialId]) -> Iterator[Sequence[Row]]:
        """Run trials; rows come in any order, those together that one proof covers (a list may be empty)."""
        ...

    def salvage(self) -> Sequence[Row]:
        """After an interrupt: rows that were run and not yet handed out, if they can still be proven."""
        ...

    def spent(self) -> tuple[float, float]:
        """Wall and CPU seconds, workers included, since it was made or this was last asked."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


class LocalExecutor(Executor, Protocol):
    """Runs trials on this machine, and passes questions on to their runner."""

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer of the runner; see `Runner`."""
        ...


def make_executor(
    name: str | None,
    spec: Spec,
    *,
    jobs: int = 1,
    deadline: float | None = None,
    observer: Observer | None = None,
    means: Means | None = None,
    address: str | None = None,
) -> Executor:
    """The executor of that name, default by ``jobs``; raises ``UsageError`` for an unknown one or for jobs that do not fit.

    ``address`` is that of an existing Ray cluster, which asks for ``ray``.
    """
    name = checked(name, jobs=jobs, deadline=deadline, address=address)
    observer, means = observer or Silent(), means or Means()
    if name == "ray":
        from unsilent.campaigns.ray_executor import RayExecutor

        return RayExecutor(spec, jobs=jobs, deadline=deadline, observer=observer, means=means, address=address)
    return ProcessExecutor(spec, jobs=jobs, deadline=deadline, observer=observer, means=means)


def checked(name: str | None, *, jobs: int = 1, deadline: float | None = None, address: str | None = None) -> str:
    """The name of the executor that `make_executor` would make; raises ``UsageError``, before anything is loaded."""
    if INSIDE in os.environ:
        raise UsageError(
            "a worker that loads this file starts a campaign itself; put that call under: if __name__ == '__main__':"
        )
    name = name or ("ray" if address is not None else "processes" if jobs > 1 else "serial")
    if name not in EXECUTORS:
        raise unknown("executor", name, EXECUTORS)
    if address is not None and name != "ray":
        raise UsageError(f"--ray {address} is for --executor ray, this is --executor {name}; leave one of them out")
    if jobs < 1:
        raise UsageError(f"--jobs is {jobs}; expected 1 or more")
    if name == "serial" and jobs > 1:
        raise UsageError(f"--executor serial runs one job, --jobs is {jobs}; use --executor processes")
    if deadline is not None and deadline <= 0:
        raise UsageError(f"--deadline is {deadline}; expected seconds above 0")
    return name
