"""Campaigns of ``unsilent training`` as a registered kind: what is checked of a store of theirs, which may come from anyone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unsilent.campaigns.codec import Shape
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.reading import MOST_NOTES, MOST_THREADS, Damaged, parsed
from unsilent.campaigns.spec import Json, TrialId
from unsilent.campaigns.store import Store
from unsilent.faults.hardware import SHIPPED
from unsilent.report.model import Report
from unsilent.studies.training.handcrafted import EXAMPLE_CANDIDATES
from unsilent.studies.training.spec import (
    FOLLOWED,
    GUARDED,
    MADE,
    REASONS,
    UNDER_GUARD,
    WATCHED,
    WATCHED_STEPS,
    ComparisonOptions,
    Reading,
    TrainingBaseline,
    TrainingBudget,
    TrainingRow,
    TrainingSpec,
    resolve,
)
from unsilent.workloads.zoo import TRAININGS

if TYPE_CHECKING:
    from unsilent.campaigns.replay import Replay
    from unsilent.studies.training.records import TrainingResult

ABOUT = """Inject faults into single training steps and classify how each run ends.

Each trial goes on from the fault-free run at a random step. Reports outcome classes, what predicts harm, and training PVF, in
tables and an HTML report. Resumable: the same command continues where it stopped; more --trials extend it.
"""
MOST_STEPS = 10**7
MOST_REPLICAS = 10**5
MOST_AGAIN = 100
"""Times the steps of a run that one under the guard may execute."""
FLOOR = "floor"
"""The name of records of noise floors, in the order of `Floors`."""


@dataclass(frozen=True, slots=True)
class FloorValues:
    """What fault-free replicas ended in, beside their clean twin.

    Attributes:
        switches: what differs between them. accuracy, loss: of each replica on held-out samples, minus the twin's. churn:
            share of predictions that differ from the twin's. same: whether it ended in the twin's bits. band: widest
            difference of the mean training loss of each ``window`` steps from the twin's. twin: hash of the twin's losses.
    """

    switches: str
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    churn: tuple[float, ...]
    same: tuple[bool, ...]
    window: int
    band: tuple[float, ...]
    twin: str = ""

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Floors:
    """The two noise floors that a run is judged by.

    Attributes:
        implementation: replicas that carry out the same sums in another order. seeds: replicas with other seeds of
            initialisation, data order, augmentation and dropout.
    """

    implementation: FloorValues
    seeds: FloorValues


def check_spec(spec: TrainingSpec) -> None:
    """Raise ``Damaged`` for impossible numbers."""
    if spec.horizon is not None:
        h = spec.horizon
        if h.steps < 1 or h.window < 1 or not h.loss or not _numbers((*h.loss, h.test), least=0):
            raise Damaged("its spec has an impossible horizon")
    if not 1 <= spec.threads <= MOST_THREADS:
        raise Damaged("its spec has an impossible number of threads")
    if not all(math.isfinite(weight) and weight > 0 for _, weight in spec.faults):
        raise Damaged("its spec has a fault model with an impossible weight")


def check_found(baseline: TrainingBaseline) -> None:
    """Raise ``Damaged`` for impossible numbers, and curves of other lengths."""
    lengths = {len(values) for values in (baseline.epochs, baseline.losses, baseline.metric, baseline.watched)}
    if not baseline.targets or not 1 <= baseline.steps <= MOST_STEPS or lengths != {baseline.steps}:
        raise Damaged("its description names no target, or has curves of other lengths")
    right = _numbers((*baseline.losses, *baseline.metric, baseline.test, baseline.test_loss)) and _numbers(
        (baseline.golden_seconds, *(weight for _, weight in baseline.models)), least=0
    )
    watched = all(
        len(row) == len(WATCHED) and _numbers([x for x in row if x is not None], least=0) for row in baseline.watched
    )
    right = right and len(baseline.notes) <= MOST_NOTES
    if not right or not watched or baseline.samples < 1 or baseline.parameters < 0 or not baseline.golden_seconds > 0:
        raise Damaged("its description has impossible numbers")


def read_floor(text: str, spec: TrainingSpec, description: TrainingBaseline) -> FloorValues:
    """A noise floor; raises ``Damaged``."""
    record = parsed(FloorValues, text, "floor")
    count = len(record.accuracy)
    if not 1 <= count <= MOST_REPLICAS or {len(record.loss), len(record.churn), len(record.same)} != {count}:
        raise Damaged("its floor has columns of other lengths")
    right = _numbers((*record.accuracy, *record.loss)) and _numbers((*record.churn, *record.band), least=0)
    if not right or record.window < 1:
        raise Damaged("its floor has impossible numbers")
    return record


def has(trial: TrialId, spec: TrainingSpec, targets: frozenset[str]) -> bool:
    """Whether a campaign may hold a trial; ``guarded:`` and ``made:`` ones as well."""
    plain = trial.target.removeprefix(GUARDED)
    return trial.flips is None and (
        plain.removeprefix(MADE) in EXAMPLE_CANDIDATES if plain.startswith(MADE) else plain in targets
    )


def shapes(baseline: TrainingBaseline, values: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Curves are as long as the run was followed; raises ``Damaged``."""
    step, ran, reason = values["injection"].step, values["steps_run"], values["reason"]
    if reason not in REASONS or not 0 <= step < baseline.steps:
        raise Damaged("has an impossible step or reason")
    followed = reason in FOLLOWED
    # A guard executes steps again, those of a short training several times.
    least, most = (1, baseline.steps - step) if followed else (0, MOST_AGAIN * baseline.steps)
    if not least <= ran <= most:
        raise Damaged("has an impossible length")
    count = ran if followed else 0
    return {"losses": count, "metric": count, "watched": (min(count, WATCHED_STEPS), len(WATCHED))}


