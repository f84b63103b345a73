"""Faulty runs judged by fault-free ones: the two noise floors, the class of each trial, groups of trials, and examples.

*Implementation*: replicas with golden's seeds whose sums are carried out in another order. A run beyond them is different.
*Seeds*: replicas with other seeds. A run that is worse than golden and beyond them as well is harmful; one that lies between the
two took another path, and ended as a fault-free run of the same recipe may end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from unsilent.campaigns.observer import Observer
from unsilent.errors import UsageError
from unsilent.outcomes.training import Ending, Thresholds, TrainingOutcome, averaged, judge_ending
from unsilent.replicas import Replica, ReplicaBaseline, ReplicaSpec, ReplicaStore, Switches, run_replicas
from unsilent.replicas.floors import ACCURACY, CHURN, LOSS, Floor
from unsilent.replicas.kind import AskedFor
from unsilent.replicas.switches import ALGORITHMIC, SWITCHES, VARIANTS
from unsilent.statistics.comparing import joint_differences
from unsilent.statistics.floor import judge
from unsilent.statistics.intervals import clopper_pearson
from unsilent.statistics.nulls import Compared, Measure, Null
from unsilent.studies.training.kind import Floors, FloorValues
from unsilent.studies.training.records import Contrast, Curve, Group, Judged
from unsilent.studies.training.spec import Floats, Horizon, TrainingBaseline, TrainingRow, TrainingSpec, bare

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

    def wanted(trained: ReplicaBaseline) -> list[Replica]:
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


def check_twin(baseline: TrainingBaseline, floors: Floors) -> None:
    """Raise ``UsageError`` unless the replicas' clean twin is the campaign's golden run."""
    if {floors.implementation.twin, floors.seeds.twin} != {hash_of(np.array(baseline.losses))}:
        raise UsageError(
            f"the golden run of {baseline.name} is not the clean twin of its replicas (their losses differ); a training must "
            "give the same bits in every process: unsilent noise --explain says what makes it differ"
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
        seen = Compared("corrupted", "twin", {ACCURACY: gap, LOSS: loss_gap}, self._source)
        result = judge(seen, self._null, self._measures, level=LEVEL)
        return result.p is None or result.p <= LEVEL * (1 + 1e-9)  # without noise every difference is beyond it


def _windowed(losses: Floats) -> Floats:
    """Means of ``WINDOW`` steps each; the last of those that are left."""
    ends = range(0, len(losses), WINDOW)
    return np.array([losses[start : start + WINDOW].mean() for start in ends])


CRASHED = ("crash", "hang", "raised")
BACKWARD, FORWARD = ("grad_in", "grad_wt"), ("fwd",)
EXAMPLES = 3
"""Curves that are shown of each class."""
QUARTERS = 4
SHARES: Mapping[str, Callable[[Judged], bool]] = {
    "different": lambda one: one.different,
    "harmful": lambda one: one.harmful,
    "latent": lambda one: one.outcome.latent,
}
"""The shares that are reported of every group of trials, in the order of `Group`."""


class Judge:
    """Gives each trial its class.

    Args:
        found: the golden run. floors: a run must be beyond both to be of any class but the masked ones, unless it was lost.
        thresholds: see `Thresholds`.
    """

    def __init__(self, baseline: TrainingBaseline, floors: Floors, thresholds: Thresholds) -> None:
        self._found, self._thresholds = baseline, thresholds
        self._losses, self._metric = np.array(baseline.losses), np.array(baseline.metric)
        self._implementation, self._seeds = (Noise(f, thresholds) for f in (floors.implementation, floors.seeds))
        self.told_accuracy = not np.array_equal(self._metric, -self._losses)
        """Whether steps tell an accuracy; a loss has no scale that thresholds could be of."""

    def golden(self, step: int) -> Ending:
        """What golden did from a step on."""
        return Ending(self._metric[step:], self._losses[step:], self._found.test, same_bits=True)

    def ending(self, row: TrainingRow) -> Ending:
        """The whole run from the fault on: where it was not followed to its end, golden's values follow."""
        after = row.injection.step + row.steps_run
        rest = slice(after, None) if row.reason in ("same-bits", "horizon") else slice(0, 0)
        return Ending(
            np.concatenate([row.metric, self._metric[rest]]),
            np.concatenate([row.losses, self._losses[rest]]),
            row.test,
            same_bits=row.bit_identical,
        )

    def judge(self, row: TrainingRow) -> Judged:
        """The class of one trial."""
        if row.reason in CRASHED:
            return Judged(bare(row), TrainingOutcome.CRASHED, TrainingOutcome.CRASHED)
        golden, ending = self.golden(row.injection.step), self.ending(row)
        gap = row.test_loss - self._found.test_loss
        different = self._implementation.beyond(golden, ending, gap)
        harmful = different and self._seeds.beyond(golden, ending, gap)
        return Judged(bare(row), *(self._class(golden, ending, beyond) for beyond in (harmful, different)))

    def _class(self, golden: Ending, ending: Ending, beyond: bool) -> TrainingOutcome:
        return judge_ending(golden, ending, self._thresholds, beyond_noise=beyond, training_metric=self.told_accuracy)

    def curve(self, row: TrainingRow, judged: Judged, made: bool = False) -> Curve:
        """A trial as it is drawn: metrics averaged over the window of the thresholds."""
        golden, ending = self.golden(row.injection.step), self.ending(row)
        window = self._thresholds.window
        s = row.injection
        return Curve(
            outcome=str(judged.outcome),
            trial=str(row.trial),
            told=f"{s.model} at {s.site}, step {s.step}",
            step=s.step,
            metric=_rounded(averaged(ending.metric, window)),
            golden=_rounded(averaged(golden.metric, window)),
            losses=tuple(x if np.isfinite(x) else None for x in ending.losses.tolist()),
            test=None if np.isnan(row.test) else row.test,
            made=made,
        )


