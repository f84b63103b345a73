"""Datasets of every layout and dtype, and applying patches to bytes in memory; h5py is the reference."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.formats.hdf5_filters import fletcher32
from unsilent.checkpoints.stored_tensors import Patch, StoredTensor
from unsilent.faults.record import Fault

h5py = pytest.importorskip("h5py")

SHAPE, CHUNK = (13, 26), (5, 8)
"""Chunks at both edges are cut."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "plain": {"chunks": CHUNK},
    "one": {"chunks": SHAPE},
    "fletcher": {"chunks": CHUNK, "fletcher32": True},
    "shuffle": {"chunks": CHUNK, "shuffle": True},
    "shuffle_fletcher": {"chunks": CHUNK, "shuffle": True, "fletcher32": True},
    "gzip": {"chunks": SHAPE, "compression": "gzip"},
    "gzip9": {"chunks": (13, 16), "compression": "gzip", "compression_opts": 9},
    "gzip_all": {"chunks": SHAPE, "compression": "gzip", "shuffle": True, "fletcher32": True},
}
NOTICED = {"fletcher", "shuffle_fletcher", "gzip_all"}
"""Layouts in which h5py notices a changed element whose checksums were left as they are."""
DTYPES = ("<f2", "<f4", "<f8", "i1", "<i2", "<i4", "<i8", "u1", ">f2", ">f4", ">f8", ">i2", ">i4", ">i8")
READ_ONLY = ("<u2", "<u4", "<u8", ">u4", "?")


def values(dtype: str, shape: tuple[int, ...] = SHAPE) -> Any:
    """Seeded values of random bits but for some rows of zeros, so that gzip makes them shorter and a changed bit no longer."""
    kind = np.dtype(dtype)
    rng = np.random.default_rng(sum(dtype.encode()))
    if kind.kind == "f":
        result = (rng.normal(size=shape) * 0.05).astype(kind)
    elif kind.kind == "b":
        result = rng.integers(0, 2, shape).astype(kind)
    else:
        result = np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape).copy()
    result[4:7] = 0
    return result


def write(file: Any, layouts: Sequence[str] = tuple(LAYOUTS), dtypes: Sequence[str] = (*DTYPES, *READ_ONLY)) -> None:
    """One dataset of each layout and dtype; ``model/LAYOUT/DTYPE``."""
    for layout in layouts:
        for dtype in dtypes:
            dataset = file.create_dataset(f"{layout}/{dtype}", data=values(dtype), **LAYOUTS[layout])
            if dataset.compression:
                leave_room(dataset)


def leave_room(dataset: Any) -> None:
    """Zeros after every compressed stream, so that edits fit with any version of zlib."""
    for number in range(dataset.id.get_num_chunks()):
        start = dataset.id.get_chunk_info(number).chunk_offset
        mask, raw = dataset.id.read_direct_chunk(start)
        if not mask:
            longer = (raw[:-4] if dataset.fletcher32 else raw) + bytes(200)
            dataset.id.write_direct_chunk(start, longer + (fletcher32(longer) if dataset.fletcher32 else b""))


def patched(content: bytes, patches: Sequence[Patch]) -> bytes:
    """The content of a file after an edit."""
    result = bytearray(content)
    for patch in patches:
        assert result[patch.offset : patch.offset + len(patch.before)] == patch.before
        result[patch.offset : patch.offset + len(patch.after)] = patch.after
    return bytes(result)


def flip(tensor: StoredTensor, element: int, bit: int) -> Fault:
    """A fault of one bit."""
    mask = np.array([1 << bit], tensor.codec.word_dtype)
    return Fault(tensor.site, tensor.dtype, tensor.shape, np.array([element]), "xor", mask)


def words(array: Any) -> Any:
    """The bits of numbers in the machine's order, flat."""
    native = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="))
    return native.reshape(-1).view(f"u{native.itemsize}")


def stored(content: bytes, path: str) -> Any:
    """What h5py reads."""
    with h5py.File(io.BytesIO(content), "r") as file:
        return file[path][()]


def content_of(checkpoint: Checkpoint, tensor: StoredTensor) -> Any:
    """All elements, as unsigned words."""
    return np.frombuffer(b"".join(bytes(part) for part in checkpoint.content(tensor)), f"<u{tensor.item_size}")


def use_all(path: Path) -> int:
    """Open a file and read and plan all that can be; what is wrong with it raises ``UsageError``. Number of tensors."""
    with Checkpoint(path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            assert tensor.name.isprintable()
            try:
                if tensor.is_readable and tensor.numel < 10**6:
                    assert sum(map(len, checkpoint.content(tensor))) == tensor.numel * tensor.item_size
                if not tensor.reason_not_editable and tensor.numel:
                    checkpoint.plan([flip(tensor, tensor.numel - 1, 1)], "fixed")
            except UsageError:
                continue
        return len(checkpoint.tensors)


def usable_or_refused(where: Path) -> int:
    """1 where the file could be listed, 0 where it was refused in one line."""
    try:
        use_all(where)
    except UsageError as error:
        assert str(error).isprintable()  # noqa: PT017
        return 0
    return 1
