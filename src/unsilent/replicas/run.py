"""Runs the replicas that are missing in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unsilent.replicas.looks import Look
from unsilent.replicas.pool import ReplicaPool
from unsilent.replicas.spec import Replica, ReplicaRow, ReplicaSpec, Trained
from unsilent.replicas.store import ReplicaStore

Told = Callable[[int, int, ReplicaRow | None], None]
"""Called with how many runs are stored, how many there will be, and the one that ended (None at first)."""
Wanted = Callable[[Trained], Iterable[Replica]]


def _nobody(done: int, total: int, row: ReplicaRow | None) -> None:
    """Progress told to nobody."""


def run_replicas(
    spec: ReplicaSpec,
    wanted: Wanted,
    store: ReplicaStore,
    *,
    jobs: int = 1,
    deadline: float | None = None,
    told: Told = _nobody,
    looks: Callable[[str], Iterable[Look]] = lambda training: (),
) -> tuple[str, Trained]:
    """Run what ``wanted`` asks for and the store does not hold; return the training's hash and what it is.

    ``wanted`` decides once it is known what the training is. Rows are stored as runs end, so an interrupt or a kill loses
    only the runs in flight. ``deadline``: seconds that one run may take.
    ``looks`` is asked, with the training's hash, when all rows are stored.
    """
    with ReplicaPool(spec, jobs, deadline) as pool:
        try:
            trained = pool.describe()
            training = store.bind(spec, trained)
            asked = list(dict.fromkeys(wanted(trained)))
            have = store.done(training)
            missing = [replica for replica in asked if replica not in have]
            done = len(asked) - len(missing)
            told(done, len(asked), None)
            for row in pool.run(missing):
                store.add(training, row)
                done += 1
                told(done, len(asked), row)
            for look, seen in pool.look(
                [look for look in dict.fromkeys(looks(training)) if not store.seen(training, look)]
            ):
                store.add_seen(training, look, seen)
        finally:
            store.note_usage(*pool.spent())
    return training, trained
