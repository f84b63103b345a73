"""The two noise floors that faulty runs are judged by, and the band that a run must stay in to be taken for masked.

*Implementation*: replicas with golden's seeds whose sums are carried out in another order. A run beyond them is different.
*Seeds*: replicas with other seeds. A run that is worse than golden and beyond them as well is harmful; one that lies between the
two took another path, and ended as a fault-free run of the same recipe may end.
"""

from __future__ import annotations

import numpy as np
import xxhash

from unsilent.campaigns.observer import Observer
from unsilent.errors import UsageError
from unsilent.outcomes.training import Ending, Thresholds
from unsilent.replicas import Replica, ReplicaSpec, ReplicaStore, Switches, Trained, run_replicas
from unsilent.replicas.floors import ACCURACY, CHURN, LOSS, Floor
from unsilent.replicas.kind import AskedFor
from unsilent.replicas.switches import ALGORITHMIC, SWITCHES, VARIANTS
from unsilent.statistics.floor import judge
from unsilent.statistics.nulls import Compared, Measure, Null
from unsilent.studies.training.kind import Floors, FloorValues
from unsilent.studies.training.spec import Floats, Horizon, TrainingFound, TrainingSpec

SEEDS = VARIANTS["algo"]
LEAST = 20
LEVEL = 0.05
WINDOW = 10
"""Steps that losses are averaged over: single ones differ between fault-free runs as much as anything."""
SLACK = 2.0
"""Times the widest difference of a replica, in this window or beside it, that is still inside the band."""


def replica_spec(spec: TrainingSpec) -> ReplicaSpec:
    """The training without faults."""
    return ReplicaSpec(spec.workload, spec.options, spec.data, spec.init, spec.steps)


def run_floors(
    spec: TrainingSpec,
    store: ReplicaStore,
    implementation: Switches,
    count: int = LEAST,
    *,
    jobs: int = 1,
    observer: Observer | None = None,
) -> Floors:
    """Run the replicas that the store lacks, ``count`` of each floor, and compare them with their clean twin.

    ``implementation``: what differs between replicas of that floor. Raises ``UsageError``.
    """
    if count < LEAST:
        raise UsageError(f"--replicas is {count}; a floor at level {LEVEL:g} needs at least {LEAST}")
    if not implementation.varies:
        raise UsageError(f"--noise {implementation} is the same run each time; name what differs, like impl or race=2")
    if drawn := [name for name, _ in implementation.settings if SWITCHES[name].kind == ALGORITHMIC]:
        raise UsageError(
            f"--noise {implementation} has other seeds ({', '.join(drawn)}), which are the second floor of every campaign; "
            "name implementation switches, like impl or race=2"
        )

    def wanted(trained: Trained) -> list[Replica]:
        floors = (Replica(switches, number) for switches in (implementation, SEEDS) for number in range(count))
        return [Replica(Switches(), 0), *floors]

    asked = AskedFor((str(implementation), str(SEEDS)), count)
    run_replicas(replica_spec(spec), wanted, store, jobs=jobs, observer=observer, asked_for=asked)
    return Floors(*(_values(spec, store, switches, count) for switches in (implementation, SEEDS)))


def _values(spec: TrainingSpec, store: ReplicaStore, switches: Switches, count: int) -> FloorValues:
    floor = Floor(store, switches)
    null = floor.null(range(count))
    rows = list(store.of(switches, count))
    windows = [_windowed(row.losses) - _windowed(floor.twin.losses) for row in rows]
    band = np.abs(np.array(windows)).max(0)
    if not np.isfinite(band).all():
        raise UsageError(
            f"a fault-free replica of {spec.workload} has a loss that is not finite; mend the training first"
        )
    return FloorValues(
        switches=str(switches),
        accuracy=tuple(one.values[ACCURACY] for one in null.compared),
        loss=tuple(one.values[LOSS] for one in null.compared),
        churn=tuple(one.values[CHURN] for one in null.compared),
        same=tuple(one.same_bits for one in null.compared),
        window=WINDOW,
        band=tuple(band.tolist()),
        twin=hash_of(floor.twin.losses),
    )


def check_twin(found: TrainingFound, floors: Floors) -> None:
    """Raise ``UsageError`` unless the replicas' clean twin is the campaign's golden run."""
    if {floors.implementation.twin, floors.seeds.twin} != {hash_of(np.array(found.losses))}:
        raise UsageError(
            f"the golden run of {found.name} is not the clean twin of its replicas (their losses differ); a training must give "
            "the same bits in every process: unsilent noise --explain says what makes it differ"
        )


def hash_of(losses: Floats) -> str:
    """32 hex digits of the losses of a run, bit for bit."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(losses, dtype=np.float64).tobytes())


def horizon_of(floor: FloorValues, steps: int) -> Horizon:
    """The band of these replicas (those of the implementation floor), and how long a run has to stay in it."""
    band = np.pad(np.array(floor.band), 1, mode="edge")
    wide = SLACK * np.max([band[:-2], band[1:-1], band[2:]], axis=0)
    return Horizon(steps, floor.window, tuple(wide.tolist()), float(np.abs(floor.accuracy).max()))


def least_accuracies(golden: float, floors: Floors, margin: float) -> tuple[float, float]:
    """Held-out accuracy below which a run has not converged: by both floors, and by implementation noise alone."""
    implementation, seeds = min(floors.implementation.accuracy), min(floors.seeds.accuracy)
    return golden + min(implementation, seeds) - margin, golden + implementation - margin


class Noise:
    """Whether a run differs from golden by more than the replicas of one floor do.

    As every difference is from the same golden run, the test is of the run's own place among the ends of the replicas.
    A rank test of held-out accuracy and loss at ``LEVEL`` for each run by itself: among runs that differ as replicas do, that
    share is called beyond. Corrected for a thousand trials, 20 replicas could call none.
    """

    def __init__(self, floor: FloorValues, thresholds: Thresholds) -> None:
        self._null = Null(
            [
                Compared(f"replica {i}", "twin", {ACCURACY: a, LOSS: x}, floor.switches, same)
                for i, (a, x, same) in enumerate(zip(floor.accuracy, floor.loss, floor.same, strict=True))
            ]
        )
        self._measures = [Measure(ACCURACY, thresholds.test_gap, "less"), Measure(LOSS, 0.0)]
        self._source = floor.switches

    def beyond(self, golden: Ending, ending: Ending, loss_gap: float) -> bool:
        """``loss_gap``: held-out loss minus golden's; NaN where the run did not come so far."""
        if ending.same_bits:
            return False
        gap = ending.test - golden.test
        if not (np.isfinite(gap) and np.isfinite(loss_gap)):
            return True
        seen = Compared("struck", "twin", {ACCURACY: gap, LOSS: loss_gap}, self._source)
        found = judge(seen, self._null, self._measures, level=LEVEL)
        return found.p is None or found.p <= LEVEL * (1 + 1e-9)  # without noise every difference is beyond it


def _windowed(losses: Floats) -> Floats:
    """Means of ``WINDOW`` steps each; the last of those that are left."""
    ends = range(0, len(losses), WINDOW)
    return np.array([losses[start : start + WINDOW].mean() for start in ends])
