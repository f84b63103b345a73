"""Reads dumps of PyTorch's flight recorder: the collectives that each rank entered, by process group.

Dumps have the JSON form, or the pickle form, which is read without unpickling (`unsilent.basics.pickle_values`). Only required
values are read. Collectives are counted by their entries: ``pg_status`` of gloo also counts messages between two ranks, and a
pair of ranks that exchanged one would seem to be ahead of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.pickle_values import MAGIC, Mapped, PickleDamaged, read_pickle
from unsilent.basics.plainfiles import parse_json, read_plain
from unsilent.basics.printable import escape_unprintable

DEFAULT_GROUP = "default_pg"
"""Description of the process group of all ranks."""
MOST_BYTES = 2**26
"""Most bytes of a dump. A dump with 2,000 entries, torch's default maximum, has about 2 MB."""
MOST_FILES, MOST_RANK, LARGEST = 2**16, 2**20, 2**63 - 1
MOST_PARTS = 2**21
"""Most entries, sizes and frames that are read from a dump, which may refer to the same ones repeatedly."""
LONGEST_NAME = 300
_NAME = re.compile(r"(?!trace-|\.)(?:.*\D)?(\d+)(?:\.json|\.pickle|\.pkl)?", re.ASCII)
"""Name of a dump, which ends with the rank. ``trace-rank0.json`` in the same folder is a profiler's trace."""
_OF_TORCH = re.compile(r"(?:^|[\\/])torch[\\/]")


class Group(NamedTuple):
    """Name and description of a process group; the name is equal on all ranks."""

    name: str
    description: str

    @property
    def label(self) -> str:
        """Name of the group for people, with its description if it has one."""
        return f"{self.name} ({self.description})" if self.description not in ("", "undefined") else self.name


class Collective(NamedTuple):
    """The arguments of a collective that a rank called.

    Attributes:
        operation: Name of the operation, for example ``all_reduce``.
        sent, received: Shapes of tensors.
        dtypes: Types of the sent tensors, or of the received ones if none is sent.
        file, line: Place of the call outside of torch; empty and 0 if unknown.
    """

    operation: str
    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    file: str
    line: int


@dataclass
class Entered:
    """Collectives of a group that a rank entered, and the numbers of those that it has not left."""

    collectives: dict[int, Collective] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    @property
    def last(self) -> int:
        """The highest number of an entered collective, or 0 if there is none."""
        return max(self.collectives, default=0)


@dataclass(frozen=True)
class Dump:
    """The content of one rank's flight recorder.

    Attributes:
        rank: Rank in the name of the file.
        groups: Collectives that the rank entered, by group.
        members: Ranks of each group whose members are recorded.
        dropped: Number of entries that the recorder no longer held.
        has_unnamed: Whether the rank used a group for which the recorder holds no entry.
    """

    rank: int
    groups: dict[Group, Entered]
    members: dict[str, frozenset[int]]
    dropped: int
    has_unnamed: bool


def read_dumps(paths: Sequence[str | Path]) -> list[Dump]:
    """The dumps in the given folders and files, ordered by rank.

    Raises ``UsageError`` if one cannot be read.
    """
    files: dict[int, Path] = {}
    for path in _files(paths):
        rank = _rank(path)
        if rank in files:
            both_files = " and ".join(escape_unprintable(file) for file in (files[rank], path))
            raise UsageError(f"{both_files} are both of rank {rank}; give one dump of each rank, of one job")
        files[rank] = path
    known: dict[Collective, Collective] = {}  # the same on many ranks and in many steps
    return [_read_dump(files[rank], rank, known) for rank in sorted(files)]


def _files(paths: Sequence[str | Path]) -> Iterable[Path]:
    for path in map(Path, paths):
        if not _is_folder(path):
            yield path
            continue
        try:
            names = sorted(entry for entry in path.iterdir() if _NAME.fullmatch(entry.name) and entry.is_file())
        except OSError as error:
            raise UsageError(f"cannot read {escape_unprintable(path)}: {error.strerror}; check the path") from None
        if not 0 < len(names) <= MOST_FILES:
            raise UsageError(
                f"{escape_unprintable(path)} holds {len(names):,} dumps of the flight recorder; expected 1 to {MOST_FILES:,} "
                "files named NAME_RANK or NAME_RANK.json"
            )
        yield from names


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a null byte
        return False


def _rank(path: Path) -> int:
    named = _NAME.fullmatch(path.name)
    if named is None or len(named[1]) > 9 or int(named[1]) > MOST_RANK:
        raise UsageError(
            f"{escape_unprintable(path)} is not named after a rank; expected NAME_RANK or NAME_RANK.json, like dump_0"
        )
    return int(named[1])


def _read_dump(path: Path, rank: int, known: dict[Collective, Collective]) -> Dump:
    name = escape_unprintable(path)
    content = read_plain(path, MOST_BYTES, name)
    try:
        value = read_pickle(content)[0] if content.startswith(MAGIC) else parse_json(content)
        return _Reader(known).dump(value, rank)
    except (PickleDamaged, ValueError, RecursionError) as error:
        reason = escape_unprintable(first_line(error))[:200]
        raise UsageError(f"{name} is no dump of the flight recorder: {reason}; write it again") from None


