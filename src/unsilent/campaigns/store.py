"""The campaign store: one SQLite file (WAL) that holds one campaign; one writer at a time, any number of readers.

Rows are committed in groups; a kill loses at most the group in flight, and those trials run again on resume. Content that
must be equal between two runs of a campaign is in columns of its own, apart from time and worker.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from unsilent.campaigns.locking import FileLock
from unsilent.campaigns.reading import Damaged, read_description, read_round, read_row, read_spec
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


class Store:
    """An open store.

    Args:
        path: the file; made when it is not there and ``write`` is asked.
        write: take the writer's lock (released by ``close``); otherwise the file must exist and is only read.

    Raises:
        StoreError: not a store, corrupt, of another schema, in use by another writer, or not writable.
    """

    def __init__(self, path: str | Path, *, write: bool = False) -> None:
        self.path = Path(path)
        self._lock: FileLock | None = None
        if self.path.is_dir():
            raise StoreError(f"{self.path} is a folder; give a file name for the store")
        if not write and not self.path.exists():
            raise StoreError(f"there is no store {self.path}; run a campaign first or check the name")
        self._new = False
        if write:
            self._lock = FileLock(self.path)
            self._new = not self.path.exists()
        try:
            self._db = self._open(write)
        except BaseException:
            if self._lock:
                self._lock.release()
            raise

    def _open(self, write: bool) -> sqlite3.Connection:
        with self._errors():
            db = sqlite3.connect(self.path, isolation_level=None) if write else self._open_to_read()
            try:
                db.execute("PRAGMA trusted_schema=OFF")
                self._verify(db)
                if write:
                    db.execute("PRAGMA journal_mode=WAL")
                    db.execute("PRAGMA synchronous=NORMAL")
                else:
                    db.execute("PRAGMA query_only=1")
                if write and not db.execute("PRAGMA user_version").fetchone()[0]:
                    db.executescript(
                        f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id={APPLICATION_ID};"
                        f"PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
                    )
            except BaseException:
                db.close()
                raise
        return db

    def _open_to_read(self) -> sqlite3.Connection:
        """A connection that writes nothing, on a read-only medium as well (where SQLite cannot share its log)."""
        name = f"file:{quote(str(self.path.resolve()))}?mode=ro"
        log = self.path.with_name(self.path.name + "-wal")
        fixed = not os.access(self.path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
        return sqlite3.connect(name + ("&immutable=1" if fixed else ""), uri=True, isolation_level=None)

    def _verify(self, db: sqlite3.Connection) -> None:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and (tables or application or version):
            raise StoreError(f"{self.path} is a database of another program; give another file")
        views = db.execute("SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone()[0]
        if views:
            raise StoreError(f"{self.path} holds views or triggers, which no store has; restore a copy")
        if version not in (0, SCHEMA_VERSION):
            raise StoreError(
                f"{self.path} has store version {version}, this is version {SCHEMA_VERSION}; use another --store"
            )
        damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise StoreError(
                f"{self.path} is damaged ({damage.splitlines()[0]}); restore a copy or use another --store"
            )

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

    # -- plumbing ----------------------------------------------------------------------------------------------

    def _one(self, sql: str) -> tuple[Any, ...] | None:
        with self._errors():
            row: tuple[Any, ...] | None = self._db.execute(sql).fetchone()
            return row

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, zlib.error, Damaged) as error:
            raise StoreError(self._explain(error)) from None

    def _explain(self, error: Exception) -> str:
        text = str(error)
        if isinstance(error, Damaged | zlib.error):
            return f"{self.path} is damaged or was not made by this program: {text}; restore a copy"
        if "not a database" in text:
            return f"{self.path} is not an Unsilent store; give another file"
        if "no such table" in text:
            return f"{self.path} is empty or not an Unsilent store; run a campaign first or check the name"
        if "full" in text or "disk I/O" in text:
            return (
                f"cannot write {self.path} ({text}); what was stored is safe: free space and run the same command again"
            )
        if "unable to open" in text or "readonly" in text:
            return f"cannot open {self.path} ({text}); check that its folder exists and is writable"
        return f"{self.path} cannot be used ({text}); restore a copy or give another --store"

    def close(self) -> None:
        """Close the file and release the lock."""
        try:
            unused = self._new and self._one("SELECT 1 FROM campaign") is None
            if self._lock:
                self._settle()
            self._db.close()
            if unused:  # it never came to a campaign: leave no empty file behind
                self.path.unlink(missing_ok=True)
        finally:
            if self._lock:
                self._lock.release()

    def _settle(self) -> None:
        """Fold the log into the file, so that readers need and leave nothing beside it."""
        try:
            self._db.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error:
            pass  # somebody reads it just now, or the disk is full: the log stays, and is valid

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` for writing before an atomic replace."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