def check_row(row: TrainingRow, baseline: TrainingBaseline) -> None:
    """Raise ``Damaged`` where a run ended in a way that a trial of its target cannot."""
    if row.reason in (FOLLOWED if row.trial.target.startswith(GUARDED) else UNDER_GUARD):
        raise Damaged("has an impossible reason")


def analyse(store: TrainingStore, **choices: Any) -> TrainingResult:
    """What a campaign found, by fields of `Reading`; raises ``UsageError`` where it has no trial or lacks a floor."""
    from unsilent.studies.training.study import read_training

    return read_training(store, Reading(**choices))


def report(result: TrainingResult) -> Report:
    """What is shown of it."""
    from unsilent.studies.training.report import report

    return report(result)


def compare(one: TrainingStore, other: TrainingStore, **choices: Any) -> Report:
    """What is shown of two."""
    from unsilent.studies.training.comparison import compare, comparison_report

    results = [analyse(store, **choices) for store in (one, other)]
    return comparison_report(compare(*results), *results)


def replay(store: TrainingStore, trial: TrialId, *given: Any) -> Replay[TrainingRow]:
    """A trial again, and how its training went on."""
    from unsilent.studies.training.study import replay_one

    return replay_one(store, trial, *given)


def _numbers(values: Sequence[float], least: float = -math.inf) -> bool:
    return all(math.isfinite(v) and v >= least for v in values)


TRAINING = Kind(
    name="training",
    application=0x556E7374,  # "Unst"
    version=4,
    spec=TrainingSpec,
    baseline=TrainingBaseline,
    row=TrainingRow,
    check_spec=check_spec,
    check_baseline=check_found,
    check_row=check_row,
    shapes=shapes,
    has=has,
    planned=lambda trial: not trial.target.startswith((GUARDED, MADE)),
    records={FLOOR: read_floor},
    fixed=("targets", "steps", "epochs", "losses", "metric"),
    analyse=analyse,
    report=report,
    compare=compare,
    builtin={"workload": TRAININGS, "accelerator": SHIPPED},
    replay=replay,
    subject=lambda store: str(store.description.name),
    about=ABOUT,
    budget=TrainingBudget,
    reading=Reading,
    more=(ComparisonOptions,),
    resolve=resolve,
)


class TrainingStore(Store[TrainingSpec, TrainingBaseline, TrainingRow]):
    """An open store of such a campaign."""

    kind = TRAINING


def note_floors(store: TrainingStore, floors: Floors) -> None:
    """Keep what fault-free replicas ended in, in place of what was kept before."""
    store.replace_records(FLOOR, [floors.implementation.to_json(), floors.seeds.to_json()])


def stored_floors(store: TrainingStore) -> Floors | None:
    """What replicas ended in; None where those of a floor are missing."""
    result = store.records(FLOOR)
    return Floors(*result) if len(result) == len(Floors.__slots__) else None
