"""Reading files of events, which may be growing, end with an incomplete line, or be untrusted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from unsilent.basics.errors import UsageError, first_line, system_errors
from unsilent.basics.options import LARGEST
from unsilent.basics.plainfiles import open_plain
from unsilent.basics.printable import escape_unprintable
from unsilent.events.event_kinds import EVENTS, MOST_TEXT, Event, Started
from unsilent.report.text import listed, short

LINE_BEGINS = b'{"kind": "'
"""Beginning of every line that a monitor writes."""
MOST_LINE = 2**20
"""Largest size of a line in bytes."""
MOST_BYTES = 2**26
"""Largest total size of the files in bytes; reading this much takes about five seconds."""
BYTES_PER_VALUE, FEWEST_VALUES = 8, 2**18
"""Least bytes for each value of a file, beyond the first values; files of monitors have one value for 15 bytes."""
MOST_FILES = 4096
MOST_RANKS = 2**16
LAST_STEP = 10**15
MOST_NESTED = 8
"""Largest nesting depth of settings."""
LAST_TIME = 253_402_300_800.0
"""End of the year 9999."""
_RANK = re.compile(r"\.rank(\d{1,7})(?=\.[^.]*$|$)")
_NOT_FINITE = ("nan", "inf", "-inf")
Record = TypeVar("Record")
_NOUNS = {int: "a whole number of at most 63 bits", float: "a number", str: "a text"}


def path_of_rank(path: Path, rank: int, world_size: int) -> Path:
    """The file of one rank: ``path`` for a single rank, otherwise NAME.rank0.jsonl, NAME.rank1.jsonl and so on."""
    return path if world_size == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def has_events(path: Path) -> bool:
    """Whether a path looks like events: a folder, NAME.jsonl, or a file that begins like an event."""
    if path.is_dir() or path.suffix == ".jsonl":
        return True
    try:
        if not path.is_file():  # opening a pipe would wait
            return False
        with open(path, "rb") as file:
            return file.read(len(LINE_BEGINS)) == LINE_BEGINS
    except OSError:
        return False


def begins_a_run(line: bytes) -> bool:
    """Whether a line looks like the first line of a monitor's file."""
    try:
        event = parse_event(line)
    except (ValueError, RecursionError):
        return False
    return line.endswith(b"\n") and isinstance(event, Started) and "unsilent" in event.versions


def may_begin_an_event(line: bytes) -> bool:
    """Whether the text may be the beginning of an event's line."""
    beginnings = [f'{{"kind": "{kind}", "time": '.encode() for kind in EVENTS]
    return any(line.startswith(beginning) or beginning.startswith(line) for beginning in beginnings)


def find_event_files(path: Path, may_be_none: bool = False) -> list[Path]:
    """The files of a job, in the order of ranks.

    Args:
        path: A file; the name that was given for a job of several ranks (the files are NAME.rank0.jsonl …); or a folder with
            files of one job. If both a file and files of ranks exist, the newer ones are used.
        may_be_none: Whether it is not an error if there are no files yet, but the folder for them exists.

    Raises:
        UsageError: There are no files, or the folder has files of several jobs.
    """
    with system_errors(f"cannot read {path}", "check the path"):
        files = _files_of_job(path)
    if not files and not (may_be_none and (path.is_dir() or path.parent.is_dir())):
        where = f"{path} is a folder without events" if path.is_dir() else f"there are no events in {path}"
        raise UsageError(
            f"{where}; a job writes them from its first backward pass on; give the file that its events are written to"
        )
    if len(files) > MOST_FILES:
        raise UsageError(f"{path} has {len(files):,} files of events; at most {MOST_FILES:,} are read")
    return sorted(files, key=lambda file: (int(rank[1]) if (rank := _RANK.search(file.name)) else -1, file.name))


def _files_of_job(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in path.iterdir() if file.suffix == ".jsonl"]
        names = sorted({_RANK.sub("", file.name) for file in files})
        if len(names) > 1:
            raise UsageError(f"{path} has events of several jobs; give one of {', '.join(names[:8])}")
        return files
    near = path.parent.iterdir() if path.parent.is_dir() else ()
    files = [file for file in near if _RANK.search(file.name) and _RANK.sub("", file.name) == path.name]
    return [path] if path.exists() and (not files or _newest([path]) >= _newest(files)) else files


def _newest(files: list[Path]) -> float:
    return max(file.stat().st_mtime for file in files)


def check_size(path: Path, files: Sequence[Path]) -> None:
    """Raise ``UsageError`` if the files found at a path are too large to read."""
    if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
        raise UsageError(
            f"the events in {path} are {size >> 20} MiB; at most {MOST_BYTES >> 20} MiB are read; give the file of one rank"
        )


def read_events(path: Path) -> list[Event]:
    """All events of a job, rank by rank; see `find_event_files`.

    Raises ``UsageError`` if they cannot be read.
    """
    return list(iterate_events(path))


