"""The two noise floors of a training, measured from replicas, with which faulty runs are compared.

*Implementation*: replicas with the seeds of the golden run that compute the same sums in another order. A run beyond this floor
differs from the golden run.
*Seeds*: replicas with other seeds. A run that is worse than the golden run and also beyond this floor is harmful. A run between
the two floors took another path but ended as a fault-free run of the same recipe may end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.option_function import Argument
from unsilent.campaigns.campaign_run import CampaignRun
from unsilent.campaigns.observer import Observer
from unsilent.outcomes.training import TrainingCurves
from unsilent.replicas.floors import ACCURACY, CHURN, LOSS, Floor
from unsilent.replicas.kind import ReplicaRequest, ReplicaStore
from unsilent.replicas.noise_floor_records import NoiseFloors, ReplicaDifferences
from unsilent.replicas.run import run_replicas
from unsilent.replicas.spec import Replica, ReplicaBaseline, ReplicaSpec
from unsilent.replicas.switches import ALGORITHMIC, SWITCHES, VARIANTS, Switches
from unsilent.report.text import count_text
from unsilent.statistics.floor import noise_verdict
from unsilent.statistics.null_distribution import Measure, NullDistribution, RunComparison

Floats = NDArray[np.float64]
SEEDS = VARIANTS["algo"]
LEAST = 20
LEVEL = 0.05
FLOOR = Argument("floor", str | Path | None, "File that stores the fault-free runs. Default: none is kept.")
"""Argument of Python functions. Unlike commands, they do not store fault-free runs by default."""
WINDOW = 10
"""Number of steps that losses are averaged over, because losses of single steps differ a lot even between fault-free runs."""


def run_noise_floors(
    spec: ReplicaSpec,
    store: ReplicaStore,
    implementation: Switches,
    count: int = LEAST,
    *,
    jobs: int | None = None,
    observer: Observer | None = None,
) -> NoiseFloors:
    """Run the replicas that the store lacks, ``count`` per noise floor, and compare them with the clean twin.

    ``implementation``: switches of the implementation floor, which must vary. Raises ``UsageError``.
    """
    if count < LEAST:
        raise UsageError(f"--replicas is {count}; a noise floor at level {LEVEL:g} needs at least {LEAST}")
    if not implementation.varies_between_replicas:
        raise UsageError(
            f"--noise {implementation} does not vary between runs; name switches that vary, like impl or race=2"
        )
    if drawn := [name for name, _ in implementation.settings if SWITCHES[name].kind == ALGORITHMIC]:
        raise UsageError(
            f"--noise {implementation} varies seeds ({', '.join(drawn)}), but every campaign already has a noise floor of seeds; "
            "name implementation switches, like impl or race=2"
        )

    def wanted(trained: ReplicaBaseline) -> list[Replica]:
        floors = (Replica(switches, number) for switches in (implementation, SEEDS) for number in range(count))
        return [Replica(Switches(), 0), *floors]

    request = ReplicaRequest((str(implementation), str(SEEDS)), count)
    run_replicas(spec, wanted, store, jobs=jobs, observer=observer, replica_request=request)
    return NoiseFloors(*(_differences(spec, store, switches, count) for switches in (implementation, SEEDS)))


def measure_noise_floors(
    run: CampaignRun, spec: ReplicaSpec, implementation: str, count: int, path: Path | None
) -> NoiseFloors:
    """Measure the noise floors of a campaign before its trials; see `run_noise_floors`.

    Args:
        spec: Spec of the fault-free runs.
        implementation: Switches of the implementation floor, in the syntax of ``--noise``.
        count: Number of replicas for each floor.
        path: File of the fault-free runs; ``None`` for the default of the run.
    """
    jobs = run.request[run.kind.execution_options].jobs
    with (
        run.observe("replica") as observer,
        run.floor_file(path, spec) as file,
        ReplicaStore(file, write=True) as store,
    ):
        return run_noise_floors(spec, store, Switches.parse(implementation), count, jobs=jobs, observer=observer)


def noise_floor_note(count: int) -> str:
    """A note in a dry run on the runs that both noise floors need, with ``count`` replicas each."""
    runs = count_text(2 * count + 1, "fault-free run")
    return f"before the trials, {runs} for the noise floors would run, unless stored already"


def _differences(spec: ReplicaSpec, store: ReplicaStore, switches: Switches, count: int) -> ReplicaDifferences:
    floor = Floor(store, switches)
    null = floor.null_comparisons(range(count))
    rows = list(store.runs_with_switches(switches, count))
    windows = [_means_of_windows(row.losses) - _means_of_windows(floor.twin.losses) for row in rows]
    band = np.abs(np.array(windows)).max(0)
    if not np.isfinite(band).all():
        raise UsageError(
            f"a fault-free replica of {spec.workload} has a loss that is not finite; fix the training first"
        )
    return ReplicaDifferences(
        switches=str(switches),
        accuracy=tuple(comparison.values[ACCURACY] for comparison in null.clean_comparisons),
        loss=tuple(comparison.values[LOSS] for comparison in null.clean_comparisons),
        churn=tuple(comparison.values[CHURN] for comparison in null.clean_comparisons),
        identical_to_twin=tuple(comparison.same_bits for comparison in null.clean_comparisons),
        window=WINDOW,
        loss_band=tuple(band.tolist()),
        twin_losses_hash=hash_of_losses(floor.twin.losses),
    )


def check_twin(name: str, losses: Sequence[float], floors: NoiseFloors) -> None:
    """Raise ``UsageError`` unless the replicas' clean twin is the campaign's golden run.

    Args:
        name: Name of the training.
        losses: Losses of the golden run.
        floors: Noise floors, which must have been measured from the same run.
    """
    if {floors.implementation.twin_losses_hash, floors.seeds.twin_losses_hash} != {hash_of_losses(np.array(losses))}:
        raise UsageError(
            f"the golden run of {name} and the fault-free twin of its replicas have different losses; a "
            "training must be bit-identical in every process: run unsilent explain to find the cause"
        )


def hash_of_losses(losses: Floats) -> str:
    """A hash of the losses of a run, bit for bit, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(losses, dtype=np.float64).tobytes())


