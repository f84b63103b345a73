"""Safe reading of the user's ``.npz`` files.

Arrays are never unpickled, and are unpacked only if their sizes are allowed.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.plainfiles import open_plain

MOST_UNPACKED, PER_BYTE = 2**30, 32
"""Limits of the bytes of all arrays of a file: the first number, or the second per byte of the file if that is more."""
_NUMPY = b"\x93NUMPY"


def read_npz(path: str, expected: str, only: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name, or only those named in ``only`` that the file has.

    ``expected`` describes the expected content in one phrase. Raises ``UsageError`` if the file cannot be read without
    unpickling, or if its arrays would be far larger than the file.
    """
    with open_plain(path) as file:
        if file.read(len(_NUMPY)) == _NUMPY:
            raise UsageError(f"{path} holds a single array without a name; expected a .npz with {expected}")
        try:
            with zipfile.ZipFile(file) as archive:
                members = {i.filename.removesuffix(".npy"): i for i in archive.infolist()}
                members = {name: info for name, info in members.items() if only is None or name in only}
                check_unpacked(path, sum(info.file_size for info in members.values()), os.fstat(file.fileno()).st_size)
                return {name: _array(archive, info) for name, info in members.items()}
        except UsageError:
            raise
        except Exception:  # a damaged header can raise any exception
            raise UsageError(
                f"{path} is damaged, or is not a .npz file of plain arrays; expected a .npz with {expected}"
            ) from None


def check_unpacked(path: str, size: int, packed: int) -> None:
    """Raise ``UsageError`` if a file of ``packed`` bytes would unpack to more bytes than allowed."""
    if size > max(MOST_UNPACKED, PER_BYTE * packed):
        raise UsageError(
            f"{path} unpacks to {size:,} bytes, {size // max(packed, 1):,} times its size; save it uncompressed"
        )


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one array whose header states the same size as the archive.

    Raises ``ValueError`` if the sizes differ.
    """
    with archive.open(info) as member:
        header = _header_size(member, info.file_size)  # type: ignore[arg-type]
        member.seek(0)
        result: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    if header + result.nbytes != info.file_size:
        raise ValueError("it announces another size")
    return result


def _header_size(member: BinaryIO, size: int) -> int:
    """Number of bytes before the values of an array.

    Raises ``ValueError`` unless header and values together have ``size`` bytes.
    """
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, _, dtype = read(member)
    if min(shape, default=0) < 0 or member.tell() + math.prod(shape) * dtype.itemsize != size:
        raise ValueError("it announces another size")
    return member.tell()
