"""Replicas in this process, where their switches need no environment of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from unsilent.replicas.looks import Look
from unsilent.replicas.pool import ReplicaPool
from unsilent.replicas.runner import ReplicaRunner
from unsilent.replicas.spec import ReplicaSpec, Trained


class InlinePool(ReplicaPool):
    """A pool whose runs that need no environment run here, one after the other."""

    def __init__(self, spec: ReplicaSpec, jobs: int, deadline: float | None = None) -> None:
        super().__init__(spec, jobs, deadline)
        self._runner = ReplicaRunner(spec)

    def describe(self) -> Trained:
        """What the training is."""
        return self._runner.describe()

    def _results(self, jobs: Iterable[Any]) -> Iterator[tuple[int, Any, Any]]:
        waiting = list(jobs)
        for job in [job for job in waiting if not job.switches.environment]:
            run = self._runner.look if isinstance(job, Look) else self._runner.run
            yield 0, job, run(job)
        yield from super()._results(job for job in waiting if job.switches.environment)
