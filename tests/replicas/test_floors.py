"""The floor of a training from its store: differences from the clean twin, and which runs may be judged by them."""

from __future__ import annotations

import numpy as np
import pytest

from replicas.subjects import LOOP
from unsilent.errors import UsageError
from unsilent.replicas import Replica, ReplicaSpec, ReplicaStore, Switches
from unsilent.replicas.floors import Floor
from unsilent.replicas.runner import ReplicaRunner
from unsilent.statistics.floor import judge
from unsilent.statistics.nulls import Measure

WITHIN = Switches.parse("within")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floors")
    (folder / "loop.py").write_text(LOOP)
    spec = ReplicaSpec(f"{folder}/loop.py:make")
    runner = ReplicaRunner(spec)
    with ReplicaStore(folder / "s.sqlite", write=True) as store:
        training = store.bind(spec, runner.describe())
        for replica in [Replica(Switches(), 0), *(Replica(WITHIN, n) for n in range(21))]:
            store.add(training, runner.run(replica))
    with ReplicaStore(folder / "s.sqlite") as store:
        yield store, training


def test_comparisons_are_differences_from_the_twin(stored):
    store, training = stored
    floor = Floor(store, training, WITHIN)
    null = floor.null(range(20))
    assert (null.n, null.twin) == (20, "control/0")
    row = list(store.rows(training, WITHIN, 4, weights=True))[3]
    twin = next(store.rows(training, Switches(), 1, weights=True))
    found = null.compared[3]
    assert found.run == "within/3"
    assert found.source == "within"
    assert found.values["loss"] == row.loss - twin.loss
    a, b = (r.weights.astype(np.float64) / np.linalg.norm(r.weights.astype(np.float64)) for r in (row, twin))
    assert found.values["unit"] == pytest.approx(np.linalg.norm(a - b), rel=1e-6)
    assert not found.same_bits


def test_a_run_is_judged_by_them(stored):
    store, training = stored
    floor = Floor(store, training, WITHIN)
    last = list(store.rows(training, WITHIN, 21))[20]
    measures = [Measure("loss", margin=10.0), Measure("unit", margin=2.0, distance=True)]
    verdict = judge(floor.compared(last), floor.null(range(20)), measures, level=0.05)
    assert verdict.n == 20
    assert verdict.word in ("masked", "detectable")
    with pytest.raises(UsageError, match="only runs of one source"):
        judge(floor.compared(floor.twin), floor.null(range(20)), measures, level=0.05)


def test_what_is_not_there_is_said(stored):
    store, training = stored
    with pytest.raises(UsageError, match="replica within/21 is not stored"):
        Floor(store, training, WITHIN).null(range(30))
