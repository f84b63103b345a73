"""Seeded damage to any SQLite file: what there is to damage is read from the file itself (tables, columns, cells), so that this
survives changes of the format. Used by the short run of every test session and the long one of ``tests/claims``.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import sqlite3
import zlib
from contextlib import closing

DEEP = "[" * 100_000 + "]" * 100_000
BOMB = zlib.compress(b"\0" * 100_000_000, 9)
VALUES = (
    None, -1, 0, 1, 1.5, 2**62, -(2**63), math.inf, -math.inf, "", "abc", "7", "a\nb", "\x1b[2J\x07", "=1+1", "{", "[]", "{}",
    "[[1]]", "null", "1e999", '{"a": 1' + "0" * 5000 + "}", '["\\ud800"]', DEEP, '{"a": ' + DEEP + "}", b"", b"abc", b"\xff\xfe",
    b"\0" * 5000, zlib.compress(b""), zlib.compress(b"\0" * 24), zlib.compress(b"\xff" * 24), zlib.compress(b"[[1], [2], [], 3]"),
    BOMB, "x" * 200_000,
)  # fmt: skip
LEAVES = (
    None, True, -1, 0, 1, 2**70, 1e308, 10**400, "", "x", "\ud800", "\x1b[31m", "../../etc", [], {}, [[]], {"a": 1}, [1] * 50_000,
)  # fmt: skip
HEAVY = "length(hex(zeroblob(200000000)))"
"""An expression that takes 600 MB and a second wherever it is evaluated."""


def mutants(sound, folder, seed, count, repair=None):
    """Yield (what was done, path) of ``count`` damaged copies of ``sound``, each made by the next way there is.

    ``repair(path)``: puts back what a careful attacker would, like the hash of a campaign; it is called for every second one.
    """
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        way = WAYS[number % len(WAYS)]
        path = folder / f"m{number}" / sound.name
        path.parent.mkdir()
        shutil.copy(sound, path)
        try:
            told = way(path, rng)
        except sqlite3.Error as error:  # no such damage can be done to this file
            told = str(error)
        if (
            repair is not None and way is not beside and rng.random() < 0.5
        ):  # opening the file would use what is beside it
            try:
                repair(path)
            except (sqlite3.Error, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
                pass  # it is past repair
        yield f"{number} {way.__name__}: {told}", path


def tables(db):
    """Name -> columns of each table."""
    names = [
        row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    ]
    return {name: [row[1] for row in db.execute(f'PRAGMA table_info("{name}")')] for name in names}


class loosened:
    """The file with the rules of its tables and indexes lifted; they are written back, to the letter, at the end."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            self.kept = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
            db.execute("PRAGMA writable_schema=ON")
            for name, columns in tables(db).items():
                rules = dict(self.kept)[name]
                keys = [c for c in columns if re.search(rf"\b{c} (INTEGER|TEXT) PRIMARY KEY", rules)]
                loose = ", ".join(
                    f"{c} {'INTEGER' if 'INTEGER' in rules else 'TEXT'} PRIMARY KEY" if c in keys else c
                    for c in columns
                )
                db.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (f"CREATE TABLE {name} ({loose})", name))
            db.execute("UPDATE sqlite_master SET sql = replace(sql, 'UNIQUE ', '') WHERE type = 'index'")
        self.db = sqlite3.connect(self.path, isolation_level=None)
        return self.db

    def __exit__(self, *args):
        self.db.close()
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            db.execute("PRAGMA writable_schema=ON")
            for name, sql in self.kept:
                db.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (sql, name))


def _pick(db, rng, wanted=lambda value: True):
    """A table, a column, and the number and value of a row where ``wanted`` holds; None where there is none."""
    places = [(table, column) for table, columns in tables(db).items() for column in columns]
    rng.shuffle(places)
    for table, column in places:
        rows = [row for row in db.execute(f"SELECT rowid, {column} FROM {table} LIMIT 50") if wanted(row[1])]
        if rows:
            return table, column, *rng.choice(rows)
    return None


def cell(path, rng):
    """One cell, or a whole column, of another type or value."""
    with loosened(path) as db:
        found = _pick(db, rng)
        table, column, row, _ = found
        value = rng.choice(VALUES)
        where = rng.choice(["", f" WHERE rowid = {row}"])
        try:
            db.execute(f"UPDATE {table} SET {column} = ?{where}", (value,))
        except sqlite3.Error as error:
            return f"{table}.{column}: {error}"
    return f"{table}.{column}{where} = {str(value)[:30]!r} ({type(value).__name__})"


def number(path, rng):
    """A number a little or far beside what it was."""
    with loosened(path) as db:
        found = _pick(db, rng, lambda value: isinstance(value, (int, float)))
        table, column, row, value = found
        value = rng.choice([value + 1, -value - 1, value + 0.5, 2**31, 2**63 - 1, 1e300, -1e-300, 255, 10**9])
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE rowid = {row}", (value,))
    return f"{table}.{column} = {value}"


