"""The file of replicas: one SQLite file (WAL) with any number of trainings, one writer, any number of readers.

Each row is committed when its run ends: a kill loses the runs in flight, and the same command makes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.campaigns.filed import HELD, StoreFile
from unsilent.campaigns.opening import TEXT_BYTES
from unsilent.campaigns.reading import Damaged, stored_json
from unsilent.campaigns.spec import canonical
from unsilent.errors import UsageError
from unsilent.replicas.looks import Look, Looked, read_look
from unsilent.replicas.reading import TOLD, Shape, read_replica, read_row, read_training, read_weights
from unsilent.replicas.spec import WEIGHT_BYTES, Replica, ReplicaRow, ReplicaSpec, Trained
from unsilent.replicas.switches import Switches

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
_COLUMNS = (
    "switches, number, losses, hashes, finals, loss, metrics, predictions, weights, dtype, notes, seconds, worker"
)
_TRAINING = "hash, spec, found, labels, groups"
LISTED = 8
"""Trainings that an error names."""


class ReplicaStore(StoreFile):
    """An open file of replicas."""

    application, version, schema, owner = 0x556E7372, 3, _SCHEMA, "training"  # "Unsr"
    longest = TEXT_BYTES + WEIGHT_BYTES

    def __init__(self, path: str | Path, *, write: bool = False) -> None:
        super().__init__(path, write=write)
        self._shapes: dict[str, Shape] = {}

    def bind(self, spec: ReplicaSpec, trained: Trained) -> str:
        """Note a training, if it is new, and return its hash."""
        found = trained.hash(spec)
        told = {name: getattr(trained, name) for name in TOLD}
        masks = {name: np.packbits(mask).tobytes().hex() for name, mask in trained.groups.items()}
        with self._errors(), self._db:
            self._db.execute(
                "INSERT OR IGNORE INTO training VALUES (?, ?, ?, ?, ?)",
                (
                    found,
                    canonical(spec.identity()),
                    stored_json(told),
                    _packed(trained.labels),
                    zlib.compress(stored_json(masks).encode(), 1),
                ),
            )
        return found

    def trained(self, training: str) -> Trained:
        """What was found out about a training; raises ``UsageError`` with those there are where the file does not hold it.

        Which runs of it there are is checked, too: what cannot be read must not look as if it had not been run.
        """
        with self._errors():
            trained, shape, _ = self._training(training)
            self._check(training, shape)
            return trained

    def spec(self, training: str) -> ReplicaSpec:
        """What was trained, by whoever stored it first; paths lack their folders."""
        with self._errors():
            return self._training(training)[2]

    def _training(self, training: str) -> tuple[Trained, Shape, ReplicaSpec]:
        row = self._one_of(f"SELECT {_TRAINING} FROM training WHERE hash = ?", training)  # noqa: S608 - a constant
        if row is None:
            raise UsageError(self._unknown(training))
        return read_training(row, self._allowance())

    def _shape(self, training: str) -> Shape:
        found = self._shapes.get(training)
        if found is None:
            found = self._shapes[training] = self._training(training)[1]
        return found

    def _unknown(self, training: str) -> str:
        rows = self._db.execute(f"SELECT {_TRAINING} FROM training ORDER BY rowid").fetchall()  # noqa: S608 - a constant
        allowance = self._allowance()
        names = [f"{read_training(row, allowance)[0].name} {row[0][:8]}" for row in rows]
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        there = f"it holds {', '.join(names[:LISTED])}{more}: give one of these" if names else "it holds none"
        return f"{self.path} has no training {training[:8]}; {there}, or run its replicas first"

    def _check(self, training: str, shape: Shape) -> None:
        """Raise ``Damaged`` where a row belongs to no training, or says of no run that it is one."""
        for table in ("replica", "look"):
            orphan = (
                f"SELECT 1 FROM {table} WHERE training IS NULL OR training NOT IN (SELECT hash FROM training) LIMIT 1"  # noqa: S608
            )
            if self._one_of(orphan) is not None:
                raise Damaged("a run belongs to no training that it holds")
        for row in self._db.execute("SELECT switches, number FROM replica WHERE training = ?", (training,)):
            read_replica(*row)
        looks = "SELECT switches, number, step, unordered FROM look WHERE training = ?"
        for *row, step, unordered in self._db.execute(looks, (training,)):
            read_replica(*row)
            if not isinstance(step, int) or not 0 <= step < shape.steps or unordered not in (0, 1):
                raise Damaged("a look is at no step of its training")
        kinds = "SELECT DISTINCT typeof(weights), dtype, length(weights) FROM replica WHERE training = ?"
        if len(self._db.execute(kinds, (training,)).fetchmany(2)) > 1:
            raise Damaged("the weights of runs of one training are not of one kind")

    def trainings(self) -> list[str]:
        """Hashes of all trainings there are, the oldest first."""
        with self._errors():
            rows = self._db.execute("SELECT hash FROM training ORDER BY rowid").fetchall()
            for row in rows:
                self._shape(row[0])
            return [row[0] for row in rows]

    def add(self, training: str, row: ReplicaRow) -> None:
        """Commit one row; raises ``StoreError`` on a full disk, keeping what was committed before.

        Raises ``UsageError`` where it has predictions of other samples than were held out before the first run.
        """
        with self._errors():
            samples = self._shape(training).samples
        if row.predictions.size != samples:
            raise UsageError(
                f"replica {row.replica} has {row.predictions.size} predictions where {samples} samples are held out; "
                "evaluate on the same samples in the same order at every call"
            )
        kept = row.weights if row.weights is not None and row.weights.nbytes <= WEIGHT_BYTES else None
        values = (
            training,
            str(row.replica.switches),
            row.replica.number,
            _packed(row.losses),
            _packed(row.hashes),
            stored_json([list(pair) for pair in row.finals]),
            row.loss,
            stored_json(dict(row.metrics)),
            _packed(row.predictions),
            None if kept is None else kept.tobytes(),
            "" if kept is None else str(kept.dtype),
            stored_json(row.notes),
            row.seconds,
            row.worker,
        )
        with self._errors(), self._db:
            self._db.execute("INSERT INTO replica VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", values)

    def done(self, training: str) -> set[Replica]:
        """All runs of a training that are stored."""
        with self._errors():
            found = self._db.execute("SELECT switches, number FROM replica WHERE training = ?", (training,)).fetchall()
            return {read_replica(*row) for row in found}

    def rows(self, training: str, switches: Switches, count: int, *, weights: bool = False) -> Iterator[ReplicaRow]:
        """The first ``count`` runs with these switches, by number; their weights only where they are asked for."""
        columns = _COLUMNS if weights else _COLUMNS.replace("weights", "NULL")
        query = f"SELECT {columns} FROM replica WHERE training = ? AND switches = ? AND number < ? ORDER BY number"  # noqa: S608
        with self._errors():
            shape, allowance = self._shape(training), self._allowance()
            with self._query(query, (training, str(switches), count)) as found:
                for row in found:
                    yield read_row(row, shape, allowance)

    def weights(self, training: str, replica: Replica) -> NDArray[Any] | None:
        """Final weights of one run; None where they were not kept."""
        query = "SELECT weights, dtype FROM replica WHERE training = ? AND switches = ? AND number = ?"
        with self._errors():
            row = self._one_of(query, training, str(replica.switches), replica.number)
            return None if row is None else read_weights(row[0], row[1], self._shape(training))

    def add_seen(self, training: str, look: Look, seen: Looked) -> None:
        """Commit what was seen of one step."""
        blob = zlib.compress(stored_json(seen.json()).encode(), 1)
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
            return None if row is None else read_look(row[0], self._allowance())

    def _one_of(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._db.execute(sql, values).fetchone()
        return row


HELD[ReplicaStore.application] = ("replicas of unsilent noise", "unsilent noise needs a store of replicas")


def _packed(array: NDArray[Any]) -> bytes:
    return zlib.compress(np.ascontiguousarray(array).tobytes(), 1)