def grouped(trials: Iterable[Judged], key: Callable[[Judged], str], confidence: float) -> tuple[Group, ...]:
    """Trials by what ``key`` says, the largest group first."""
    by_name: dict[str, list[Judged]] = defaultdict(list)
    for one in trials:
        by_name[key(one)].append(one)
    names = sorted(by_name, key=lambda name: (-len(by_name[name]), name))
    return tuple(group(name, by_name[name], confidence) for name in names)


def group(name: str, trials: Sequence[Judged], confidence: float) -> Group:
    """Counts and shares of some trials."""
    counts = Counter(str(one.outcome) for one in trials)
    shares = (clopper_pearson(sum(map(is_so, trials)), len(trials), confidence) for is_so in SHARES.values())
    return Group(name, len(trials), dict(counts), *shares)


def groups_of(trials: Sequence[Judged], baseline: TrainingBaseline, confidence: float) -> dict[str, tuple[Group, ...]]:
    """By what trials are told apart: phase, layer, fault model, epoch, part of the run."""
    optimizers = " and ".join(dict.fromkeys(baseline.optimizers)) or "none"
    keys: dict[str, Callable[[Judged], str]] = {
        "phase": lambda one: one.row.injection.phase,
        "layer": lambda one: one.row.injection.layer,
        "fault model": lambda one: one.row.injection.model,
        "part of the run": lambda one: _part(one.row.injection.step, baseline.steps),
        "optimizer": lambda one: optimizers,
    }
    return {name: grouped(trials, key, confidence) for name, key in keys.items()}


def _part(step: int, steps: int) -> str:
    quarter = step * QUARTERS // steps
    first, last = -(-quarter * steps // QUARTERS), -(-(quarter + 1) * steps // QUARTERS) - 1
    return f"steps {first} to {last}"


def backward_against_forward(trials: Sequence[Judged], confidence: float) -> Iterator[Contrast]:
    """Backward phases against the forward one, by each of `SHARES`, among fault models that were drawn in both.

    Fault models are drawn before the phase, so in both phases they have the same law. Limits of the differences hold
    for all three rows together.
    """
    models = [
        {one.row.injection.model for one in trials if one.row.injection.phase in side} for side in (BACKWARD, FORWARD)
    ]
    both = models[0] & models[1]
    sides = [
        [one for one in trials if one.row.injection.phase in side and one.row.injection.model in both]
        for side in (BACKWARD, FORWARD)
    ]
    if not all(sides):
        return
    counts = [tuple((sum(map(is_so, side)), len(side)) for side in sides) for is_so in SHARES.values()]
    gaps = joint_differences([(one, other) for one, other in counts], confidence)
    for name, pair, gap in zip(SHARES, counts, gaps, strict=True):
        one, other = (clopper_pearson(*side, confidence) for side in pair)
        yield Contrast(name, "backward", "forward", one, other, gap)


def _rounded(curve: Floats) -> tuple[float, ...]:
    return tuple(np.round(curve, 5).tolist())
