"""The injection sequences that are written by hdf5_corrupter (github.com/diepe28/hdf5_corrupter).

Read in ``corrupter.py``, ``hdf5_common.py`` and ``hdf5_corrupter.py`` at 676c62a: one JSON object, location -> its
injections in order, each ``[index, bits]``. A location is the name of a dataset, or the common beginning of several names. The
index is empty if it was not saved, and ``[0]`` for a scalar. The bits are a list of positions counted **from the
sign** (bit 0); a single number for an integer (a position in the digits of ``bin(value)``, which hdf5_corrupter does not
use in a replay); or null if the injection was skipped by its probability.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from unsilent.basics.errors import UsageError, first_line
from unsilent.basics.plainfiles import parse_json
from unsilent.basics.printable import short_repr
from unsilent.faults.lists.entries import (
    ColumnNames,
    FaultListEntry,
    ListedCorruption,
    ParameterPath,
    WrongEntry,
    errors_at,
    errors_in,
)

MOST_BYTES = 64 * 2**20
_BEGIN = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.){0,2000}"\s*:\s*\[\s*\[')
_EXPECTED = "expected [[index, …], [bit, …]]"
_COLUMNS = ColumnNames("location", ("index",), "bits")


class SequenceEntry(NamedTuple):
    """An injection as the file stores it; ``location`` is a dataset's name or the beginning of one."""

    location: str
    coordinates: tuple[int, ...]
    bits: tuple[int, ...] | int | None
    file_position: str


@dataclass(frozen=True)
class Hdf5Corrupter:
    """An injection sequence of hdf5_corrupter in JSON; ``together`` injects all of it in one trial."""

    together: bool = False

    def entries(self, content: bytes, name: str) -> Iterator[FaultListEntry]:
        """One entry for each injection, or one for all of them; injections without bits are skipped."""
        everything: list[ListedCorruption] = []
        for entry in _entries(content):
            if entry.bits is None:
                continue
            with errors_at(entry.file_position):
                parts = _corruptions(entry, entry.bits)
            everything += parts
            if not self.together:
                yield FaultListEntry(entry.file_position, tuple(parts))
        if self.together and everything:
            yield FaultListEntry("all entries", tuple(everything))


def _corruptions(entry: SequenceEntry, bits: tuple[int, ...] | int) -> list[ListedCorruption]:
    """The bit flips of an injection; raises `WrongEntry` if a model cannot have them."""
    if isinstance(bits, int):
        raise WrongEntry(f"bit {bits} is of an integer; lists for a model corrupt floating-point parameters")
    if not entry.coordinates:
        raise WrongEntry(
            "has no index, so its element is drawn at random; draw it in a checkpoint of the model with unsilent checkpoint "
            "replay CHECKPOINT FILE --save FAULTS, and give FAULTS"
        )
    where = ParameterPath(entry.location)
    return [ListedCorruption(where, entry.coordinates, "xor", bit, _COLUMNS, bit_from_sign=True) for bit in bits]


def is_sequence(content: bytes) -> bool:
    """Whether a file begins like a sequence: an object whose first value is a list of lists."""
    return _BEGIN.match(content[:4096].removeprefix(b"\xef\xbb\xbf")) is not None


def read_sequence(content: bytes, name: str) -> list[SequenceEntry]:
    """The injections of a sequence in the order of the file called ``name``; raises ``UsageError``."""
    with errors_in(name):
        return _entries(content)


def _entries(content: bytes) -> list[SequenceEntry]:
    if len(content) > MOST_BYTES:
        raise WrongEntry(f"is larger than {MOST_BYTES >> 20} MiB; split it into several sequences")
    try:
        value = parse_json(content, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        reason = short_repr(first_line(error), 80)
        raise WrongEntry(
            f"cannot be read as JSON ({reason}); expected the sequence that hdf5_corrupter saved"
        ) from None
    if not isinstance(value, dict):
        raise WrongEntry(f"found {short_repr(value)}; expected an object, location -> injections")
    result = []
    for location, injections in value.items():
        with errors_at(short_repr(location, 80)):
            if not isinstance(injections, list):
                raise WrongEntry(f"found {short_repr(injections)}; expected a list of injections")
            for number, injection in enumerate(injections, 1):
                place = f"{short_repr(location, 80)} entry {number}"
                with errors_at(place):
                    result.append(SequenceEntry(location, *_index_and_bits(injection), place))
    return result


def _index_and_bits(injection: Any) -> tuple[tuple[int, ...], tuple[int, ...] | int | None]:
    """The index and the bits of an injection; raises ``UsageError``."""
    if not isinstance(injection, list) or len(injection) != 2:
        raise UsageError(f"found {short_repr(injection)}; {_EXPECTED}")
    index, bits = injection
    if not _are_positions(index, 64):
        raise UsageError(f"found the index {short_repr(index)}; {_EXPECTED}")
    if bits is None or (type(bits) is int and 0 <= bits < 64):
        return tuple(index), bits
    if not _are_positions(bits, 1024) or not bits:
        hint = "; it marks a value that was scaled, which the file does not describe" if bits == [-2] else ""
        raise UsageError(f"found the bits {short_repr(bits)}; expected whole numbers counted from 0, the sign{hint}")
    return tuple(index), tuple(bits)


def _are_positions(value: Any, most: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 2**62 for n in value)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a location appears twice")
    return result
