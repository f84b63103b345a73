"""Reading of files with fault lists: detection of the format, and limits on the size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from unsilent.basics import name_and_parameters
from unsilent.basics.pickle_values import MAGIC as PICKLE
from unsilent.basics.plainfiles import read_plain
from unsilent.faults.lists import alfi
from unsilent.faults.lists.entries import FaultListEntry, Format, WrongEntry, errors_at, errors_in
from unsilent.faults.lists.hdf5_corrupter import Hdf5Corrupter, is_sequence
from unsilent.faults.lists.json_lines import JsonLines
from unsilent.faults.lists.scifi import HEADER, SciFi
from unsilent.faults.naming import kind_of
from unsilent.faults.record import Fault

FORMATS: Mapping[str, Callable[..., Format]] = MappingProxyType(
    {"unsilent": JsonLines, "sci-fi": SciFi, "pytorchalfi": alfi.PyTorchAlfi, "hdf5-corrupter": Hdf5Corrupter}
)
MOST_BYTES = 64 * 2**20
MOST_FAULTS = 200_000
"""Maximum number of faults in a list. A fault takes about 300 bytes in a file, 1 kB of memory and 30 us."""
EMPTY = "holds no fault; give a list of one or more faults, like the output of unsilent export STORE -o faults.jsonl"


def read_list_bytes(path: str) -> bytes:
    """The content of a fault list; raises ``UsageError`` unless it is a readable regular file of allowed size."""
    return read_plain(path, MOST_BYTES, f"the list of faults {path}")


def read_entries(content: bytes, name: str, format_name: str | None = None) -> Iterator[FaultListEntry]:
    """The entries of a fault list in order; ``format_name`` names the format (None: detected from the content).

    Raises ``UsageError`` at the first wrong entry, after the entries before it, and for a list with no or too many faults.
    """
    number = 0
    with errors_in(name):
        for number, entry in enumerate(_format(content, format_name).entries(content, name), 1):
            if number > MOST_FAULTS:
                with errors_at(entry.file_position):
                    raise WrongEntry(f"the list has more than {MOST_FAULTS:,} faults; split it into several lists")
            yield entry
        if not number:
            raise WrongEntry(EMPTY)


def kind_of_list(path: str, format_name: str | None = None) -> str:
    """The kind of sites that a fault list corrupts (``param``, ``op``, ``input``, ``kv``), from its first entry."""
    entry = next(read_entries(read_list_bytes(path), path, format_name))
    first = entry.corruptions[0]
    return kind_of(first.site) if isinstance(first, Fault) else "param"


def _format(content: bytes, how: str | None) -> Format:
    if how is not None:
        return name_and_parameters.build_named("format of a list of faults", how, FORMATS)
    head = content[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if is_sequence(content):
        return Hdf5Corrupter()
    if head.startswith((b"{", b"[")):
        return JsonLines()
    if head.startswith((alfi.NUMPY, PICKLE)):
        raise WrongEntry(
            f"looks like a matrix of PyTorchALFI, which does not contain its settings; add {alfi.FORMAT_OPTION_EXAMPLE}"
        )
    if head.partition(b"\n")[0].startswith(HEADER[0].encode() + b","):
        return SciFi()
    if not head:
        raise WrongEntry(EMPTY)
    raise WrongEntry(
        "is not a known list of faults; expected JSON lines of fault records (unsilent export STORE -o "
        "faults.jsonl), a CSV of SCI-FI, a matrix of PyTorchALFI, or a sequence of hdf5_corrupter"
    )
