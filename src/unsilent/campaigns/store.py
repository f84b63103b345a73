"""The campaign store: one SQLite file (WAL) that holds one campaign; one writer at a time, any number of readers.

Rows are committed in groups; a kill loses at most the group in flight, and those trials run again on resume. Content that
must be equal between two runs of a campaign is in columns of its own, apart from time and worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unsilent.campaigns.bound import TABLES, CampaignFile
from unsilent.campaigns.reading import (
    ascending,
    read_description,
    read_round,
    read_row,
    read_spec,
    read_trial,
    stored_json,
)
from unsilent.campaigns.rounds import CellPlan
from unsilent.campaigns.spec import CampaignSpec, Description, TrialId, TrialRow
from unsilent.errors import StoreError

APPLICATION_ID = 0x556E7369  # "Unsi"
SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE trial (
    target TEXT NOT NULL, flips INTEGER, k INTEGER NOT NULL,
    faults TEXT NOT NULL, codes BLOB NOT NULL, incorrect_batches INTEGER NOT NULL, severity REAL NOT NULL, error TEXT NOT NULL,
    seconds REAL NOT NULL, worker INTEGER NOT NULL
);
CREATE UNIQUE INDEX trial_identity ON trial (target, IFNULL(flips, 0), k);
CREATE TABLE round (cells TEXT NOT NULL);
"""


class Store(CampaignFile[CampaignSpec, Description]):
    """An open campaign store."""

    application, version, schema = APPLICATION_ID, SCHEMA_VERSION, TABLES + _SCHEMA

    def _read_spec(self, text: Any) -> CampaignSpec:
        return read_spec(text)

    def _read_description(self, text: Any) -> Description:
        return read_description(text)

    def add_round(self, cells: Sequence[CellPlan]) -> None:
        """Remember what a look decided, before any trial of it is run."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO round VALUES (?)", (stored_json([c.to_json() for c in cells]),))

    def rounds(self) -> list[list[CellPlan]]:
        """All decisions, the first one first; none in a campaign that was planned at once."""
        with self._errors():
            names, _ = self._strata()
            return [read_round(row[0], names) for row in self._db.execute("SELECT cells FROM round ORDER BY rowid")]

    # -- trials ------------------------------------------------------------------------------------------------

    def add(self, rows: Iterable[TrialRow]) -> None:
        """Commit rows together, taking one at a time; raises ``StoreError`` on a full disk, keeping what was committed before."""
        with self._together():
            self._db.executemany(
                "INSERT INTO trial VALUES (?,?,?,?,?,?,?,?,?,?)",
                (
                    (
                        *r.trial,
                        r.faults,
                        zlib.compress(r.codes, 1),
                        r.incorrect_batches,
                        r.severity,
                        r.error,
                        r.seconds,
                        r.worker,
                    )
                    for r in rows
                ),
            )

    def done(self) -> set[TrialId]:
        """Identities of all stored trials."""
        with self._errors():
            names, counts = self._strata()
            rows = self._db.execute("SELECT target, flips, k FROM trial")
            return {read_trial(target, flips, k, names, counts) for target, flips, k in rows}

    def rows(self) -> Iterator[TrialRow]:
        """All trials in canonical order (target, flips, k), each of them one that the campaign has."""
        # By the index: sorting cannot be interrupted.
        with self._errors():
            yield from ascending(self._select("ORDER BY target, IFNULL(flips, 0), k"))

    def row(self, trial: TrialId) -> TrialRow:
        """One trial; raises ``StoreError`` when it was not run."""
        found = list(self._select("WHERE target = ? AND flips IS ? AND k = ?", tuple(trial)))
        if not found:
            targets = ", ".join(list(dict.fromkeys(t.name for t in self.description.targets))[:8])
            flips = ", ".join(f"x{f or ''}" for f in self.spec.flips)
            most = max(t.slots for t in self.description.targets) if self.spec.enumerated else self.budget()[0]
            raise StoreError(
                f"{self.path} has no trial {trial}; there are TARGET/xFLIPS/NUMBER with {targets} … and {flips}, "
                f"numbers below {most}"
            )
        return found[0]

    def _select(self, clause: str, values: tuple[Any, ...] = ()) -> Iterator[TrialRow]:
        columns = "target, flips, k, faults, codes, incorrect_batches, severity, error, seconds, worker"
        query = f"SELECT {columns} FROM trial {clause}"  # noqa: S608 - constants
        with self._errors():
            samples, allowance = self.description.samples, self._allowance()
            names, counts = self._strata()
            with self._query(query, values) as found:
                for target, flips, k, *rest in found:
                    yield read_row(read_trial(target, flips, k, names, counts), rest, samples, allowance)

    def _strata(self) -> tuple[set[str], tuple[int | None, ...]]:
        """Names of targets and numbers of flips that trials have."""
        return {target.name for target in self.description.targets}, self.spec.flips
