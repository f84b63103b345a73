"""Runs `hdf5_listing` in a process with limits and checks its answer, which a damaged file may have falsified."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from unsilent.basics.errors import UsageError, system_errors
from unsilent.basics.plainfiles import parse_json
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint_files import MOST_METADATA, CheckpointFiles

LISTING = Path(__file__).with_name("hdf5_listing.py")
MOST_DIMENSIONS = 32
_MOST = 2**62
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    "HDF5_PLUGIN_PRELOAD": "::",  # HDF5 loads no library for an unknown filter
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Limits on the resources for reading one file.

    Attributes:
        memory: Size of the address space in bytes.
        cpu_seconds, seconds: CPU time and wall time in seconds.
        chunks: Largest number of chunks of all datasets together.
    """

    memory: int = 2**31
    cpu_seconds: int = 60
    seconds: float = 120.0
    chunks: int = 1_000_000


LIMITS = Limits()


class Chunk(NamedTuple):
    """A chunk that is in the file.

    Attributes:
        offset, size: Position and number of its bytes in the file.
        skipped: Bit n is set if filter n was not applied.
        start: Index of its first element in the dataset.
    """

    offset: int
    size: int
    skipped: int
    start: tuple[int, ...]


@dataclass(frozen=True)
class Dataset:
    """A dataset whose sizes, chunks and byte ranges were checked for consistency.

    Attributes:
        path: Names of the groups that lead to it, and its own name.
        dtype: Torch's name of the dtype, or HDF5's name of the type's class if torch has no name for it.
        layout: ``contiguous``, ``chunked``, ``compact``, ``external`` or ``virtual``.
        offset: Position in bytes of the first element of a contiguous dataset; None if it has no bytes in the file.
        size: Size of a contiguous dataset in bytes.
        chunk: Shape of the chunks.
        filters: Code and parameters of each filter.
    """

    path: tuple[str, ...]
    dtype: str
    big_endian: bool
    shape: tuple[int, ...]
    layout: str
    offset: int | None
    size: int
    chunk: tuple[int, ...]
    filters: tuple[tuple[int, tuple[int, ...]], ...]
    chunks: tuple[Chunk, ...]

    @property
    def name(self) -> str:
        """Path of the dataset, for messages."""
        return ascii("/".join(self.path))[:80]


