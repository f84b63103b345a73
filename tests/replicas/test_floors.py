"""The floor of a training from its store: differences from the clean twin, and which runs may be judged by them."""

from __future__ import annotations

import numpy as np
import pytest

from replicas.subjects import LOOP
from unsilent.basics.errors import UsageError
from unsilent.replicas import Replica, ReplicaSpec, ReplicaStore, Switches
from unsilent.replicas.floors import Floor
from unsilent.replicas.runner import ReplicaRunner
from unsilent.statistics.floor import noise_verdict
from unsilent.statistics.null_distribution import Measure

WITHIN = Switches.parse("within")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floors")
    (folder / "loop.py").write_text(LOOP)
    spec = ReplicaSpec(f"{folder}/loop.py:make")
    runner = ReplicaRunner(spec)
    with ReplicaStore(folder / "s.sqlite", write=True) as store:
        store.bind_campaign(spec, runner.establish_baseline())
        store.add_rows(map(runner.run_replica, [Replica(Switches(), 0), *(Replica(WITHIN, n) for n in range(21))]))
    with ReplicaStore(folder / "s.sqlite") as store:
        yield store


def test_comparisons_are_differences_from_the_twin(stored):
    floor = Floor(stored, WITHIN)
    null = floor.null_comparisons(range(20))
    assert (null.n, null.clean_twin) == (20, "control/0")
    row = stored.row_with_weights(Replica(WITHIN, 3))
    twin = stored.row_with_weights(Replica(Switches(), 0))
    found = null.clean_comparisons[3]
    assert found.run == "within/3"
    assert found.noise_source == "within"
    assert found.values["loss"] == row.loss - twin.loss
    a, b = (r.flat_weights.astype(np.float64) / np.linalg.norm(r.flat_weights.astype(np.float64)) for r in (row, twin))
    assert found.values["unit"] == pytest.approx(np.linalg.norm(a - b), rel=1e-6)
    assert not found.same_bits


def test_a_run_is_judged_by_them(stored):
    floor = Floor(stored, WITHIN)
    last = stored.row_with_weights(Replica(WITHIN, 20))
    measures = [Measure("loss", margin=10.0), Measure("unit", margin=2.0, is_distance=True)]
    verdict = noise_verdict(floor.compare_with_twin(last), floor.null_comparisons(range(20)), measures, level=0.05)
    assert verdict.n == 20
    assert verdict.word in ("masked", "detectable")
    with pytest.raises(UsageError, match="only runs with the same noise source"):
        noise_verdict(floor.compare_with_twin(floor.twin), floor.null_comparisons(range(20)), measures, level=0.05)


def test_what_is_not_there_is_said(stored):
    with pytest.raises(UsageError, match="replica within/21 is not stored"):
        Floor(stored, WITHIN).null_comparisons(range(30))
