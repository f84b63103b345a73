"""The store of a training campaign: its golden run, its trials with their curves, the two noise floors it is judged by."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from unsilent.campaigns.bound import TABLES, CampaignFile
from unsilent.campaigns.reading import ascending, stored_json
from unsilent.campaigns.rounds import CellPlan
from unsilent.campaigns.spec import TrialId
from unsilent.campaigns.trainings.reading import (
    Floors,
    read_floors,
    read_found,
    read_training_row,
    read_training_spec,
    read_training_trial,
)
from unsilent.campaigns.trainings.spec import Floats, TrainingFound, TrainingRow, TrainingSpec
from unsilent.errors import StoreError

_SCHEMA = """
CREATE TABLE trial (
    target TEXT NOT NULL, k INTEGER NOT NULL,
    step INTEGER NOT NULL, site TEXT NOT NULL, phase TEXT NOT NULL, layer TEXT NOT NULL, model TEXT NOT NULL,
    fault TEXT NOT NULL, written REAL, usual REAL, reason TEXT NOT NULL, ran INTEGER NOT NULL,
    losses BLOB NOT NULL, metric BLOB NOT NULL, watched BLOB NOT NULL,
    test REAL, test_loss REAL, churn REAL, caught INTEGER, error TEXT NOT NULL, bits INTEGER NOT NULL,
    seconds REAL NOT NULL, worker INTEGER NOT NULL
);
CREATE UNIQUE INDEX trial_identity ON trial (target, k);
CREATE TABLE floor (replicas TEXT NOT NULL);
"""
_COLUMNS = (
    "target, k, step, site, phase, layer, model, fault, written, usual, reason, ran, losses, metric, watched, test, test_loss, "
    "churn, caught, error, bits, seconds, worker"
)


class TrainingStore(CampaignFile[TrainingSpec, TrainingFound]):
    """An open store of a training campaign."""

    application, version, schema = 0x556E7374, 1, TABLES + _SCHEMA  # "Unst"

    def _read_spec(self, text: Any) -> TrainingSpec:
        return read_training_spec(text)

    def _read_description(self, text: Any) -> TrainingFound:
        return read_found(text)

    def rounds(self) -> list[list[CellPlan]]:
        """None: these campaigns are planned at once."""
        return []

    def add_round(self, cells: object) -> None:
        """Raises ``StoreError``: see `rounds`."""
        raise StoreError(f"{self.path} holds a training campaign, which is not planned in rounds")

    # -- what it is judged by ------------------------------------------------------------------------------------

    def note_floors(self, floors: Floors) -> None:
        """Keep what fault-free replicas ended in, in place of what was kept before."""
        both = [(stored_json(floor.to_json()),) for floor in (floors.implementation, floors.seeds)]
        with self._together():
            self._db.execute("DELETE FROM floor")
            self._db.executemany("INSERT INTO floor VALUES (?)", both)

    def floors(self) -> Floors | None:
        """What replicas ended in; None where those of a floor are missing."""
        with self._errors():
            rows = self._db.execute("SELECT replicas FROM floor ORDER BY rowid LIMIT 3").fetchall()
            return read_floors([row[0] for row in rows])

    # -- trials --------------------------------------------------------------------------------------------------

    def add(self, rows: Iterable[TrainingRow]) -> None:
        """Commit rows together; raises ``StoreError`` on a full disk, keeping what was committed before."""
        marks = ",".join("?" * len(_COLUMNS.split(",")))
        with self._together():
            self._db.executemany(f"INSERT INTO trial VALUES ({marks})", (_values(row) for row in rows))  # noqa: S608

    def done(self) -> set[TrialId]:
        """Identities of all stored trials."""
        with self._errors():
            targets = self._targets()
            rows = self._db.execute("SELECT target, k FROM trial")
            return {read_training_trial(target, k, targets) for target, k in rows}

    def rows(self, *, curves: bool = True) -> Iterator[TrainingRow]:
        """All trials in canonical order (target, k); without ``curves`` their losses and metrics are left out."""
        with self._errors():
            yield from ascending(self._select("ORDER BY target, k", (), curves))

    def row(self, trial: TrialId) -> TrainingRow:
        """One trial; raises ``StoreError`` when it was not run."""
        found = list(self._select("WHERE target = ? AND k = ?", (trial.target, trial.k), True))
        if not found:
            targets = ", ".join([t.name for t in self.description.targets][:8])
            raise StoreError(f"{self.path} has no trial {trial}; there are TARGET/x/NUMBER with {targets}")
        return found[0]

    def _select(self, clause: str, values: tuple[Any, ...], curves: bool) -> Iterator[TrainingRow]:
        columns = _COLUMNS if curves else _COLUMNS.replace("losses, metric", "NULL, NULL")
        query = f"SELECT {columns} FROM trial {clause}"  # noqa: S608 - constants
        with self._errors():
            steps, targets, allowance = self.description.steps, self._targets(), self._allowance()
            with self._query(query, values) as found:
                for target, k, *rest in found:
                    trial = read_training_trial(target, k, targets)
                    yield read_training_row(trial, rest, steps, allowance, curves=curves)

    def _targets(self) -> set[str]:
        return {target.name for target in self.description.targets}


def _values(row: TrainingRow) -> tuple[Any, ...]:
    return (
        row.trial.target, row.trial.k, *row.struck, row.fault, _real(row.written), _real(row.usual), row.reason, row.ran,
        _packed(row.losses), _packed(row.metric), _packed(row.watched),
        _real(row.test), _real(row.test_loss), _real(row.churn),
        row.caught, row.error, int(row.bits), row.seconds, row.worker,
    )  # fmt: skip


def _real(value: float) -> float | None:
    """SQLite has no NaN."""
    return None if np.isnan(value) else float(value)


def _packed(array: Floats) -> bytes:
    return zlib.compress(np.ascontiguousarray(array, dtype=np.float64).tobytes(), 1)
