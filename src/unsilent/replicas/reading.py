"""Reading what a file of replicas says: nothing in it is believed before it is checked; what does not fit raises ``Damaged``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.opening import TEXT_BYTES
from unsilent.campaigns.reading import Allowance, Damaged, is_real, is_whole, shown
from unsilent.errors import UsageError
from unsilent.replicas.spec import Replica, ReplicaRow, ReplicaSpec, Trained
from unsilent.replicas.switches import Switches

MOST_SAMPLES = 2**24
"""Largest number of elements of an array that is read."""
TOLD = (
    "name",
    "steps",
    "fingerprint",
    "streams",
    "layouts",
    "draws",
    "device",
    "parameters",
    "machine",
    "versions",
    "info",
)
"""What is written of a training as JSON."""
_HASH, _DIGEST = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]+")
_DTYPES = ("float32", "float64")
_MOST_NUMBER = 2**31
_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """How long the arrays of each run of a training are."""

    steps: int
    hashes: int
    samples: int
    parameters: int


def read_training(row: Sequence[Any], allowance: Allowance) -> tuple[Trained, Shape, ReplicaSpec]:
    """A training from its row: its hash must be that of what the row says. Paths in the spec lack their folders."""
    training, spec, found, labels, groups = row
    if not isinstance(training, str) or not _HASH.fullmatch(training):
        raise Damaged("a training has no hash")
    told = read_json(found, dict, "a training")
    if told.keys() != set(TOLD):
        raise Damaged("what is written of a training lacks a part, or has one too many")
    _check_told(told)
    own = _spec(read_json(spec, dict, "the spec of a training"))
    count, rest = divmod(len(content := allowance.unpack(labels, 8 * MOST_SAMPLES)), 8)
    if rest or not count:
        raise Damaged("the labels of a training cannot be read")
    streams = None if told["streams"] is None else tuple(told["streams"])
    trained = Trained(
        **{**told, "streams": streams},
        labels=np.frombuffer(content, np.int64),
        groups=_groups(groups, count, allowance),
    )
    try:
        right = trained.hash(own) == training and own.steps in (None, trained.steps)
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right:
        raise Damaged(f"training {training[:8]} is not the one that its hash stands for")
    return trained, Shape(trained.steps, -(-trained.steps // own.every), count, trained.parameters), own


def _check_told(told: Mapping[str, Any]) -> None:
    texts = all(_texts(told[name]) for name in ("fingerprint", "machine", "versions"))
    names = isinstance(told["name"], str) and isinstance(told["device"], str)
    counts = is_whole(told["steps"]) and told["steps"] >= 1 and is_whole(told["parameters"]) and told["parameters"] >= 0
    streams = told["streams"] is None or (
        isinstance(told["streams"], list) and all(isinstance(one, str) for one in told["streams"])
    )
    if not (
        texts and names and counts and streams and all(isinstance(told[name], bool) for name in ("layouts", "draws"))
    ):
        raise Damaged("what is written of a training has parts of other types")
    if not isinstance(told["info"], dict):
        raise Damaged("what is written of a training has parts of other types")


def _spec(found: Mapping[str, Any]) -> ReplicaSpec:
    try:
        options = tuple((str(name), str(value)) for name, value in found["options"])
        spec = ReplicaSpec(**{**found, "options": options})
    except (ValueError, TypeError, KeyError):
        raise Damaged("the spec of a training cannot be read") from None
    numbers = (
        is_whole(spec.seed)
        and is_whole(spec.every)
        and spec.every >= 1
        and (spec.steps is None or is_whole(spec.steps))
    )
    if not (numbers and isinstance(spec.workload, str) and isinstance(spec.data, str | None)):
        raise Damaged("the spec of a training has parts of other types")
    return spec


def _groups(blob: Any, count: int, allowance: Allowance) -> dict[str, NDArray[np.bool_]]:
    try:
        text = allowance.unpack(blob, MOST_SAMPLES).decode()
    except UnicodeDecodeError:
        raise Damaged("the groups of a training cannot be read") from None
    found = {}
    for name, mask in read_json(text, dict, "the groups of a training").items():
        try:
            packed = bytes.fromhex(mask)
        except (ValueError, TypeError):
            raise Damaged("a group of a training cannot be read") from None
        if len(packed) != -(-count // 8):
            raise Damaged(f"a group of a training does not have {count} samples")
        found[name] = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(np.bool_)
    return found


def read_replica(switches: Any, number: Any) -> Replica:
    """Which run it is."""
    if not is_whole(number) or not 0 <= number < _MOST_NUMBER:
        raise Damaged(f"a run has the number {shown(number)}")
    if not isinstance(switches, str) or len(switches) > _LONGEST:
        raise Damaged("a run has switches that are no text")
    try:
        found = Switches.parse(switches)
    except (UsageError, ValueError):
        found = None
    if found is None or str(found) != switches:
        raise Damaged(f"a run has unknown switches {shown(switches)}")
    return Replica(found, number)


def read_row(values: tuple[Any, ...], shape: Shape, allowance: Allowance) -> ReplicaRow:
    """A run from its columns."""
    switches, number, losses, hashes, finals, loss, metrics, predictions, weights, dtype, notes, seconds, worker = (
        values
    )
    replica = read_replica(switches, number)
    allowance.read(losses, hashes, finals, metrics, predictions, weights, notes)
    if not is_real(loss) and loss is not None:
        raise Damaged(f"the loss of run {replica} is no number")
    if not is_real(seconds) or not 0 <= seconds < math.inf or not is_whole(worker):
        raise Damaged(f"the time or the worker of run {replica} is no number")
    said = read_json(notes, list, f"run {replica}")
    if not all(isinstance(note, str) for note in said):
        raise Damaged(f"the notes of run {replica} are no text")
    return ReplicaRow(
        replica=replica,
        losses=_array(losses, np.float64, shape.steps, f"losses of run {replica}", allowance),
        hashes=_array(hashes, np.uint64, shape.hashes, f"hashes of run {replica}", allowance),
        finals=list(_finals(read_json(finals, list, f"run {replica}"))),
        loss=math.nan if loss is None else float(loss),
        metrics=_metrics(read_json(metrics, dict, f"run {replica}")),
        predictions=_array(predictions, np.int64, shape.samples, f"predictions of run {replica}", allowance),
        weights=None if weights is None else read_weights(weights, dtype, shape),
        notes=tuple(said),
        seconds=float(seconds),
        worker=worker,
    )


def _finals(pairs: Iterable[Any]) -> Iterable[tuple[str, str]]:
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise Damaged("hashes of a final state cannot be read")
        if not _DIGEST.fullmatch(pair[1]):
            raise Damaged("a hash of a final state is none")
        yield pair[0], pair[1]


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    try:
        if all(is_real(value) for value in found.values()):
            return {name: float(value) for name, value in found.items()}
    except OverflowError:
        pass
    raise Damaged("a metric of a run is no number")


def read_weights(blob: Any, dtype: Any, shape: Shape) -> NDArray[Any] | None:
    """Final weights of a run; None where none were kept."""
    if blob is None and dtype == "":
        return None
    if dtype not in _DTYPES or not isinstance(blob, bytes) or len(blob) != shape.parameters * np.dtype(dtype).itemsize:
        raise Damaged(f"weights cannot be read, or are not {shape.parameters:,}")
    found: NDArray[Any] = np.frombuffer(blob, dtype)
    return found


def _array(blob: Any, dtype: Any, count: int, what: str, allowance: Allowance) -> NDArray[Any]:
    content = allowance.unpack(blob, 8 * min(count, MOST_SAMPLES))
    if len(content) != 8 * count:
        raise Damaged(f"the {what} are not {count:,}")
    found: NDArray[Any] = np.frombuffer(content, dtype)
    return found


def read_json(text: Any, kind: type, what: str) -> Any:
    """A value of that kind from JSON text."""
    from pydantic_core import from_json

    try:
        found = from_json(text) if isinstance(text, str) and len(text) <= TEXT_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise Damaged(f"what is written of {what} cannot be read")
    return found


def _texts(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