class _Reader:
    """Reads the needed parts of a dump, and raises ``ValueError`` if torch cannot have written it."""

    def __init__(self, known: dict[Collective, Collective]) -> None:
        self._known = known
        self._parts_left = MOST_PARTS

    def dump(self, value: Any, rank: int) -> Dump:
        top = _mapping(value, "it")
        groups: dict[Group, Entered] = {}
        ids, first = set(), LARGEST
        entries = top.get("entries")  # the JSON form has none if nothing was entered
        for value in self._list([] if entries is None else entries, "entries"):
            entry = _mapping(value, "an entry")
            ids.add(_whole(entry.get("pg_id"), "pg_id"))
            first = min(first, _whole(entry.get("record_id"), "record_id"))
            if _flag(entry.get("is_p2p"), "is_p2p"):
                continue
            group = Group(
                *(_text(text, "process_group") for text in self._list(entry.get("process_group"), "process_group", 2))
            )
            number = _whole(entry.get("collective_seq_id"), "collective_seq_id")
            entered = groups.setdefault(group, Entered())
            if number not in entered.collectives:  # several may be one call
                collective = self._collective(entry)
                entered.collectives[number] = self._known.setdefault(collective, collective)
            # Neither is set on all backends; both are also set if a collective failed.
            if not _flag(entry.get("retired"), "retired") and entry.get("state") != "completed":
                entered.open.add(number)
        used = {
            _whole(number, "pg_status")
            for number, status in _pairs(top.get("pg_status"), "pg_status")
            if _whole(_mapping(status, "pg_status").get("last_enqueued_collective"), "last_enqueued_collective", -1) > 0
        }
        return Dump(rank, groups, dict(self._members(top)), 0 if first == LARGEST else first, not used <= ids)

    def _members(self, top: Any) -> Iterable[tuple[str, frozenset[int]]]:
        """The name and the ranks of each named group.

        gloo has one entry without a name, which is skipped.
        """
        for _, value in _pairs(top.get("pg_config"), "pg_config") if top.get("pg_config") is not None else ():
            config = _mapping(value, "pg_config")
            name, ranks = _text(config.get("name"), "pg_config"), config.get("ranks")
            if isinstance(ranks, str):
                ranks = parse_json(ranks.encode("utf-8", "replace"))
            members = frozenset(_whole(rank, "ranks", 0, MOST_RANK) for rank in self._list(ranks, "ranks"))
            if name and members:
                yield name, members

    def _collective(self, entry: Any) -> Collective:
        name = _text(entry.get("profiling_name"), "profiling_name").rpartition(":")[2]
        sent, received = self._shapes(entry, "input_sizes"), self._shapes(entry, "output_sizes")
        dtypes = next((kinds for key in ("input_dtypes", "output_dtypes") if (kinds := self._texts(entry, key))), ())
        return Collective(name, sent, received, dtypes, *self._site(entry.get("frames")))

    def _shapes(self, entry: Any, key: str) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(_whole(size, key) for size in self._list(shape, key)) for shape in self._list(entry.get(key), key)
        )

    def _texts(self, entry: Any, key: str) -> tuple[str, ...]:
        return tuple(_text(text, key) for text in self._list(entry.get(key), key))

    def _site(self, frames: Any) -> tuple[str, int]:
        """File and line of the innermost stack frame outside of torch."""
        for value in self._list(frames, "frames") if frames is not None else ():
            frame = _mapping(value, "a frame")
            file = _text(frame.get("filename"), "filename")
            if not _OF_TORCH.search(file):
                return file, _whole(frame.get("line"), "line")
        return "", 0

    def _list(self, value: Any, name: str, length: int | None = None) -> Sequence[Any]:
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
            raise ValueError(f"its {name} are no list" if length is None else f"its {name} is not {length} texts")
        self._parts_left -= len(value) + 1
        if self._parts_left < 0:
            raise ValueError(f"it has more than {MOST_PARTS:,} entries, sizes and frames")
        return value


def _mapping(value: Any, name: str) -> Any:
    if not isinstance(value, (dict, Mapped)):
        raise ValueError(f"{name} is no object with named values")
    return value


def _pairs(value: Any, name: str) -> Iterable[tuple[Any, Any]]:
    value = _mapping(value, f"its {name}")
    pairs: Iterable[tuple[Any, Any]] = value.items if isinstance(value, Mapped) else value.items()
    return pairs


def _whole(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """Check and return a whole number, which JSON may hold as text."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value, re.ASCII):
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"its {name} is no whole number from {least} to {most}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"its {name} is neither true nor false")
    return value


def _text(value: Any, name: str) -> str:
    """Check and return a text, with unprintable characters escaped."""
    if not isinstance(value, str):
        raise ValueError(f"its {name} is no text")
    return escape_unprintable(value[:LONGEST_NAME])
