"""Reading what a store of a training campaign says: nothing in it is believed before it is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from unsilent.campaigns.reading import (
    MOST_NOTES,
    MOST_THREADS,
    Allowance,
    Damaged,
    check_faults,
    is_real,
    is_whole,
    parsed,
    read_trial,
    shown,
)
from unsilent.campaigns.spec import Json, TrialId
from unsilent.campaigns.trainings.ladders import LADDERS
from unsilent.campaigns.trainings.spec import (
    FOLLOWED,
    GUARDED,
    MADE,
    REASONS,
    UNDER_GUARD,
    WATCHED,
    WATCHED_STEPS,
    Floats,
    Struck,
    TrainingFound,
    TrainingRow,
    TrainingSpec,
)

MOST_STEPS = 10**7
MOST_REPLICAS = 10**5


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


def read_training_spec(text: Any) -> TrainingSpec:
    """A spec from a store; raises ``Damaged``."""
    found = parsed(TrainingSpec, text, "spec")
    if found.horizon is not None:
        h = found.horizon
        if h.steps < 1 or h.window < 1 or not h.loss or not _numbers((*h.loss, h.test), least=0):
            raise Damaged("its spec has an impossible horizon")
    if not 1 <= found.threads <= MOST_THREADS:
        raise Damaged("its spec has an impossible number of threads")
    if not all(math.isfinite(weight) and weight > 0 for _, weight in found.faults):
        raise Damaged("its spec has a fault model with an impossible weight")
    return found


def read_found(text: Any) -> TrainingFound:
    """A description from a store; raises ``Damaged``."""
    found = parsed(TrainingFound, text, "description")
    lengths = {len(values) for values in (found.epochs, found.losses, found.metric, found.watched)}
    if not found.targets or not 1 <= found.steps <= MOST_STEPS or lengths != {found.steps}:
        raise Damaged("its description names no target, or has curves of other lengths")
    right = _numbers((*found.losses, *found.metric, found.test, found.test_loss)) and _numbers(
        (found.golden_seconds, *(weight for _, weight in found.models)), least=0
    )
    watched = all(
        len(row) == len(WATCHED) and _numbers([x for x in row if x is not None], least=0) for row in found.watched
    )
    right = right and len(found.notes) <= MOST_NOTES
    if not right or not watched or found.samples < 1 or found.parameters < 0 or not found.golden_seconds > 0:
        raise Damaged("its description has impossible numbers")
    return found


def read_floors(texts: Sequence[Any]) -> Floors | None:
    """Both floors, in the order of `Floors`; None where one is missing. Raises ``Damaged``."""
    if len(texts) > 2:
        raise Damaged("it has more than two noise floors")
    found = [_read_floor(text) for text in texts]
    return Floors(*found) if len(found) == 2 else None


def _read_floor(text: Any) -> FloorValues:
    found = parsed(FloorValues, text, "floor")
    count = len(found.accuracy)
    if not 1 <= count <= MOST_REPLICAS or {len(found.loss), len(found.churn), len(found.same)} != {count}:
        raise Damaged("its floor has columns of other lengths")
    right = _numbers((*found.accuracy, *found.loss)) and _numbers((*found.churn, *found.band), least=0)
    if not right or found.window < 1:
        raise Damaged("its floor has impossible numbers")
    return found


def read_training_trial(target: Any, k: Any, targets: Set[str]) -> TrialId:
    """A trial that its campaign has, ``guarded:`` and ``made:`` ones included. Raises ``Damaged``."""
    name = target if isinstance(target, str) else ""
    plain = name.removeprefix(GUARDED)
    known = plain.removeprefix(MADE) in LADDERS if plain.startswith(MADE) else plain in targets
    return read_trial(target, None, k, {name} if known else set(), (None,))


def read_training_row(
    trial: TrialId, values: Sequence[Any], steps: int, allowance: Allowance, *, curves: bool = True
) -> TrainingRow:
    """A trial from its other columns; ``steps``: of the run; ``curves``: read them. Raises ``Damaged``."""
    step, site, phase, layer, model, fault, written, usual, reason, ran, *rest = values
    losses, metric, watched, test, test_loss, churn, caught, error, bits, seconds, worker = rest
    target, what = trial.target, f"trial {shown(str(trial))}"
    texts = (site, phase, layer, model, reason, error)
    allowance.read(*texts, fault, losses, metric, watched)
    whole = all(is_whole(v) for v in (step, ran, worker)) and (caught is None or is_whole(caught))
    reals = all(v is None or is_real(v) for v in (written, usual, test, test_loss, churn))
    if not (all(isinstance(v, str) for v in texts) and whole and reals and bits in (0, 1)):
        raise Damaged(f"{what} has columns of other types")
    if not is_real(seconds) or not 0 <= seconds < math.inf:
        raise Damaged(f"{what} took no number of seconds")
    if reason not in REASONS or not 0 <= step < steps or (reason in UNDER_GUARD) > target.startswith(GUARDED):
        raise Damaged(f"{what} has an impossible step or reason")
    check_faults(fault, what)
    followed = reason in FOLLOWED
    least, most = (1, steps - step) if followed else (0, 2 * steps)
    if not least <= ran <= most or (followed and target.startswith(GUARDED)):
        raise Damaged(f"{what} has an impossible length")
    count, empty = ran if followed else 0, np.empty(0)
    return TrainingRow(
        trial=trial,
        struck=Struck(step, site, phase, layer, model),
        fault=fault,
        written=_real(written),
        usual=_real(usual),
        reason=reason,
        ran=ran,
        losses=_curve(losses, count, what, allowance) if curves else empty,
        metric=_curve(metric, count, what, allowance) if curves else empty,
        watched=_curve(watched, min(count, WATCHED_STEPS) * len(WATCHED), what, allowance).reshape(-1, len(WATCHED)),
        test=_real(test),
        test_loss=_real(test_loss),
        churn=_real(churn),
        caught=caught,
        error=error,
        seconds=float(seconds),
        worker=worker,
        bits=bool(bits),
    )


def _curve(blob: Any, count: int, what: str, allowance: Allowance) -> Floats:
    content = allowance.unpack(blob, 8 * count)
    if len(content) != 8 * count:
        raise Damaged(f"{what} has a curve of an impossible length")
    return np.frombuffer(content, np.float64)


def _real(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _numbers(values: Sequence[float], least: float = -math.inf) -> bool:
    return all(math.isfinite(v) and v >= least for v in values)