class NoiseFloorTest:
    """The test whether a run differs from the golden run by more than the replicas of one floor do.

    All differences are from the same golden run. The test is a rank test of held-out accuracy and loss at ``LEVEL``, for each run
    alone: of the runs that differ only as replicas do, this share is reported as beyond noise. The level is not corrected for the
    number of runs: after a correction for a thousand trials, 20 replicas could not make any result significant.

    Args:
        floor: Noise floor of the replicas.
        margin: Smallest difference of held-out accuracy, a share, that matters.
    """

    def __init__(self, floor: ReplicaDifferences, margin: float) -> None:
        self._null = NullDistribution(
            [
                RunComparison(f"replica {i}", "twin", {ACCURACY: a, LOSS: x}, floor.switches, same)
                for i, (a, x, same) in enumerate(zip(floor.accuracy, floor.loss, floor.identical_to_twin, strict=True))
            ]
        )
        self._measures = [Measure(ACCURACY, margin, "less"), Measure(LOSS, 0.0)]
        self._source = floor.switches

    def is_beyond_noise(self, golden: TrainingCurves, ending: TrainingCurves, loss_gap: float) -> bool:
        """Whether a run's held-out accuracy or loss differs from golden by more than noise.

        ``loss_gap``: held-out loss minus that of the golden run; NaN if the run did not reach its end.
        """
        if ending.same_bits:
            return False
        gap = ending.test_accuracy - golden.test_accuracy
        if not (np.isfinite(gap) and np.isfinite(loss_gap)):
            return True
        seen = RunComparison("corrupted", "twin", {ACCURACY: gap, LOSS: loss_gap}, self._source)
        result = noise_verdict(seen, self._null, self._measures, level=LEVEL)
        return result.p is None or result.p <= LEVEL * (1 + 1e-9)  # without noise every difference is beyond noise


def _means_of_windows(losses: Floats) -> Floats:
    """Means of consecutive windows of ``WINDOW`` steps.

    The last window may be shorter.
    """
    ends = range(0, len(losses), WINDOW)
    return np.array([losses[start : start + WINDOW].mean() for start in ends])
