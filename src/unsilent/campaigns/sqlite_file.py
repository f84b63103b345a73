"""An SQLite file of this program: opened, checked and locked for one writer.

A subclass defines the contents.

A file may come from anyone. Files that are not regular, databases of other programs, other versions, other schemas and damaged
files are refused, in this order (see `opening`).
"""

from __future__ import annotations

import errno
import math
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unsilent.basics.closing import Closing
from unsilent.basics.errors import StoreError
from unsilent.campaigns.locking import FileLock
from unsilent.campaigns.opening import (
    LEAST_STEPS,
    STEPS_PER_BYTE,
    TEXT_BYTES,
    QueryStepLimit,
    check_files,
    expected_schema,
    restrict_connection,
    sql_definitions,
)
from unsilent.campaigns.stored_values import DamagedRecordError, ReadLimit, is_real

APPLICATION_OWNERS: dict[int, str] = {}
"""The command that writes files with each application id. Kinds are added when they are created."""
APPLICATION_PREFIX = int.from_bytes(b"Uns", "big")
"""First three letters of the application ids of kinds in this package; a letter for the kind follows."""
_LONGEST = 200
MOST_SECONDS = 1e12
"""Most seconds of one session."""


def application_of(path: str | Path) -> int:
    """The application id of an SQLite file; 0 if the file is not an SQLite file or cannot be read."""
    try:
        if not Path(path).is_file():  # opening a pipe would wait
            return 0
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError:
        return 0
    return int.from_bytes(head[68:72], "big") if head.startswith(b"SQLite format 3\0") else 0


