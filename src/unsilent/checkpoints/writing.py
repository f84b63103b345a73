"""Writing a state in one of the formats: the bytes are hashed and forced to disk, and failures raise ``OSError``."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from unsilent.basics.errors import UsageError, first_line
from unsilent.checkpoints.hashes import FileHash, RunningFileHash


class HashingFile:
    """A file for writing that hashes the bytes and keeps the error of a failed write, which torch would hide."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.running = file, RunningFileHash(fast_only=True)
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        """Hash and write bytes."""
        self.running.update(content)
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Flush the buffered bytes to the operating system."""
        self.file.flush()


def write_state(state: Mapping[str, Any], draft: Path, format_name: str) -> FileHash | None:
    """Write a state; returns the hash of the bytes written, or None if the format's writer does not show them.

    Raises:
        OSError: the disk is full or broken.
        UsageError: the format cannot hold this state.
    """
    if format_name == "torch.save":
        return _write_torch(state, draft)
    if format_name == "safetensors":
        write_safetensors(state, draft)
    else:
        _write_distributed(state, draft)
    return None


def _write_torch(state: Mapping[str, Any], draft: Path) -> FileHash:
    import torch

    with open(draft, "xb") as file:
        hashing = HashingFile(file)
        try:
            torch.save(state, cast(Any, hashing))
        except RuntimeError:
            if hashing.error is not None:
                raise hashing.error from None
            raise
    return hashing.running.result()


def write_safetensors(state: Mapping[str, Any], draft: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name, with text metadata in the header; raises the same errors as `write_state`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(state), draft, metadata)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        if of_system := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(of_system[1]), os.strerror(int(of_system[1]))) from None
        raise UsageError(f"safetensors cannot save this state: {first_line(error)}") from None


def _write_distributed(state: Mapping[str, Any], draft: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is intended
        try:
            save(dict(state), checkpoint_id=str(draft), no_dist=True)
        except CheckpointException as error:
            causes = [failure[0] for failure in error.failures.values()]
            if of_system := next((cause for cause in causes if isinstance(cause, OSError)), None):
                raise of_system from None
            raise OSError(first_line(causes[0]) if causes else first_line(error)) from None


def forget_cached_pages(draft: Path) -> None:
    """Flush a file or folder to disk and drop it from the page cache, so that the next read is from the disk."""
    for file in [draft] if draft.is_file() else [p for p in draft.rglob("*") if p.is_file() or p.is_dir()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if file.is_file():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
