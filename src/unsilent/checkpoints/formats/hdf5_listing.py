"""Lists the datasets of an HDF5 file as JSON, in a separate process with limits, because the file may be damaged.

    python -I hdf5_listing.py DESCRIPTOR BEGIN SIZE MEMORY SECONDS OUTPUT MOST_CHUNKS [FOLDER …]

The file is the bytes BEGIN to BEGIN + SIZE of an open file; offsets are counted from BEGIN. No other file can be opened once h5py
is imported, so external links, external storage and virtual datasets are not resolved; no values are read, so no filter runs. The
result on standard output is ``{"datasets": [...]}`` or ``{"error": "..."}``. This module imports no other module of this package.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from typing import Any

from unsilent.basics.lazy_numpy import np

MOST_OBJECTS = 1_000_000
MOST_LEVELS = 60
NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_BFLOAT16_BITS = (15, 7, 8, 0, 7)
"""Sign bit, first bit and number of bits of the exponent, and of the mantissa."""


class TooMuch(Exception):
    """Raised if the file describes more objects than any checkpoint has."""


class FileRange(io.RawIOBase):
    """A byte range of an open file, readable like a file."""

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self._descriptor, self._begin, self._size, self._at = descriptor, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = os.pread(self._descriptor, max(0, min(len(view), self._size - self._at)), self._begin + self._at)
        view[: len(content)] = content
        view[len(content) :] = bytes(len(view) - len(content))
        self._at += len(content)
        return len(content)


def listing(h5py: Any, file: Any, most_chunks: int) -> list[dict[str, Any]]:
    """Every dataset that hard links lead to, listed once, under the first path to it."""
    known, result, chunks = _known_types(h5py), [], 0
    seen: set[int] = set()
    waiting: list[tuple[tuple[bytes, ...], Any]] = [((), h5py.h5g.open(file.id, b"/"))]
    while waiting:
        path, parent = waiting.pop()
        node = h5py.h5o.open(parent, path[-1]) if path else parent
        address = h5py.h5o.get_info(node).addr
        if address in seen:
            continue
        seen.add(address)
        if len(seen) > MOST_OBJECTS or len(path) > MOST_LEVELS:
            raise TooMuch(f"it nests more than {MOST_OBJECTS:,} objects or {MOST_LEVELS} levels")
        if isinstance(node, h5py.h5d.DatasetID):
            names = [name.decode("utf-8", "backslashreplace") for name in path]
            result.append(
                {"path": names, **_description_of_dataset(h5py, h5py.Dataset(node), known, most_chunks - chunks)}
            )
            chunks += len(result[-1]["chunks"])
        elif isinstance(node, h5py.h5g.GroupID):
            hard = [name for name in node if node.links.get_info(name).type == h5py.h5l.TYPE_HARD]
            waiting += [((*path, name), node) for name in reversed(hard)]
    return result


def _known_types(h5py: Any) -> list[tuple[str, bool, Any]]:
    """The HDF5 types of the numbers that NumPy has: name, whether big endian, and HDF5's type."""
    pairs = [(name, big) for name in NUMBERS for big in (False, True)]
    orders = [(name, big, np.dtype(name).newbyteorder(">" if big else "<")) for name, big in pairs]
    orders.append(("bool", False, np.dtype(bool)))
    return [(name, big, h5py.h5t.py_create(dtype, logical=True)) for name, big, dtype in orders]


def _element(h5py: Any, dataset: Any, known: list[tuple[str, bool, Any]]) -> tuple[str, bool]:
    """The name of a dataset's element type and whether it is big endian.

    For an unsupported type, the name is that of its HDF5 class.
    """
    kind = dataset.id.get_type()
    for name, big, same in known:
        if kind.equal(same):
            return name, big
    if _is_bfloat16(h5py, kind):
        return "bfloat16", bool(kind.get_order() == h5py.h5t.ORDER_BE)
    if isinstance(kind, h5py.h5t.TypeOpaqueID) and kind.get_size() == 2 and dataset.attrs.get("dtype") == "bfloat16":
        return "bfloat16", False  # as Keras writes it
    return type(kind).__name__.removeprefix("Type").removesuffix("ID").lower(), False


def _is_bfloat16(h5py: Any, kind: Any) -> bool:
    if not isinstance(kind, h5py.h5t.TypeFloatID) or (kind.get_size(), kind.get_ebias()) != (2, 127):
        return False
    return kind.get_fields() == _BFLOAT16_BITS and kind.get_order() in (h5py.h5t.ORDER_LE, h5py.h5t.ORDER_BE)


def _description_of_dataset(
    h5py: Any, dataset: Any, known: list[tuple[str, bool, Any]], most_chunks: int
) -> dict[str, Any]:
    """The type and shape of a dataset, and the position of its bytes."""
    identifier, properties = dataset.id, dataset.id.get_create_plist()
    dtype, big_endian = _element(h5py, dataset, known)
    layouts = {h5py.h5d.COMPACT: "compact", h5py.h5d.CONTIGUOUS: "contiguous", h5py.h5d.CHUNKED: "chunked"}
    layout = layouts.get(properties.get_layout(), "virtual")
    if properties.get_external_count():
        layout = "external"
    described: dict[str, Any] = {
        "dtype": dtype, "big_endian": big_endian, "shape": dataset.shape, "layout": layout, "offset": None, "size": 0,
        "chunk": [], "filters": [], "chunks": [],
    }  # fmt: skip
    if layout == "contiguous":
        described |= {"offset": identifier.get_offset(), "size": identifier.get_storage_size()}
    elif layout == "chunked":
        filters = [properties.get_filter(number) for number in range(properties.get_nfilters())]
        described["chunk"] = properties.get_chunk()
        described["filters"] = [[code, list(values)] for code, _, values, _ in filters]
        described["chunks"] = _chunks(identifier, most_chunks)
    return described


def _chunks(identifier: Any, most: int) -> list[list[Any]]:
    """Offset, stored size, mask of skipped filters and first index of every chunk that is in the file."""
    count = identifier.get_num_chunks()
    if count > most:
        raise TooMuch("it has more chunks than can be listed")
    infos: list[Any] = []
    if hasattr(identifier, "chunk_iter"):
        identifier.chunk_iter(infos.append)
    else:
        infos = [identifier.get_chunk_info(number) for number in range(count)]
    return [[info.byte_offset, info.size, info.filter_mask, list(info.chunk_offset)] for info in infos]


def _limit(memory: int, seconds: int, output: int) -> None:
    """Set hard limits on memory, CPU time and output size of this process, unless lower ones are set."""
    sizes = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, output))
    for limit, most in (*sizes, (resource.RLIMIT_CPU, seconds)):
        _, present = resource.getrlimit(limit)
        least = most if present == resource.RLIM_INFINITY else min(most, present)
        resource.setrlimit(limit, (least, least))


def main(arguments: list[str]) -> None:
    """Print the listing as JSON, or the reason why there is none."""
    descriptor, begin, size, memory, seconds, output, most_chunks = map(int, arguments[:7])
    _limit(memory, seconds, output)
    sys.path += arguments[7:]
    result: dict[str, Any]
    try:
        import h5py

        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        with h5py.File(FileRange(descriptor, begin, size), "r") as file:
            result = {"datasets": listing(h5py, file, most_chunks)}
    except MemoryError:
        result = {"error": f"it needs more than {memory >> 20:,} MiB of memory"}
    except Exception as error:  # libhdf5 raises errors of any kind for damaged files
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        result = {"error": (text or type(error).__name__)[:300]}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
