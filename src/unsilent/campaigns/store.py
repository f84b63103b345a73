"""The campaign store: one SQLite file (WAL) that holds one campaign; one writer at a time, any number of readers.

Rows are committed in groups; a kill loses at most the group in flight, and those trials run again on resume. Content that
must be equal between two runs of a campaign is in columns of its own, apart from time and worker.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from unsilent.campaigns.filed import StoreFile
from unsilent.campaigns.reading import read_description, read_round, read_row, read_spec
from unsilent.campaigns.rounds import CellPlan
from unsilent.campaigns.spec import CampaignSpec, Description, TrialId, TrialRow, differences, value_text
from unsilent.errors import StoreError

APPLICATION_ID = 0x556E7369  # "Unsi"
SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE campaign (
    id INTEGER PRIMARY KEY CHECK (id = 1), hash TEXT NOT NULL, spec TEXT NOT NULL, description TEXT NOT NULL
);
CREATE TABLE budget (trials INTEGER NOT NULL, command TEXT NOT NULL, created TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE trial (
    target TEXT NOT NULL, flips INTEGER, k INTEGER NOT NULL,
    faults TEXT NOT NULL, codes BLOB NOT NULL, incorrect_batches INTEGER NOT NULL, severity REAL NOT NULL, error TEXT NOT NULL,
    seconds REAL NOT NULL, worker INTEGER NOT NULL
);
CREATE UNIQUE INDEX trial_identity ON trial (target, IFNULL(flips, 0), k);
CREATE TABLE round (cells TEXT NOT NULL);
CREATE TABLE usage (seconds REAL NOT NULL, cpu_seconds REAL NOT NULL);
"""


class Store(StoreFile):
    """An open campaign store."""

    application, version, schema, owner = APPLICATION_ID, SCHEMA_VERSION, _SCHEMA, "campaign"

    # -- the campaign ------------------------------------------------------------------------------------------

    def bind(self, spec: CampaignSpec, description: Description) -> None:
        """Make this store that campaign's, or check that it is; raises ``StoreError`` when it holds another one."""
        known = self._one("SELECT hash, spec, description FROM campaign")
        if known is None:
            with self._errors(), self._db:
                self._db.execute(
                    "INSERT INTO campaign VALUES (1, ?, ?, ?)",
                    (description.campaign, json.dumps(spec.to_json()), json.dumps(description.to_json())),
                )
        elif known[0] != description.campaign:
            raise StoreError(
                f"{self.path} holds another campaign ({self._difference(spec, description)}); "
                "give another --store, or remove the file"
            )

    def _difference(self, spec: CampaignSpec, description: Description) -> str:
        found = islice(differences((self.spec, self.description), (spec, description)), 4)
        told = (
            f"{key}: {value_text(key, v[0])} there, {value_text(key, v[1])} now" if v else f"{key} changed"
            for key, v in found
        )
        return "; ".join(told) or "unknown difference"

    @property
    def spec(self) -> CampaignSpec:
        """The campaign's spec; raises ``StoreError`` when the store is empty."""
        with self._errors():
            return read_spec(self._campaign()[0])

    @property
    def description(self) -> Description:
        """What was found out before the first trial."""
        with self._errors():
            return read_description(self._campaign()[1])

    def _campaign(self) -> tuple[str, str]:
        row = self._one("SELECT spec, description FROM campaign")
        if row is None:
            raise StoreError(f"{self.path} holds no campaign yet; run the command that made it again")
        return row[0], row[1]

    def note_budget(self, trials: int, command: str) -> None:
        """Remember what budget was asked with which command (a campaign may be extended)."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO budget (trials, command) VALUES (?, ?)", (trials, command))

    def budget(self) -> tuple[int, str]:
        """Largest number of trials a stratum asked so far, and the command that asked it."""
        row = self._one("SELECT trials, command FROM budget ORDER BY trials DESC, rowid DESC LIMIT 1")
        return (int(row[0]), str(row[1])) if row else (0, "")

    def add_round(self, cells: Sequence[CellPlan]) -> None:
        """Remember what a look decided, before any trial of it is run."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO round VALUES (?)", (json.dumps([c.to_json() for c in cells]),))

    def rounds(self) -> list[list[CellPlan]]:
        """All decisions, the first one first; none in a campaign that was planned at once."""
        with self._errors():
            names = {t.name for t in self.description.targets}
            return [read_round(row[0], names) for row in self._db.execute("SELECT cells FROM round ORDER BY rowid")]

    def note_usage(self, seconds: float, cpu_seconds: float) -> None:
        """Add the time that one session of trials took, its set-up included."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO usage VALUES (?, ?)", (seconds, cpu_seconds))

    def usage(self) -> tuple[float, float]:
        """Wall and CPU seconds over all sessions that ran trials."""
        row = self._one("SELECT TOTAL(seconds), TOTAL(cpu_seconds) FROM usage")
        return (float(row[0]), float(row[1])) if row else (0.0, 0.0)

    # -- trials ------------------------------------------------------------------------------------------------

    def add(self, rows: Iterable[TrialRow]) -> None:
        """Commit rows together, taking one at a time; raises ``StoreError`` on a full disk, keeping what was committed before."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
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
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def done(self) -> set[TrialId]:
        """Identities of all stored trials."""
        with self._errors():
            return {TrialId(*row) for row in self._db.execute("SELECT target, flips, k FROM trial")}

    def rows(self) -> Iterator[TrialRow]:
        """All trials in canonical order (target, flips, k)."""
        yield from self._select("ORDER BY target, flips, k")

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
        samples = self.description.samples
        columns = "target, flips, k, faults, codes, incorrect_batches, severity, error, seconds, worker"
        query = f"SELECT {columns} FROM trial {clause}"  # noqa: S608 - constants
        with self._errors(), closing(self._db.execute(query, values)) as found:
            for r in found:
                yield read_row(r, samples)
