"""Run the replicas that a store lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unsilent.campaigns import executors
from unsilent.campaigns.driver import run_trials
from unsilent.campaigns.observer import Observer
from unsilent.replicas.kind import ReplicaRequest, ReplicaStore
from unsilent.replicas.spec import Replica, ReplicaBaseline, ReplicaSpec
from unsilent.replicas.step_trace import StepTraceId
from unsilent.replicas.switches import Switches

Wanted = Callable[[ReplicaBaseline], Iterable[Replica]]


def run_replicas(
    spec: ReplicaSpec,
    wanted: Wanted,
    store: ReplicaStore,
    *,
    jobs: int | None = None,
    deadline: float | None = None,
    executor: str | None = None,
    address: str | None = None,
    observer: Observer | None = None,
    replica_request: ReplicaRequest | None = None,
    command: str = "",
    after_control_runs: Callable[[], None] = lambda: None,
    step_traces: Callable[[], Iterable[StepTraceId]] = lambda: (),
) -> ReplicaBaseline:
    """Run the ``wanted`` replicas that the store lacks, and return the baseline of the training.

    Each row is stored when its run ends, so an interrupt or a kill loses only the runs in progress.

    Args:
        wanted: Function that returns the replicas to run, given the baseline of the training.
        deadline: Maximum duration of one run in seconds; ``None`` for no limit.
        replica_request: Request to record in the store.
        after_control_runs: Called when all runs without switches are stored, before any other run starts.
        step_traces: Called when all runs are stored; returns the step traces to make.
        jobs: Number of workers, see `make_executor`.
        executor: Name of the executor.
        address: Address of a Ray cluster.
        observer: Receives the progress.
    """
    with executors.make_executor(
        executor, store.kind.runner, spec, jobs=jobs, deadline=deadline, observer=observer, address=address
    ) as running:
        trained: ReplicaBaseline = running.establish_baseline()  # type: ignore[assignment]
        store.bind_campaign(spec, trained)
        replicas = sorted(dict.fromkeys(wanted(trained)), key=_run_sort_key)
        store.record_budget(1 + max((replica.number for replica in replicas), default=0), command)
        if replica_request is not None:
            store.record_request(replica_request)
        run_trials([r.trial for r in replicas if r.switches == Switches()], running, store, observer)
        after_control_runs()
        run_trials([r.trial for r in replicas], running, store, observer)
        run_trials(
            [look.trial for look in sorted(dict.fromkeys(step_traces()), key=_run_sort_key)], running, store, observer
        )
    return trained


def _run_sort_key(requested: Replica | StepTraceId) -> tuple[object, ...]:
    """The sort key of a run.

    Runs with the same environment come one after the other, so that they share a process.
    """
    return requested.switches.environment, requested.trial.k
