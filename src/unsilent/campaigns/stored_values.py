"""Parsing and checking of values in a store file, which may come from an untrusted source."""

from __future__ import annotations

import json
import shlex
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeGuard, TypeVar

from unsilent.basics.printable import escape_unprintable
from unsilent.campaigns.spec import R

T = TypeVar("T")
MOST_NOTES = 1000
MOST_TRIALS = 10**12
MOST_THREADS = 4096
MOST_UNPACKED = 2**29
"""Most decompressed bytes of cells in one pass over a store, enough for 200,000 trials of 2,600 samples."""
UNPACKED_PER_BYTE = 32
"""Most decompressed bytes for each byte of a larger file."""
READS_PER_EQUAL_BLOB = 2
"""Arrays equal to those of an earlier trial take no memory, so only their bytes divided by this count towards the limit."""
MAX_CACHED_BLOBS, MAX_CACHED_BLOB_BYTES = 1000, 10_000
"""Most arrays that are cached, and most compressed bytes of each."""
LONGEST_SHOWN = 80


class DamagedRecordError(ValueError):
    """Raised for a record that this program does not write; the message names the invalid part."""


class RemovedOptionError(DamagedRecordError):
    """Raised for a store whose options, or their values, no longer exist; the message is the option."""


class ReadLimit:
    """A limit on the bytes that one pass over a store may read and unpack, so that memory cannot overflow.

    Args:
        size: Size of the file in bytes. A pass that reads more reaches cells twice, and is refused.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._unpacked = max(MOST_UNPACKED, UNPACKED_PER_BYTE * size)
        self._known: dict[bytes, bytes] = {}

    def count_read(self, *cells: Any) -> None:
        """Count the bytes of texts and blobs in a row; raises ``DamagedRecordError`` beyond the limit."""
        self._left -= sum(len(cell) for cell in cells if isinstance(cell, str | bytes))
        if self._left < 0:
            raise DamagedRecordError("its rows hold more bytes than the file")

    def unpack(self, blob: Any, most: int) -> bytes:
        """The decompressed content of a cell, at most ``most`` bytes.

        Equal cells share their content. Raises ``DamagedRecordError``.
        """
        if not isinstance(blob, bytes):
            raise DamagedRecordError("an array is not stored as bytes")
        known = self._known.get(blob)
        if known is not None and len(known) <= most:
            self._count(len(known) // READS_PER_EQUAL_BLOB)
            return known
        opened = zlib.decompressobj()
        try:
            content = opened.decompress(blob, most + 1)
        except zlib.error as error:
            raise DamagedRecordError(f"an array cannot be decompressed: {error}") from None
        if len(content) > most or not opened.eof or opened.unused_data:
            raise DamagedRecordError("an array is truncated or too long")
        self._count(len(content))
        if len(self._known) < MAX_CACHED_BLOBS and len(blob) < MAX_CACHED_BLOB_BYTES:
            self._known[blob] = content
        return content

    def _count(self, size: int) -> None:
        self._unpacked -= size
        if self._unpacked < 0:
            raise DamagedRecordError(
                f"its decompressed arrays exceed {MOST_UNPACKED >> 20} MiB and also {UNPACKED_PER_BYTE} times the file size"
            )


def dump_stored_json(value: Any) -> str:
    """JSON text for a cell, with invalid Unicode left in place so that the checks before storing refuse it."""
    return json.dumps(value, default=str, ensure_ascii=False)


def parse_record(kind: type[T], text: Any, what: str) -> T:
    """A record parsed from JSON; raises ``DamagedRecordError``, whose message names ``what``."""
    if not isinstance(text, str):
        raise DamagedRecordError(f"its {what} is not text")
    try:
        hashable: Any = kind
        result: T = _adapter(hashable).validate_json(text)
    except (RecursionError, ValueError) as error:
        raise DamagedRecordError(
            f"its {what} cannot be read: {one_line_preview(str(error).splitlines()[-1].strip())}"
        ) from None
    return result


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def check_ascending(rows: Iterable[R]) -> Iterator[R]:
    """The rows unchanged; raises ``DamagedRecordError`` if their trials are not in ascending order."""
    last: tuple[str, int, int, int] | None = None
    for row in rows:
        trial = row.trial
        place = (trial.target, trial.flips or 0, trial.k, trial.sample_count)
        if last is not None and place <= last:
            raise DamagedRecordError(f"trial {one_line_preview(str(trial))} is stored twice")
        last = place
        yield row


def check_faults(text: Any, what: str) -> None:
    """Raise ``DamagedRecordError`` unless a cell is JSON of a list of objects, or of one object (a digest)."""
    from pydantic_core import from_json

    try:
        result = from_json(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        result = None
    faults = [result] if isinstance(result, dict) else result
    if not isinstance(faults, list) or not all(isinstance(fault, dict) for fault in faults):
        raise DamagedRecordError(f"{what} has a fault that cannot be read")


def read_budget(trials: Any, command: Any) -> tuple[int, str]:
    """The number of trials and the command of a stored budget; raises ``DamagedRecordError``."""
    if not is_whole_number(trials) or not 0 <= trials < MOST_TRIALS or not isinstance(command, str):
        raise DamagedRecordError(
            "the requested number of trials in it is invalid, or the command line in it is not text"
        )
    try:
        shlex.split(command)
    except ValueError:
        raise DamagedRecordError("the command line in it cannot be parsed") from None
    if not command.isprintable():
        raise DamagedRecordError("the command line in it contains unprintable characters")
    return trials, command


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether a cell holds a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> TypeGuard[float]:
    """Whether a cell holds a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def one_line_preview(value: Any) -> str:
    """The beginning of an untrusted value as printable text on one line."""
    return escape_unprintable(value if isinstance(value, str) else repr(value))[:LONGEST_SHOWN]
