"""Files with lists of faults: which format it is, and how much is read of it at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from unsilent import named
from unsilent.faults.lists import alfi
from unsilent.faults.lists.entries import Entry, Format, refused
from unsilent.faults.lists.own import JsonLines
from unsilent.faults.lists.pickled import MAGIC as PICKLE
from unsilent.faults.lists.scifi import HEADER, SciFi
from unsilent.faults.naming import kind_of
from unsilent.faults.record import Fault
from unsilent.plainfiles import read_plain

FORMATS: Mapping[str, Callable[..., Format]] = MappingProxyType(
    {"unsilent": JsonLines, "sci-fi": SciFi, "pytorchalfi": alfi.PyTorchAlfi}
)
MOST_BYTES = 512 * 2**20
MOST_FAULTS = 1_000_000
EMPTY = "holds no fault; give a list with one or more, like one that unsilent export STORE -o faults.jsonl writes"


def read_file(path: str) -> bytes:
    """The content of a list; raises ``UsageError`` for what is not a regular file, cannot be read or is larger than any list."""
    return read_plain(path, MOST_BYTES, f"the list of faults {path}")


def read_entries(content: bytes, name: str, how: str | None = None) -> Iterator[Entry]:
    """The entries of a list, in its order; ``how`` names the format (None: by the content).

    Raises ``UsageError``, while it goes, at the first thing that is wrong, and for a list without faults or with too many.
    """
    number = 0
    for number, entry in enumerate(_format(content, name, how).entries(content, name), 1):
        if number > MOST_FAULTS:
            raise refused(name, entry.place, f"there are more than {MOST_FAULTS:,} faults; split it into several lists")
        yield entry
    if not number:
        raise refused(name, "", EMPTY)


def kind_of_list(path: str, how: str | None = None) -> str:
    """The kind of sites that a list corrupts (``param``, ``op``, ``input``, ``kv``), from its first entry."""
    entry = next(read_entries(read_file(path), path, how))
    first = entry.parts[0]
    return kind_of(first.site) if isinstance(first, Fault) else "param"


def _format(content: bytes, name: str, how: str | None) -> Format:
    if how is not None:
        return named.build("format of a list of faults", how, FORMATS)
    head = content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith((b"{", b"[")):
        return JsonLines()
    if head.startswith((alfi.NUMPY, PICKLE)):
        raise refused(name, "", f"looks like a matrix of PyTorchALFI, which does not say what it means; add {alfi.ASK}")
    if head.partition(b"\n")[0].startswith(HEADER[0].encode() + b","):
        return SciFi()
    if not head:
        raise refused(name, "", EMPTY)
    raise refused(
        name, "", "is no list of faults that is known; expected JSON lines of fault records (unsilent export STORE -o "
        "faults.jsonl), a CSV of SCI-FI, or a matrix of PyTorchALFI",
    )  # fmt: skip
