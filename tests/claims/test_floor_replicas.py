"""Claim: on replicas of a real training, clean held against clean, the floor test calls at most its level.

Replicas of `train-resnet` with other in-batch orders, 100 groups of 21: each of a group is judged by the other 20. Every call is
false. Within a group calls depend on each other, so the check of the rate is over groups. Four minutes on two cores.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from unsilent.replicas import Replica, ReplicaSpec, ReplicaStore, Switches, run_replicas
from unsilent.replicas.floors import Floor
from unsilent.statistics.floor import noise_verdict
from unsilent.statistics.null_distribution import Measure, NullDistribution

GROUPS, SIZE, LEVEL = 100, 21, 0.05
WITHIN = Switches.parse("within")
MEASURES = [
    Measure("accuracy", margin=0.02, worse_direction="less"),
    Measure("loss", margin=0.05),
    Measure("churn", margin=0.05, is_distance=True),
    Measure("unit", margin=0.05, is_distance=True),
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    asked = [Replica(Switches(), 0), *(Replica(WITHIN, n) for n in range(GROUPS * SIZE))]
    path = tmp_path_factory.mktemp("floor") / "replicas.sqlite"
    spec = ReplicaSpec("train-resnet", (("steps", "60"),))
    with ReplicaStore(path, write=True) as store:
        run_replicas(spec, lambda trained: asked, store, jobs=2)
        return Floor(store, WITHIN).null_comparisons(range(GROUPS * SIZE)).clean_comparisons


@pytest.mark.parametrize("measures", [MEASURES, *([m] for m in MEASURES)], ids=lambda ms: "+".join(m.name for m in ms))
def test_clean_against_clean(compared, measures):
    calls = []
    for group in range(GROUPS):
        runs = compared[group * SIZE : (group + 1) * SIZE]
        words = [
            noise_verdict(one, NullDistribution([*runs[:i], *runs[i + 1 :]]), measures, level=LEVEL).word
            for i, one in enumerate(runs)
        ]
        calls.append(np.mean([word in ("harmful", "detectable", "improved") for word in words]))
    rate, error = float(np.mean(calls)), float(stats.sem(calls))
    print(f"\n{[m.name for m in measures]}: {100 * rate:.2f} % false calls of {GROUPS * SIZE} comparisons")
    assert rate <= LEVEL + 3.5 * error, (rate, error)


def test_a_shift_is_found(compared):
    """Runs of other seeds are another kind of noise, so a shift is planted: the loss off by some sd of the clean ones."""
    runs = compared[:SIZE]
    sd = float(np.std([c.values["loss"] for c in compared]))
    null = NullDistribution(runs[:-1])
    shifted = runs[-1].values | {"loss": runs[-1].values["loss"] + 8 * sd}
    one = type(runs[-1])(runs[-1].run, runs[-1].other, shifted, runs[-1].noise_source)
    assert noise_verdict(one, null, MEASURES, level=LEVEL).word in ("harmful", "detectable")
