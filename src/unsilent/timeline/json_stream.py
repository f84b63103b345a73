"""Reads the events of a Chrome trace, JSON or gzipped JSON, in chunks of bounded memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import open_plain
from unsilent.basics.printable import escape_unprintable

CHUNK = 2**22
"""Number of bytes read at a time."""
MOST_VALUE = 2**26
"""Most bytes of one event, or of another value of a trace."""
_BOUNDARIES = 64
"""Number of object ends, counted back from the end of a chunk, that are tried as the end of an event."""
_EVENTS = "traceEvents"


@dataclass(slots=True)
class Arguments:
    """The arguments of an event that are used, with unchecked values."""

    correlation: Any = None
    input_dims: Any = None
    input_type: Any = None
    collective: Any = None
    elements: Any = None
    dtype: Any = None
    group: Any = None
    group_ranks: Any = None
    sequence: Any = None
    communication: Any = None
    allocated: Any = None
    device_type: Any = None
    bytes: Any = None
    address: Any = None
    node: Any = None


ARGUMENT_NAMES = {
    "correlation": "correlation", "input_dims": "Input Dims", "input_type": "Input type", "collective": "Collective name",
    "elements": "In msg nelems", "dtype": "dtype", "group": "Process Group Name", "group_ranks": "Process Group Ranks",
    "sequence": "Seq", "communication": "Comms Id", "allocated": "Total Allocated", "device_type": "Device Type",
    "bytes": "Bytes", "address": "Addr", "node": "Sequence number",
}  # fmt: skip


_IN_FILE = tuple(ARGUMENT_NAMES.values())
EVENT_NAMES = ("ph", "cat", "name", "pid", "tid", "ts", "dur")


@dataclass(slots=True)
class Event:
    """An event of the file, with unchecked values."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Arguments = field(default_factory=Arguments)


@cache
def _fast_decoder() -> Callable[[bytes], list[Event]] | None:
    """A decoder of lists of events, or None if msgspec is not installed.

    The decoder raises ``ValueError`` or ``RecursionError``.
    """
    try:
        import msgspec
    except ImportError:
        return None
    raw = ("input_dims", "input_type")  # left as bytes, as few of them are used
    arguments = msgspec.defstruct(
        "Arguments",
        [(name, msgspec.Raw if name in raw else Any, None) for name in ARGUMENT_NAMES],
        rename=ARGUMENT_NAMES,
        frozen=True,
        gc=False,
    )
    members = [(name, Any, None) for name in EVENT_NAMES]
    event = msgspec.defstruct("Event", [*members, ("args", arguments, arguments())], gc=False)
    return cast("Callable[[bytes], list[Event]]", msgspec.json.Decoder(list[event]).decode)  # type: ignore[valid-type]


def kept_arguments(arguments: Arguments) -> Arguments:
    """The arguments with bytes decoded to plain values, and None for damaged values.

    Bytes would keep the whole chunk in memory.
    """
    return Arguments(*(_number_without_fraction(getattr(arguments, name)) for name in ARGUMENT_NAMES))


def _number_without_fraction(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, list, dict)):
        return value
    try:
        return json.loads(bytes(value))
    except (ValueError, RecursionError):
        return None


