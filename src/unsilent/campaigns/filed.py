"""One SQLite file (WAL) of ours: opened, checked, locked for one writer, its errors in one line. A subclass says what is in it.

A file is hostile until it was looked at: other programs' databases, views, triggers, damage and other versions are refused.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import quote

from unsilent.campaigns.locking import FileLock
from unsilent.campaigns.reading import Damaged
from unsilent.errors import StoreError

KINDS = {
    0x556E7369: ("a campaign of unsilent pvf", "unsilent pvf needs a store of a campaign"),
    0x556E7374: ("a campaign of unsilent training", "unsilent training needs a store of such a campaign"),
    0x556E7372: ("replicas of unsilent noise", "unsilent noise needs a store of replicas"),
}
"""Our own files by application id: what they hold, and who needs one."""
_LONGEST = 200


def application_of(path: str | Path) -> int:
    """The application id of an SQLite file; 0 for what is none, or cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError:
        return 0
    return int.from_bytes(head[68:72], "big") if head.startswith(b"SQLite format 3\0") else 0


class StoreFile:
    """An open file.

    Args:
        path: the file; made when it is not there and ``write`` is asked.
        write: take the writer's lock (released by ``close``); otherwise the file must exist and is only read.

    Raises:
        StoreError: not such a file, corrupt, of another schema, in use by another writer, or not writable.
    """

    application: ClassVar[int]
    """SQLite's application id: what kind of file it is."""
    version: ClassVar[int]
    schema: ClassVar[str]
    owner: ClassVar[str]
    """The table that is empty as long as the file holds nothing."""

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
                        f"BEGIN IMMEDIATE; {self.schema} PRAGMA application_id={self.application};"
                        f"PRAGMA user_version={self.version}; COMMIT;"
                    )
            except BaseException:
                db.close()
                raise
        return db

    def _open_to_read(self) -> sqlite3.Connection:
        """A connection that writes nothing, on a read-only medium as well (where SQLite cannot share its log)."""
        name = f"file:{quote(os.fsencode(self.path.resolve()))}?mode=ro"
        log = self.path.with_name(self.path.name + "-wal")
        fixed = not os.access(self.path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
        return sqlite3.connect(name + ("&immutable=1" if fixed else ""), uri=True, isolation_level=None)

    def _verify(self, db: sqlite3.Connection) -> None:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application in KINDS and application != self.application:
            held, needed = KINDS[application][0], KINDS[self.application][1]
            raise StoreError(f"{self.path} holds {held}; {needed}: give another --store")
        if application != self.application and (tables or application or version):
            raise StoreError(f"{self.path} is a database of another program; give another file")
        views = db.execute("SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone()[0]
        if views:
            raise StoreError(f"{self.path} holds views or triggers, which no store has; restore a copy")
        if version not in (0, self.version):
            raise StoreError(
                f"{self.path} has store version {version}, this is version {self.version}; use another --store"
            )
        damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise StoreError(
                f"{self.path} is damaged ({damage.splitlines()[0]}); restore a copy or use another --store"
            )

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
        text = " ".join(str(error).split())[:_LONGEST]  # SQLite quotes cells, which may have many lines
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
            unused = self._new and self._one(f"SELECT 1 FROM {self.owner} LIMIT 1") is None  # noqa: S608 - a constant
            if self._lock:
                self._settle()
            self._db.close()
            if unused:  # it never came to anything: leave no empty file behind
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` for writing before an atomic replace."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