def check_name(path: str | Path) -> None:
    """Raise ``StoreError`` for a name that a file cannot have."""
    try:
        os.lstat(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StoreError(
                f"{str(path)[:_LONGEST]!r} cannot be the name of a store ({reason}); give another"
            ) from None


class SqliteFile(Closing):
    """An open SQLite file of this program, for reading or for writing.

    Args:
        path: Path of the file, which is created if it does not exist and ``write`` is true.
        write: Whether to take the writer's lock (released by ``close``). Otherwise the file must exist and is only read.

    Raises:
        StoreError: The file is of another type, is corrupt, has another schema, is in use by another writer, or is not
            writable.
    """

    application_id: int
    """SQLite's application id, which identifies the type of the file."""
    schema_version: int
    schema: str
    max_cell_bytes: int = TEXT_BYTES
    """Most bytes of a cell."""

    def __init__(self, path: str | Path, *, write: bool = False) -> None:
        # SQLite looks for its logs next to the file that a link points to, so this class does as well.
        check_name(path)
        self.path = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)
        self._lock: FileLock | None = None
        self._steps: QueryStepLimit | None = None
        self._reads = not write
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
        check_files(self.path)
        with self._errors():
            db = sqlite3.connect(self.path, isolation_level=None) if write else self._open_to_read()
            try:
                steps = self._steps = QueryStepLimit(db)
                restrict_connection(db, self.max_cell_bytes)
                empty = self._verify(db, steps, write)
                if write:
                    if empty:  # before there is a log, so that the file itself can be identified, even after a kill
                        db.executescript(
                            f"BEGIN IMMEDIATE; {self.schema} PRAGMA application_id={self.application_id};"
                            f"PRAGMA user_version={self.schema_version}; COMMIT;"
                        )
                    db.execute("PRAGMA journal_mode=WAL")
                    db.execute("PRAGMA synchronous=NORMAL")
                else:
                    db.execute("PRAGMA query_only=1")
            except BaseException:
                db.close()
                raise
        return db

    def _open_to_read(self) -> sqlite3.Connection:
        """A read-only connection, which also works on a read-only medium."""
        name = f"file:{quote(os.fsencode(self.path.resolve()))}?mode=ro"
        log = self.path.with_name(self.path.name + "-wal")
        fixed = not os.access(self.path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
        return sqlite3.connect(name + ("&immutable=1" if fixed else ""), uri=True, isolation_level=None)

    def _verify(self, db: sqlite3.Connection, steps: QueryStepLimit, write: bool) -> bool:
        """Check the file before any row is read, and return whether it is empty.

        The order of the checks matters: see `opening`.
        """
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        ours = application in APPLICATION_OWNERS or application >> 8 == APPLICATION_PREFIX
        if ours and application != self.application_id:
            verb = APPLICATION_OWNERS.get(application)
            held = f"a campaign of {verb}" if verb else "results of another unsilent command"
            raise StoreError(
                f"{self.path} holds {held}; {self._verb} can only use stores of its own campaigns: give another store"
            )
        result = sql_definitions(db)
        empty = not (result or application or version)
        if application != self.application_id and not empty:
            raise StoreError(f"{self.path} is an SQLite database of another program; give another file")
        if empty and not write:
            raise StoreError(f"{self.path} is empty; run a campaign first or check the name")
        if not empty and version != self.schema_version:
            raise StoreError(
                f"{self.path} has store version {version}, but this version of {self._verb} uses {self.schema_version}; "
                "give another store"
            )
        if not empty and result != expected_schema(self.schema):
            raise StoreError(
                f"{self.path} has other columns than this version of {self._verb} writes; give another store"
            )
        steps.restart_count(self._most_steps())
        damage = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
        if damage != "ok":
            raise StoreError(
                f"{self.path} is damaged ({damage.splitlines()[0][:_LONGEST]}); restore a copy or use another store"
            )
        steps.restart_count(math.inf if write else self._most_steps())
        return empty

    @property
    def _verb(self) -> str:
        """The command that writes files of this sort."""
        return APPLICATION_OWNERS.get(self.application_id, "this command")

    def _size(self) -> int:
        """The size of the file and of its log in bytes."""
        log = self.path.with_name(self.path.name + "-wal")
        return self.path.stat().st_size + (log.stat().st_size if log.exists() else 0)

    def _most_steps(self) -> float:
        return LEAST_STEPS + STEPS_PER_BYTE * self._size()

    def _allowance(self) -> ReadLimit:
        """A new limit on the bytes that one pass over the file may read and unpack."""
        return ReadLimit(self._size())

    def _one(self, sql: str) -> tuple[Any, ...] | None:
        with self._errors():
            row: tuple[Any, ...] | None = self._db.execute(sql).fetchone()
            return row

    @contextmanager
    def _query(self, sql: str, values: Sequence[Any] = ()) -> Iterator[sqlite3.Cursor]:
        """The cursor of a query, closed at the end of the ``with`` block."""
        cursor = self._db.execute(sql, values)
        try:
            yield cursor
        finally:
            with suppress(sqlite3.ProgrammingError):
                cursor.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of SQLite and damaged records in a ``with`` block to ``StoreError``."""
        if self._steps is not None and self._reads:
            self._steps.restart_count(self._most_steps())
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning, DamagedRecordError, UnicodeError, MemoryError) as error:
            if isinstance(error, sqlite3.OperationalError) and "interrupted" in str(error):
                if self._steps is None or not self._steps.exceeded:
                    raise KeyboardInterrupt from None  # SQLite swallowed the exception of the signal handler
                raise StoreError(
                    f"reading {self.path} takes more SQLite steps than a store of its size needs, "
                    "so the file may be damaged; restore a copy"
                ) from None
            raise StoreError(self._explain(error)) from None

    def _explain(self, error: Exception) -> str:
        text = " ".join(str(error).split())[:_LONGEST]  # SQLite quotes cells, which may have many lines
        if isinstance(error, MemoryError):
            return f"reading {self.path} needs more memory than is free; free memory, or restore a copy if the file is damaged"
        if isinstance(error, UnicodeEncodeError):
            return f"{self.path} cannot store a name that is not valid text ({text}); change the name"
        if isinstance(error, DamagedRecordError | UnicodeError):
            return f"{self.path} is damaged or was not made by this program: {text}; restore a copy"
        if "not a database" in text:
            return f"{self.path} is not an Unsilent store; give another file"
        if "full" in text or "disk I/O" in text:
            return (
                f"cannot write {self.path} ({text}); stored results are safe: free space and run the same command again"
            )
        if "unable to open" in text or "readonly" in text:
            return f"cannot open {self.path} ({text}); check that its folder exists and is writable"
        return f"{self.path} cannot be used ({text}); restore a copy or give another store"

    def add_session_seconds(self, seconds: float, cpu_seconds: float) -> None:
        """Add the time of one session, including its set-up."""
        with self._errors(), self._db:
            self._db.execute("INSERT INTO usage VALUES (?, ?)", (seconds, cpu_seconds))

    def total_session_seconds(self) -> tuple[float, float]:
        """The wall and CPU seconds of all sessions together."""
        with self._errors():
            rows = self._db.execute("SELECT seconds, cpu_seconds FROM usage").fetchall()
            if not all(is_real(value) and 0 <= value < MOST_SECONDS for row in rows for value in row):
                raise DamagedRecordError("a session time in it is not a valid number")
        return math.fsum(row[0] for row in rows), math.fsum(row[1] for row in rows)

    def close(self) -> None:
        """Close the file and release the lock."""
        try:
            unused = self._new and self._one("SELECT 1 FROM campaign LIMIT 1") is None
            if self._lock:
                self._settle()
            self._db.close()
            if unused:  # nothing was written: leave no empty file behind
                self.path.unlink(missing_ok=True)
        finally:
            if self._lock:
                self._lock.release()

    def _settle(self) -> None:
        """Merge SQLite's log into the file, so that readers neither need nor leave further files."""
        try:
            self._db.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error:
            pass  # another process is reading it, or the disk is full: the log stays, and is valid


def temporary_name(path: Path) -> Path:
    """The path of a temporary file next to ``path``, for an atomic replacement."""
    return path.with_name(f".{path.name[:40]}.{os.getpid()}.tmp")


def remove_if_possible(path: Path) -> None:
    """Remove a file and ignore errors."""
    with suppress(OSError):
        path.unlink()