class TraceFile:
    """A trace file whose events are read in chunks.

    Args:
        path: Path of the file.

    Attributes:
        name: Name of the file, for messages.
        fields: Values of the trace besides its events, as far as `chunks` has read.
    """

    def __init__(self, path: Path) -> None:
        self.name = escape_unprintable(path.name)
        self.fields: dict[str, Any] = {}
        self._path = path
        self._file: BinaryIO
        self._buffer = b""
        self._is_at_end = False
        self._count = 0

    def chunks(self) -> Iterator[list[Event]]:
        """All events, some thousands at a time.

        Raises ``UsageError`` if the file is not a trace.
        """
        with open_plain(self._path) as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            self._file = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if is_packed else file
            if self._next_character() == b"[":
                yield from self._events()
            else:
                yield from self._object()
            if self._next_character():
                raise self._error("something follows its end")

    def _object(self) -> Iterator[list[Event]]:
        self._take_character(b"{")
        has_events = False
        while self._next_character() != b"}":
            key = self._value()
            self._take_character(b":")
            if key == _EVENTS and not has_events:
                yield from self._events()
                has_events = True
            elif not isinstance(key, str) or key in self.fields or key == _EVENTS:
                raise self._error("a key is no text, or there twice")
            else:
                self.fields[key] = self._value()
            if self._next_character() != b"}":
                self._take_character(b",")
        self._take_character(b"}")
        if not has_events:
            raise self._error(f"it has no {_EVENTS}")

    def _events(self) -> Iterator[list[Event]]:
        self._take_character(b"[")
        while self._next_character() != b"]":
            events = self._fast_chunk() or self._slow_chunk()
            self._count += len(events)
            yield events
        self._take_character(b"]")

    def _fast_chunk(self) -> list[Event]:
        """Remove whole events from the buffer and decode them with msgspec; empty if that fails.

        Text that decodes as a list of objects ends at the end of an object, so a wrong guess of an end is noticed.
        """
        decode, end = _fast_decoder(), len(self._buffer)
        if decode is None:
            return []
        for _ in range(_BOUNDARIES):
            end = self._buffer.rfind(b"},", 0, end)
            if end < 0:
                return []
            if self._buffer[end + 2 : end + 66].lstrip()[:1] == b"{":
                try:
                    events = decode(b"[%b}]" % self._buffer[:end])
                except (ValueError, RecursionError):
                    return []
                self._buffer = self._buffer[end + 2 :]
                return events
        return []

    def _slow_chunk(self) -> list[Event]:
        """Remove events from the buffer and decode them with the standard library.

        The result is empty if more must be read. The standard library accepts text that msgspec refuses.

        An event is complete if a comma or the end of the list follows it.
        """
        events: list[Event] = []
        text, begin = self._buffer.decode("utf-8", "surrogateescape"), 0
        while text.startswith("{", begin):
            try:
                value, end = _decode(text, begin)
            except json.JSONDecodeError:
                break
            except (ValueError, RecursionError):
                raise self._damage_error() from None
            end = _after_blanks(text, end)
            if text[end : end + 1] not in (",", "]", ""):
                raise self._damage_error()
            if end == len(text):
                break
            events.append(_event(value))
            begin = _after_blanks(text, end + 1) if text[end] == "," else end
        if not events and not text.startswith("{", begin):
            raise self._damage_error()
        self._buffer = text[begin:].encode("utf-8", "surrogateescape")
        if not events:
            self._grow()
        return events

    def _value(self) -> Any:
        """Remove the next JSON value from the buffer and return it."""
        while True:
            self._next_character()
            text = self._buffer.decode("utf-8", "surrogateescape")
            try:
                value, end = _decode(text, 0)
                if end < len(text) or self._is_at_end:
                    self._buffer = text[end:].encode("utf-8", "surrogateescape")
                    return value
            except json.JSONDecodeError:
                pass
            except (ValueError, RecursionError):
                raise self._damage_error() from None
            self._grow()

    def _grow(self) -> None:
        """Double the buffer, so that a long value is decoded in few attempts."""
        if len(self._buffer) > MOST_VALUE:
            raise self._error(f"it has a value of more than {MOST_VALUE >> 20} MiB, or text that is no JSON")
        wanted = 2 * len(self._buffer)
        if not self._read_chunk():
            raise self._damage_error() if self._buffer.strip() else self._cut_off()
        while len(self._buffer) < wanted and self._read_chunk():
            pass

    def _next_character(self) -> bytes:
        """The next character that is not whitespace, or nothing at the end of the file.

        The character remains in the buffer.
        """
        self._buffer = self._buffer.lstrip()
        while not self._buffer and self._read_chunk():
            self._buffer = self._buffer.lstrip()
        return self._buffer[:1]

    def _take_character(self, character: bytes) -> None:
        next_character = self._next_character()
        if next_character != character:
            raise self._damage_error() if next_character else self._cut_off()
        self._buffer = self._buffer[1:]

    def _read_chunk(self) -> bool:
        """Read a chunk into the buffer; False at the end of the file."""
        try:
            part = self._file.read(CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._cut_off() if isinstance(error, EOFError) else self._error("its gzip is damaged") from None
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror or error}") from None
        self._buffer += part
        self._is_at_end = not part
        return bool(part)

    def _cut_off(self) -> UsageError:
        return self._error("it is cut off")

    def _damage_error(self) -> UsageError:
        return self._error("it is cut off or damaged")

    def _error(self, problem: str) -> UsageError:
        where = f" after {self._count:,} events" if self._count else ""
        return UsageError(
            f"{self.name} is no whole trace of the profiler: {problem}{where}; expected what export_chrome_trace writes"
        )


_decode = json.JSONDecoder().raw_decode


def _after_blanks(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _event(value: dict[str, Any]) -> Event:
    values = value.get("args")
    arguments = Arguments(*map(values.get, _IN_FILE)) if isinstance(values, dict) else Arguments()
    ph, cat, name, pid, tid, ts, dur = map(value.get, EVENT_NAMES)
    return Event(ph, cat, name, pid, tid, ts, dur, arguments)