def leaf(path, rng):
    """One value somewhere in the JSON of a cell."""
    with loosened(path) as db:
        found = _pick(db, rng, lambda value: isinstance(value, str) and value[:1] in ("{", "["))
        table, column, row, text = found
        whole = json.loads(text)
        where, told = whole, []
        while True:
            keys = list(where) if isinstance(where, dict) else list(range(len(where)))
            if not keys:
                break
            key = rng.choice(keys)
            told.append(str(key)[:20])
            if not isinstance(where[key], (dict, list)) or not where[key] or rng.random() < 0.15:
                if rng.random() < 0.2:
                    del where[key]
                else:
                    where[key] = rng.choice(LEAVES)
                break
            where = where[key]
        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = {row}", (json.dumps(whole),))
    return f"{table}.{column}: {'.'.join(told)}"


def packed(path, rng):
    """What a compressed cell unpacks to."""
    with loosened(path) as db:
        found = _pick(db, rng, lambda value: isinstance(value, bytes) and value[:1] == b"\x78")
        if found is None:
            return "nothing is compressed"
        table, column, row, blob = found
        content = bytearray(zlib.decompress(blob) or b"\0")
        how = rng.choice(["flip", "cut", "more", "fill", "bomb", "broken"])
        if how == "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif how == "cut":
            del content[rng.randrange(len(content)) :]
        elif how == "more":
            content += bytes(content)
        elif how == "fill":
            content[:] = bytes([rng.randrange(256)]) * len(content)
        new = BOMB if how == "bomb" else zlib.compress(bytes(content))
        new = new[: -rng.randrange(1, 6)] if how == "broken" else new
        where = rng.choice(["", f" WHERE rowid = {row}"])
        db.execute(f"UPDATE {table} SET {column} = ?{where}", (new,))
    return f"{table}.{column}: {how}{where}"


def rows(path, rng):
    """Rows that are there twice, in another order, of others' names, or not at all."""
    with loosened(path) as db:
        table = rng.choice([name for name in tables(db) if db.execute(f"SELECT 1 FROM {name}").fetchone()])
        columns = [c for c in tables(db)[table] if c != "id"]
        how = rng.choice(["again", "swapped", "gone", "all gone"])
        if how == "again":
            listed = ", ".join(columns)
            db.execute(f"INSERT OR IGNORE INTO {table} ({listed}) SELECT {listed} FROM {table} ORDER BY rowid LIMIT 3")
        elif how == "swapped":
            one = rng.choice(columns)
            db.execute(f"UPDATE OR IGNORE {table} SET {one} = (SELECT {one} FROM {table} ORDER BY rowid LIMIT 1)")
        else:
            db.execute(f"DELETE FROM {table}" + (" WHERE rowid % 2" if how == "gone" else ""))
    return f"{table}: {how}"


def schema(path, rng):
    """Tables, columns, indexes, triggers, views, rules and generated columns that are added, altered or dropped."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        names = tables(db)
        indexes = db.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall()
        table = rng.choice(list(names))
        column = rng.choice(names[table])
        sql = rng.choice([
            f"ALTER TABLE {table} ADD COLUMN more TEXT DEFAULT 'x'",
            f"ALTER TABLE {table} ADD COLUMN heavy AS ({HEAVY})",
            f"ALTER TABLE {table} ADD COLUMN heavy INTEGER NOT NULL AS ({HEAVY}) VIRTUAL",
            f"ALTER TABLE {table} RENAME COLUMN {column} TO other",
            f"ALTER TABLE {table} RENAME TO other",
            f"DROP TABLE {table}",
            f"CREATE TABLE more (a CHECK ({HEAVY}))",
            "CREATE VIEW other AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
            f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END",
            f"CREATE INDEX more ON {table} ({column})",
            f"CREATE INDEX more ON {table} (abs({column} IS NULL))",
            f"DROP INDEX {indexes[0][0] if indexes else 'x'}",
            "CREATE VIRTUAL TABLE v USING fts5(a)",
            f"REINDEX {table}",
        ])  # fmt: skip
        try:
            db.execute(sql)
        except sqlite3.Error as error:
            return f"{sql}: {error}"
    return sql


def schema_text(path, rng):
    """The text of the schema, written by hand."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema=ON")
        name, sql = rng.choice(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())
        table = name in tables(db)
        how = rng.choice(["letter", "bytes", "long", "null", "root", "heavy", "check", "type", "many", "utf"])
        new = {
            "letter": sql[: (at := rng.randrange(len(sql)))] + chr(rng.randrange(1, 0x250)) + sql[at + 1 :],
            "bytes": b"CREATE TABLE " + bytes(rng.randrange(1, 256) for _ in range(40)),
            "long": sql.replace(" ", " " * 100_000, 1),
            "null": None,
            "heavy": sql[: sql.rindex(")")] + f", heavy AS ({HEAVY}))" if table else sql,
            "check": sql[: sql.rindex(")")] + f", CHECK ({HEAVY}))" if table else sql,
            "utf": sql.encode().replace(b"(", b"(\xff\xfe ", 1).decode("latin-1"),
        }.get(how, sql)
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (new, name))
        if how == "root":
            db.execute("UPDATE sqlite_master SET rootpage = ?", (rng.choice([0, 1, 2, 10**6]),))
        if how == "type":
            db.execute(
                "UPDATE sqlite_master SET type = ? WHERE name = ?",
                (rng.choice(["view", "trigger", "x", 5, None]), name),
            )
        if how == "utf":
            db.execute(
                "UPDATE sqlite_master SET sql = CAST(? AS TEXT) WHERE name = ?",
                (sql.encode().replace(b"(", b"(\xff\xfe", 1), name),
            )
        if how == "many":
            db.execute(
                "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 30000) INSERT INTO sqlite_master "
                "SELECT 'table', 't' || x, 't' || x, 2, 'CREATE TABLE t' || x || ' (a)' FROM n"
            )
    return f"{name}: {how}"