def iterate_events(path: Path) -> Iterator[Event]:
    """Yield the events of a job one by one, to limit the memory needed."""
    files = find_event_files(path)
    check_size(path, files)
    for file in files:
        yield from EventFile(file).read_new()


class EventFile:
    """A file of events that may grow.

    Attributes:
        unknown: Lines of a kind that this version does not know, which are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unknown = 0
        self._offset = self._line = self._values = 0

    def read_new(self) -> Iterator[Event]:
        """Yield the events since the last call, without an incomplete last line.

        Raises ``UsageError`` if a line is not an event.
        """
        with open_plain(self.path) as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                raise UsageError(f"{self.path} became shorter while it was read; start again")
            file.seek(self._offset)
            while line := file.readline(MOST_LINE + 1):
                if len(line) > MOST_LINE:
                    raise UsageError(
                        f"line {self._line + 1} of {self.path} is too long for an event; give another file"
                    )
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._line += 1
                self._values += line.count(b",") + line.count(b"[") + line.count(b"{")
                if self._values > FEWEST_VALUES + self._offset // BYTES_PER_VALUE:
                    raise UsageError(f"line {self._line} of {self.path} has more values than events; give another file")
                try:
                    event = parse_event(line)
                except (ValueError, RecursionError) as error:
                    raise UsageError(
                        f"line {self._line} of {self.path} is not an event: {first_line(error)}; give another file"
                    ) from None
                if event is None:
                    self.unknown += 1
                else:
                    yield event


def parse_event(line: bytes) -> Event | None:
    """Parse a line to an event; None if its kind is unknown.

    Unknown fields are ignored.

    Texts are made safe for terminals and pages: control characters are escaped, and the length is limited.

    Raises:
        ValueError: No monitor writes such a line.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise ValueError('expected an object with a "kind"')
    if kind not in EVENTS:
        return None
    event = parse_fields(EVENTS[kind], record)
    if not 0 <= event.time < LAST_TIME or not 0 <= event.rank < MOST_RANKS:
        raise ValueError(
            f"time is {event.time:g} and rank {event.rank}; expected seconds since 1970, and a rank from 0"
        )
    return event


def parse_fields(kind: type[Record], record: Mapping[str, Any]) -> Record:
    """Make a dataclass from JSON values, with unprintable characters in texts escaped.

    Raises ``ValueError`` if a value does not fit.

    Unknown fields are ignored.
    """
    fields = _fields(cast(Any, kind)).items()
    values = {name: _checked_value(hint, record[name], name) for name, hint in fields if name in record}
    try:
        return kind(**values)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error).partition("() ")[2]) from None


@cache
def _fields(kind: Any) -> Mapping[str, Any]:
    """The fields of a dataclass with their types."""
    return {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def _checked_value(hint: Any, value: Any, name: str, depth: int = 0) -> Any:
    """The value of a field, checked against its type.

    Raises ``ValueError`` if it has another type.
    """
    if type(value) is hint and (hint is not int or abs(value) <= LARGEST):  # fast path for most values
        return _harmless(value) if hint is str else value
    kind, inner = _parts(hint)
    if kind is UnionType:
        return None if value is None else _checked_value(inner[0], value, name, depth)
    if kind is Literal and value in inner:
        return value
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return parse_fields(hint, value)
    if isinstance(value, (list, dict)):
        item = Any if kind is Any else inner[-1 if kind is Mapping else 0] if inner else None
        if isinstance(value, list) and kind in (tuple, Any) and depth < MOST_NESTED:
            return tuple(_checked_value(item, item_value, name, depth + 1) for item_value in value)
        if isinstance(value, dict) and kind in (Mapping, Any) and depth < MOST_NESTED:
            return {
                _harmless(key): _checked_value(item, item_value, name, depth + 1) for key, item_value in value.items()
            }
    elif kind is float and value in _NOT_FINITE:
        return float(value)
    elif type(value) is not int or abs(value) <= LARGEST:
        if kind is float and type(value) in (int, float):
            return float(value)
        if kind is Any or type(value) is kind:
            return _harmless(value) if isinstance(value, str) else value
    expected = listed(map(str, inner), 16) if kind is Literal else _NOUNS.get(kind, "a list or an object")
    raise ValueError(f"{name} is {str(value)[:40]!r}; expected {expected}")


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ``ValueError`` unless a number from a file is between ``least`` and ``most``."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; expected {least} to {most}")


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The origin and the arguments of a type, such as list and int for ``list[int]``."""
    return get_origin(hint) or hint, get_args(hint)


@lru_cache(4096)
def _harmless(text: str) -> str:
    """The text with unprintable characters escaped, limited to about `MOST_TEXT` characters."""
    return escape_unprintable(short(text, MOST_TEXT))
