"""Hashes of the bytes of a checkpoint's files and of the elements of its tensors.

A loader can read only the bytes of the files, so equal bytes load as equal states. The bytes are hashed by SHA-256 (FIPS 180-4)
to detect deliberate changes, and by xxh3-128, which is several times as fast, to detect accidental ones. The elements of a tensor
are hashed by xxh3-128 in C order, least significant byte first, so that they do not depend on format, strides or shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.stored_tensors import StoredTensor

PART_BYTES = 2**20
Progress = Callable[[int], object]


def no_progress(done: int) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class FileHash:
    """Size in bytes and hashes of one file; ``sha256`` is empty if only the fast hash was computed."""

    size: int
    xxh3_128: str
    sha256: str = ""


@dataclass(frozen=True)
class TensorHash:
    """Dtype, shape and hash of the elements of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str


class RunningFileHash:
    """Computes the hash of bytes that arrive in parts."""

    def __init__(self, fast_only: bool = False) -> None:
        self._size, self._fast, self._safe = 0, xxhash.xxh3_128(), None if fast_only else hashlib.sha256()

    def update(self, part: Any) -> None:
        """Add bytes."""
        self._size += len(part)
        self._fast.update(part)
        if self._safe is not None:
            self._safe.update(part)

    def result(self) -> FileHash:
        """The hash of all bytes so far."""
        return FileHash(self._size, self._fast.hexdigest(), self._safe.hexdigest() if self._safe else "")


def total_bytes(files: CheckpointFiles) -> int:
    """The total size of a checkpoint's files in bytes."""
    return sum(files.size(name) for name in files.all_names())


def hash_files(
    files: CheckpointFiles, progress: Progress = no_progress, fast_only: bool = False
) -> dict[str, FileHash]:
    """The hash of every regular file, also in subfolders, by its name within the checkpoint.

    ``progress`` is called with numbers of bytes. Raises ``UsageError`` for a file that cannot be read.
    """
    result = {}
    for name in files.all_names():
        running, size = RunningFileHash(fast_only), files.size(name)
        for offset in range(0, size, PART_BYTES):
            part = files.read(name, offset, min(PART_BYTES, size - offset))
            running.update(part)
            progress(len(part))
        result[name] = running.result()
    return result


def hash_tensors(checkpoint: Checkpoint, progress: Progress = no_progress) -> dict[str, TensorHash]:
    """The hash of every readable tensor by name.

    ``progress`` is called with numbers of bytes.
    """
    readable = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.is_readable}
    return {name: hash_stored_tensor(checkpoint, tensor, progress) for name, tensor in readable.items()}


def hash_stored_tensor(checkpoint: Checkpoint, tensor: StoredTensor, progress: Progress = no_progress) -> TensorHash:
    """The hash of one tensor of a checkpoint.

    Raises ``UsageError`` if its elements cannot be read.
    """

    def parts() -> Iterable[memoryview]:
        for part in checkpoint.content(tensor):
            yield part
            progress(len(part))

    return hash_elements(parts(), tensor.dtype, tensor.shape)


def hash_elements(parts: Iterable[Any], dtype: str, shape: tuple[int, ...]) -> TensorHash:
    """The hash of a tensor's bytes, which come in parts."""
    fast = xxhash.xxh3_128()
    for part in parts:
        fast.update(part)
    return TensorHash(dtype, shape, fast.hexdigest())