def pragma(path, rng):
    """Numbers of the header that SQLite itself writes."""
    sql = rng.choice(
        ["PRAGMA user_version=0", "PRAGMA user_version=99", "PRAGMA application_id=0", "PRAGMA application_id=1", "VACUUM",
         "PRAGMA journal_mode=WAL", "PRAGMA auto_vacuum=FULL; VACUUM", "PRAGMA page_size=512; VACUUM",
         "PRAGMA page_size=65536; VACUUM"]
    )  # fmt: skip
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(sql)
    return sql


def flips(path, rng):
    """Bytes of the file."""
    content = bytearray(path.read_bytes())
    count = rng.choice([1, 1, 3, 30, 300])
    for _ in range(count):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)
    return f"{count} bytes"


def header(path, rng):
    """Bytes of the header alone."""
    content = bytearray(path.read_bytes())
    at = rng.choice(
        [0, 16, 18, 19, 20, 21, 24, 28, 31, 32, 36, 40, 44, 47, 52, 56, 59, 60, 63, 64, 68, 71, 92, 96, 100, 103, 105]
    )
    content[at] = rng.choice([0, 1, 2, 0x7F, 0xFF, rng.randrange(256)])
    path.write_bytes(content)
    return f"byte {at} = {content[at]}"


def pages(path, rng):
    """Pages that are gone, empty, doubled, or at another's place."""
    content = path.read_bytes()
    size = int.from_bytes(content[16:18], "big")
    parts = [content[i : i + size] for i in range(0, len(content), size)]
    one, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    how = rng.choice(["cut", "empty", "swapped", "doubled", "noise", "short", "nothing", "sparse"])
    if how == "cut":
        del parts[max(one, 1) :]
    elif how in ("empty", "noise"):
        parts[one] = bytes(size) if how == "empty" else rng.randbytes(size)
    elif how == "swapped":
        parts[one], parts[other] = parts[other], parts[one]
    elif how == "doubled":
        parts[max(one, 1)] = parts[max(other, 1) % len(parts)]
    content = b"".join(parts)
    path.write_bytes({"short": content[: rng.randrange(1, len(content))], "nothing": b""}.get(how, content))
    if how == "sparse":
        os.truncate(path, 20 * 2**30)
    return f"{how} {one} {other}"


def beside(path, rng):
    """Logs and journals that belong to something else, or are none."""
    ending = rng.choice(["-wal", "-wal", "-journal", "-journal", "-shm", ".lock"])
    name = path.with_name(path.name + ending)
    how = rng.choice(["noise", "zeros", "folder", "fifo", "link", "own", "super"])
    if how == "folder":
        name.mkdir()
    elif how == "fifo":
        os.mkfifo(name)
    elif how == "link":
        name.symlink_to("/dev/zero")
    elif how == "own":
        shutil.copy(path, name)
    elif how == "super":  # a journal that says which other file is to be removed once it was rolled back
        victim = path.with_name("victim.txt")
        victim.write_text("precious")
        content, text = path.read_bytes(), str(victim).encode()
        size = int.from_bytes(content[16:18], "big")
        head = bytes.fromhex("d9d505f920a163d7") + b"".join(
            n.to_bytes(4, "big") for n in (0, 0, len(content) // size, 512, size)
        )
        tail = (2**30 // size + 1).to_bytes(4, "big") + text
        tail += len(text).to_bytes(4, "big") + (sum(text) & 0xFFFFFFFF).to_bytes(4, "big") + head[:8]
        name.write_bytes(head.ljust(512, b"\0") + tail)
    else:
        name.write_bytes(rng.randbytes(70_000) if how == "noise" else bytes(70_000))
    return f"{ending} {how}"


def several(path, rng):
    """Three kinds of damage at once."""
    return "; ".join(way(path, rng) for way in rng.sample([cell, number, leaf, rows], 3))


WAYS = (
    cell, leaf, packed, schema, cell, leaf, number, schema_text, cell, rows, leaf, packed, flips, number, pages, cell, beside,
    leaf, header, schema_text, several, pragma,
)  # fmt: skip
"""In turn; cells and their JSON come most often, for there is most of them."""
