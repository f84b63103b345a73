"""Checks of an SQLite file from an untrusted source before its rows are read.

A schema is a program: generated columns, CHECKs, indexes on expressions, triggers and views are evaluated when the file is read
or checked. So the text of the schema is first compared with ours, character by character, before anything but SQLite's parser
has processed it.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from functools import cache
from pathlib import Path

from unsilent.basics.errors import StoreError

TEXT_BYTES = 2**24
"""Most bytes of a text in a store. Longer texts are not written either."""
SCHEMA_BYTES = 10_000
LOG_BYTES = 2**30
"""Most bytes of a write-ahead log; SQLite reads all of it before it can be interrupted."""
STEPS_PER_CHECK = 1000
"""Steps of SQLite's virtual machine between two checks of the limit and of signals."""
SCHEMA_STEPS = 100_000
LEAST_STEPS, STEPS_PER_BYTE = 10_000_000, 20
"""Steps that one pass over a file may take: at least the first number, more for large files. A row takes some ten steps a
column, and more bytes than that."""
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")


class QueryStepLimit:
    """A limit on the steps of one SQLite query, which also lets Ctrl-C and SIGTERM interrupt a query.

    Attributes:
        exceeded: Whether a query took too many steps.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.exceeded = False
        self._left: float = SCHEMA_STEPS
        db.set_progress_handler(self._tick, STEPS_PER_CHECK)

    def restart_count(self, steps: float) -> None:
        """Reset the limit to this number of steps."""
        self._left, self.exceeded = steps, False

    def _tick(self) -> bool:
        """Count steps and return whether SQLite should interrupt the query.

        An exception from a signal handler interrupts it as well.
        """
        self._left -= STEPS_PER_CHECK
        self.exceeded = self._left < 0
        return self.exceeded


def check_files(path: Path) -> None:
    """Raise ``StoreError`` if the store or an SQLite log next to it is not a regular file, or is unsafe."""
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a regular file; give a file name for the store")
    for ending in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + ending)
        try:
            result = beside.lstat()
        except OSError:
            continue
        if not stat.S_ISREG(result.st_mode):
            raise StoreError(f"{beside} belongs to the store but is not a regular file; move it away")
        if ending == "-wal" and result.st_size > LOG_BYTES:
            raise StoreError(f"{beside} is larger than the log of any store; move it away, or restore a copy of {path}")
        if ending == "-journal" and _names_another(beside):
            raise StoreError(
                f"{beside} is a journal that would make SQLite delete another file; move this journal away"
            )


def _names_another(journal: Path) -> bool:
    """Whether a journal names a super-journal, which SQLite would delete.

    A journal of a store never does.
    """
    with journal.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - len(_SUPER_JOURNAL)))
        return file.read() == _SUPER_JOURNAL


def restrict_connection(db: sqlite3.Connection, max_cell_bytes: int) -> None:
    """Limit the cell size of a connection, and forbid its schema to call functions with side effects."""
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA cell_size_check=ON")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max_cell_bytes)
    db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, SCHEMA_BYTES)
    db.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 100)
    db.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 50)
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)


_QUERY = "SELECT CAST(type AS BLOB), CAST(name AS BLOB), CAST(tbl_name AS BLOB), CAST(sql AS BLOB) FROM sqlite_master LIMIT 100"


def sql_definitions(db: sqlite3.Connection) -> frozenset[tuple[bytes | None, ...]]:
    """The schema of a file: all definitions in it, as raw bytes."""
    return frozenset(db.execute(_QUERY).fetchall())


@cache
def expected_schema(text: str) -> frozenset[tuple[bytes | None, ...]]:
    """The schema that a file has after SQLite has run ``text`` in it."""
    with sqlite3.connect(":memory:") as db:
        db.executescript(text)
        result = sql_definitions(db)
    db.close()
    return result