def datasets(files: CheckpointFiles, begin: int, size: int) -> list[Dataset]:
    """All datasets of an HDF5 file embedded in a checkpoint file; offsets are those in the checkpoint file.

    Raises ``UsageError`` if the file is damaged, or if h5py is missing.
    """
    where = files.shown("")
    answer = _answer(files.descriptor(""), begin, size, where)
    try:
        if "error" in answer:
            raise _damage_error(where, escape_unprintable(answer["error"])[:300])
        result = [_checked_dataset(record, begin, size) for record in answer["datasets"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage_error(where, escape_unprintable(error)[:120]) from None
    _refuse_overlaps(result, where)
    return result


def _damage_error(where: str, problem: str) -> UsageError:
    return UsageError(
        f"{where} cannot be read as HDF5: {problem}; it is damaged, or written in part; restore it from a copy"
    )


def _answer(descriptor: int, begin: int, size: int, where: str) -> Any:
    """The parsed answer of the process that lists the datasets.

    Raises ``UsageError`` if it gives none.
    """
    folders = []
    for package in ("h5py", "numpy"):
        module = find_spec(package)
        if module is None or not module.origin:
            raise UsageError(f"{where} is an HDF5 file, which needs h5py; run: pip install 'unsilent[hdf5]'")
        folders.append(str(Path(module.origin).parents[1].absolute()))
    limits = LIMITS
    numbers = (descriptor, begin, size, limits.memory, limits.cpu_seconds, MOST_METADATA, limits.chunks)
    command = [sys.executable, "-I", str(LISTING), *map(str, numbers), *dict.fromkeys(folders)]
    try:
        with system_errors(f"cannot start a process that reads {where}", "free memory or disk space"):
            code, content = _run(command, descriptor, limits.seconds)
    except subprocess.TimeoutExpired:
        raise _damage_error(where, f"libhdf5 had not finished after {limits.seconds:g} seconds") from None
    if code or len(content) > MOST_METADATA:
        how = f"was killed by signal {-code}" if code < 0 else "ended with an error"
        raise _damage_error(where, f"the process that reads it with libhdf5 {how}")
    try:
        return parse_json(content)
    except (ValueError, RecursionError):
        raise _damage_error(where, "libhdf5's answer is no JSON") from None


def _run(command: Sequence[str], descriptor: int, seconds: float) -> tuple[int, bytes]:
    """Run a process that inherits one open file, and return its exit status and output.

    Raises ``OSError`` and ``TimeoutExpired``.
    """
    with tempfile.TemporaryFile() as output:
        environment, null = {**os.environ, **_ENVIRONMENT}, subprocess.DEVNULL
        process = subprocess.Popen(
            command, stdin=null, stdout=output, stderr=null, pass_fds=[descriptor], env=environment
        )
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return code, output.read(MOST_METADATA + 1)


def _sizes(values: Iterable[Any], least: int = 0) -> tuple[int, ...]:
    """The values, checked to be integers of at least ``least``.

    Raises ``ValueError`` if one is not.
    """
    result = tuple(values)
    if any(type(value) is not int or not least <= value < _MOST for value in result):
        raise ValueError("a size or offset is none")
    return result


def _checked_dataset(record: dict[str, Any], begin: int, size: int) -> Dataset:
    """Convert a dataset's JSON record and check it; raises ``ValueError`` or a similar error."""
    path = tuple(map(str, record["path"]))
    without_elements = record["shape"] is None  # HDF5's null dataspace
    shape = (0,) if without_elements else _sizes(record["shape"])
    chunk = _sizes(record["chunk"], 1)
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) >= _MOST or math.prod(chunk) >= _MOST:
        raise ValueError(f"the shape of {ascii(path)[:80]} is too large")
    chunks = []
    for at, stored, skipped, start in record["chunks"]:
        _sizes((at, stored, skipped))
        chunks.append(Chunk(begin + at, stored, skipped, _sizes(start)))
    first, length = _sizes([record["offset"] or 0, record["size"]])
    for at, stored in ((begin + first, length), *((c.offset, c.size) for c in chunks)):
        if at + stored > begin + size:
            raise ValueError(f"{ascii(path)[:80]} ends beyond the end of the file")
    if not _are_of_grid([c.start for c in chunks], shape, chunk):
        raise ValueError(f"{ascii(path)[:80]} has chunks that are not of its grid")
    dtype, is_big_endian = escape_unprintable(record["dtype"])[:40], record["big_endian"] is True
    offset = None if record["offset"] is None or without_elements else begin + first
    filters = tuple((_sizes([code])[0], _sizes(values)) for code, values in record["filters"])
    return Dataset(
        path, dtype, is_big_endian, shape, str(record["layout"]), offset, length, chunk, filters, tuple(chunks)
    )


def _are_of_grid(starts: list[tuple[int, ...]], shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Whether the chunks start at different positions of the dataset's chunk grid."""
    if len(set(starts)) != len(starts) or any(not len(start) == len(shape) == len(chunk) for start in starts):
        return False
    axes = (axis for start in starts for axis in zip(start, chunk, shape, strict=True))
    return all(at % step == 0 and at < length for at, step, length in axes)


def _refuse_overlaps(listed: list[Dataset], where: str) -> None:
    """Raise ``UsageError`` if two datasets or two chunks share a byte."""
    parts = [(d.offset, d.offset + d.size, d.name) for d in listed if d.offset is not None and d.size]
    parts += [(chunk.offset, chunk.offset + chunk.size, d.name) for d in listed for chunk in d.chunks if chunk.size]
    parts.sort()
    for (_, end, name), (first, _, next_name) in itertools.pairwise(parts):
        if first < end:
            raise _damage_error(where, f"bytes of {name} and {next_name} overlap")
