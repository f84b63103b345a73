"""The file of replicas: one SQLite file (WAL) with any number of trainings, one writer, any number of readers.

Each row is committed when its run ends: a kill loses the runs in flight, and the same command makes them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.filed import StoreFile
from unsilent.campaigns.reading import Damaged
from unsilent.campaigns.replicas.looks import Look, Looked
from unsilent.campaigns.replicas.spec import WEIGHT_BYTES, Replica, ReplicaRow, ReplicaSpec, Trained
from unsilent.campaigns.replicas.switches import Switches
from unsilent.campaigns.spec import canonical
from unsilent.errors import UsageError

_SCHEMA = """
CREATE TABLE training (
    hash TEXT PRIMARY KEY, spec TEXT NOT NULL, found TEXT NOT NULL, labels BLOB NOT NULL, groups BLOB NOT NULL
);
CREATE TABLE replica (
    training TEXT NOT NULL REFERENCES training (hash), switches TEXT NOT NULL, number INTEGER NOT NULL,
    losses BLOB NOT NULL, hashes BLOB NOT NULL, finals TEXT NOT NULL, loss REAL, metrics TEXT NOT NULL,
    predictions BLOB NOT NULL, weights BLOB, dtype TEXT NOT NULL, notes TEXT NOT NULL,
    seconds REAL NOT NULL, worker INTEGER NOT NULL
);
CREATE UNIQUE INDEX replica_identity ON replica (training, switches, number);
CREATE TABLE look (
    training TEXT NOT NULL REFERENCES training (hash), switches TEXT NOT NULL, number INTEGER NOT NULL,
    step INTEGER NOT NULL, unordered INTEGER NOT NULL, seen BLOB NOT NULL
);
CREATE UNIQUE INDEX look_identity ON look (training, switches, number, step, unordered);
CREATE TABLE usage (seconds REAL NOT NULL, cpu_seconds REAL NOT NULL);
"""
MOST_SAMPLES = 2**27
"""Largest number of elements of an array that is read, so that a hostile file cannot fill the memory."""
_COLUMNS = (
    "switches, number, losses, hashes, finals, loss, metrics, predictions, weights, dtype, notes, seconds, worker"
)
_DTYPES = ("float32", "float64")


class ReplicaStore(StoreFile):
    """An open file of replicas."""

    application, version, schema, owner = 0x556E7372, 3, _SCHEMA, "training"  # "Unsr"

    def bind(self, spec: ReplicaSpec, trained: Trained) -> str:
        """Note a training, if it is new, and return its hash."""
        found = trained.hash(spec)
        told = {name: getattr(trained, name) for name in _TOLD}
        masks = {name: np.packbits(mask).tobytes().hex() for name, mask in trained.groups.items()}
        with self._errors(), self._db:
            self._db.execute(
                "INSERT OR IGNORE INTO training VALUES (?, ?, ?, ?, ?)",
                (
                    found,
                    canonical(spec.identity()),
                    json.dumps(told, sort_keys=True, default=str),
                    _packed(trained.labels),
                    zlib.compress(json.dumps(masks).encode(), 1),
                ),
            )
        return found

    def trained(self, training: str) -> Trained:
        """What was found out about a training; raises ``StoreError`` where the file does not hold it."""
        with self._errors():
            row = self._one_of("SELECT found, labels, groups FROM training WHERE hash = ?", training)
            if row is None:
                raise Damaged(f"it holds no training {training[:8]}")
            told = _read_json(row[0], dict)
            labels = _unpacked(row[1], "int64")
            try:
                masks = json.loads(_inflated(row[2], MOST_SAMPLES))
                groups = {
                    str(name): np.unpackbits(np.frombuffer(bytes.fromhex(mask), np.uint8), count=len(labels)).astype(
                        bool
                    )
                    for name, mask in masks.items()
                }
                streams = None if told["streams"] is None else tuple(map(str, told["streams"]))
                return Trained(**{**told, "streams": streams}, labels=labels, groups=groups)
            except (ValueError, TypeError, KeyError, AttributeError):
                raise Damaged("what is written of a training cannot be read") from None

    def trainings(self) -> list[str]:
        """Hashes of all trainings there are, the oldest first."""
        with self._errors():
            return [str(row[0]) for row in self._db.execute("SELECT hash FROM training ORDER BY rowid")]

    def add(self, training: str, row: ReplicaRow) -> None:
        """Commit one row; raises ``StoreError`` on a full disk, keeping what was committed before."""
        kept = row.weights if row.weights is not None and row.weights.nbytes <= WEIGHT_BYTES else None
        values = (
            training,
            str(row.replica.switches),
            row.replica.number,
            _packed(row.losses),
            _packed(row.hashes),
            json.dumps([list(pair) for pair in row.finals]),
            row.loss,
            json.dumps(dict(row.metrics), sort_keys=True),
            _packed(row.predictions),
            None if kept is None else kept.tobytes(),
            "" if kept is None else str(kept.dtype),
            json.dumps(row.notes),
            row.seconds,
            row.worker,
        )
        with self._errors(), self._db:
            self._db.execute("INSERT INTO replica VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", values)

    def done(self, training: str) -> set[Replica]:
        """All runs of a training that are stored."""
        with self._errors():
            found = self._db.execute("SELECT switches, number FROM replica WHERE training = ?", (training,)).fetchall()
            return {_replica(*row) for row in found}

    def rows(self, training: str, switches: Switches, count: int, *, weights: bool = False) -> Iterator[ReplicaRow]:
        """The first ``count`` runs with these switches, by number; their weights only where they are asked for."""
        columns = _COLUMNS if weights else _COLUMNS.replace("weights", "NULL")
        query = f"SELECT {columns} FROM replica WHERE training = ? AND switches = ? AND number < ? ORDER BY number"  # noqa: S608
        with self._errors(), closing(self._db.execute(query, (training, str(switches), count))) as found:
            for row in found:
                yield _row(row)

    def weights(self, training: str, replica: Replica) -> NDArray[Any] | None:
        """Final weights of one run; None where they were not kept."""
        query = "SELECT weights, dtype FROM replica WHERE training = ? AND switches = ? AND number = ?"
        with self._errors():
            row = self._one_of(query, training, str(replica.switches), replica.number)
            return None if row is None else _weights(*row)

    def add_seen(self, training: str, look: Look, seen: Looked) -> None:
        """Commit what was seen of one step."""
        blob = zlib.compress(json.dumps(seen.json()).encode(), 1)
        values = (training, str(look.switches), look.number, look.step, int(look.unordered), blob)
        with self._errors(), self._db:
            self._db.execute("INSERT INTO look VALUES (?,?,?,?,?,?)", values)

    def seen(self, training: str, look: Look) -> Looked | None:
        """What was seen of one step; None where nobody looked."""
        query = (
            "SELECT seen FROM look WHERE training = ? AND switches = ? AND number = ? AND step = ? AND unordered = ?"
        )
        with self._errors():
            row = self._one_of(query, training, str(look.switches), look.number, look.step, int(look.unordered))
            return None if row is None else Looked.of(_read_json(_inflated(row[0], MOST_SAMPLES), list))

    def note_usage(self, seconds: float, cpu_seconds: float) -> None:
        """Add what one session took."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO usage VALUES (?, ?)", (seconds, cpu_seconds))

    def usage(self) -> tuple[float, float]:
        """Wall and CPU seconds over all sessions."""
        row = self._one("SELECT TOTAL(seconds), TOTAL(cpu_seconds) FROM usage")
        return (float(row[0]), float(row[1])) if row else (0.0, 0.0)

    def _one_of(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._db.execute(sql, values).fetchone()
        return row


_TOLD = (
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


def _packed(array: NDArray[Any]) -> bytes:
    return zlib.compress(np.ascontiguousarray(array).tobytes(), 1)


def _inflated(blob: Any, most: int) -> bytes:
    """The bytes of a blob; raises ``Damaged`` where there are more than ``most``."""
    if not isinstance(blob, bytes):
        raise Damaged("an array is not stored as bytes")
    opened = zlib.decompressobj()
    content = opened.decompress(blob, most)
    if opened.unconsumed_tail or not opened.eof:
        raise Damaged("an array is cut or too long")
    return content


def _unpacked(blob: Any, dtype: str) -> NDArray[Any]:
    content = _inflated(blob, 8 * MOST_SAMPLES)
    if len(content) % 8:
        raise Damaged("an array does not have whole elements")
    return np.frombuffer(content, dtype)


def _weights(blob: Any, dtype: Any) -> NDArray[Any] | None:
    if blob is None:
        return None
    if dtype not in _DTYPES or not isinstance(blob, bytes) or len(blob) % np.dtype(dtype).itemsize:
        raise Damaged("weights cannot be read")
    return np.frombuffer(blob, dtype)


def _read_json(text: Any, kind: type) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, TypeError):
        found = None
    if not isinstance(found, kind):
        raise Damaged("what is written of a run cannot be read")
    return found


def _replica(switches: Any, number: Any) -> Replica:
    if not isinstance(number, int) or number < 0:
        raise Damaged(f"a run has the number {number!r}")
    try:
        return Replica(Switches.parse(str(switches)), number)
    except UsageError as error:
        raise Damaged(f"a run has unknown switches: {error}") from None


def _row(values: tuple[Any, ...]) -> ReplicaRow:
    switches, number, losses, hashes, finals, loss, metrics, predictions, weights, dtype, notes, seconds, worker = (
        values
    )
    pairs = _read_json(finals, list)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise Damaged("hashes of a final state cannot be read")
    return ReplicaRow(
        replica=_replica(switches, number),
        losses=_unpacked(losses, "float64"),
        hashes=_unpacked(hashes, "uint64"),
        finals=[(str(name), str(digest)) for name, digest in pairs],
        loss=float("nan") if loss is None else float(loss),
        metrics={str(k): float(v) for k, v in _read_json(metrics, dict).items()},
        predictions=_unpacked(predictions, "int64"),
        weights=_weights(weights, dtype),
        notes=tuple(map(str, _read_json(notes, list))),
        seconds=float(seconds),
        worker=int(worker),
    )
