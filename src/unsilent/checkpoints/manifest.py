"""Manifests: a hash of every tensor of a checkpoint, and finding out which tensor is not as it was.

Two hashes of the elements in C order, least significant byte first, so that they do not depend on format, strides or shards:
SHA-256 (FIPS 180-4), against anybody who wants to deceive, and xxh3-128, several times as fast, against accidents.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.stored_tensors import StoredTensor
from unsilent.errors import UsageError
from unsilent.plainfiles import read_plain, replace_file
from unsilent.printable import escape_unprintable

SCHEMA = "unsilent/manifest/1"
MOST_BYTES = 256 * 2**20
Progress = Callable[[int], object]


def no_progress(done: int) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class TensorHash:
    """The hashes of one tensor; ``sha256`` is empty where only the fast one was computed."""

    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint held.

    Attributes:
        checkpoint: Name of its file or folder.
        tensors: Hashes by the tensor's name.
        numbers: Numbers that are not stored as elements, by name.
        skipped: Names of what cannot be read.
    """

    checkpoint: str
    tensors: dict[str, TensorHash]
    numbers: dict[str, Any]
    skipped: tuple[str, ...] = ()


def hash_content(parts: Iterable[Any], dtype: str, shape: tuple[int, ...], fast_only: bool = False) -> TensorHash:
    """The hashes of a tensor's bytes, which come in parts."""
    fast, safe = xxhash.xxh3_128(), hashlib.sha256()
    for part in parts:
        fast.update(part)
        if not fast_only:
            safe.update(part)
    return TensorHash(dtype, shape, fast.hexdigest(), "" if fast_only else safe.hexdigest())


def make_manifest(checkpoint: Checkpoint, progress: Progress = no_progress, fast_only: bool = False) -> Manifest:
    """Read all of a checkpoint and hash it; ``progress`` is called with numbers of bytes."""
    hashes, numbers, skipped = {}, {}, []
    for name, tensor in checkpoint.tensors.items():
        if tensor.is_readable:
            parts = _counted(checkpoint, tensor, progress)
            hashes[name] = hash_content(parts, tensor.dtype, tensor.shape, fast_only)
        elif tensor.value is not None:
            numbers[name] = tensor.value
        else:
            skipped.append(name)
    return Manifest(checkpoint.path.name, hashes, numbers, tuple(skipped))


def _counted(checkpoint: Checkpoint, tensor: StoredTensor, progress: Progress) -> Iterator[memoryview]:
    for part in checkpoint.content(tensor):
        yield part
        progress(len(part))


def manifest_path(checkpoint: Path) -> Path:
    """Where the manifest of a checkpoint is by default: ``NAME.manifest.json`` next to it. Raises ``UsageError``."""
    whole = Path(os.path.abspath(checkpoint)) if checkpoint.name in ("", "..") else checkpoint
    try:
        return whole.with_name(f"{whole.name}.manifest.json")
    except ValueError:
        raise UsageError(f"{checkpoint} has no name for a manifest next to it; say where to write it") from None


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest; an older one is replaced at once, or not at all. Raises ``UsageError``."""
    content = json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1, allow_nan=True).encode() + b"\n"
    try:
        replace_file(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; check the folder and the space on its disk") from None


def read_manifest(path: Path) -> Manifest:
    """A manifest; raises ``UsageError`` for what is none."""
    if not path.exists():
        raise UsageError(
            f"no manifest {path}; make one with: unsilent checkpoint manifest CHECKPOINT, or give --manifest"
        )
    content = read_plain(path, MOST_BYTES, f"the manifest {path}")
    try:
        values = json.loads(content)
        if values["schema"] != SCHEMA:
            raise UsageError(
                f"{path} has schema {ascii(values['schema'])[:40]}; expected {SCHEMA}; make the manifest again"
            )
        hashes = {
            escape_unprintable(name): TensorHash(
                escape_unprintable(v["dtype"])[:20], tuple(map(int, v["shape"])), str(v["xxh3_128"]), str(v["sha256"])
            )
            for name, v in values["tensors"].items()
        }
        numbers = {escape_unprintable(name): _number(value) for name, value in values["numbers"].items()}
        skipped = tuple(map(escape_unprintable, values["skipped"]))
        return Manifest(escape_unprintable(values["checkpoint"])[:200], hashes, numbers, skipped)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UsageError(f"{path} is no manifest; make one with: unsilent checkpoint manifest CHECKPOINT") from None


def _number(value: Any) -> float | int | bool:
    """A number of a manifest; raises ``ValueError`` for what is none."""
    if not isinstance(value, (int, float)):
        raise ValueError("a number is none")
    return value


def verify(
    checkpoint: Checkpoint, manifest: Manifest, progress: Progress = no_progress, fast_only: bool = False
) -> list[str]:
    """What is not as the manifest says, one sentence each; none where all is.

    Raises:
        UsageError: the manifest is of other tensors.
    """
    expected = {**dict.fromkeys(manifest.numbers), **dict.fromkeys(manifest.tensors), **dict.fromkeys(manifest.skipped)}
    absent = [name for name in expected if name not in checkpoint.tensors]
    added = [name for name in checkpoint.tensors if name not in expected]
    if absent and len(absent) == len(expected):
        raise UsageError(
            f"the manifest is of {manifest.checkpoint} and has no tensor of {checkpoint.path}; give its own"
        )
    result = [f"{name} is missing" for name in absent] + [f"{name} is not in the manifest" for name in added]
    for name, value in manifest.numbers.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is not None and tensor.value != value and not (tensor.value != tensor.value and value != value):
            result.append(f"{name} is {tensor.value}; the manifest has {value}")
    fast_only = fast_only or not any(stored.sha256 for stored in manifest.tensors.values())
    for name, stored in manifest.tensors.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            continue
        if (tensor.dtype, tensor.shape) != (stored.dtype, stored.shape):
            result.append(
                f"{name} is {tensor.dtype}{list(tensor.shape)}; the manifest has {stored.dtype}{list(stored.shape)}"
            )
            continue
        try:
            now = hash_content(_counted(checkpoint, tensor, progress), tensor.dtype, tensor.shape, fast_only)
        except UsageError as error:  # damage that its compression or missing parts show
            result.append(f"{name} cannot be read any more: {error}")
            continue
        if now.xxh3_128 != stored.xxh3_128 or (stored.sha256 and not fast_only and now.sha256 != stored.sha256):
            result.append(f"{name} has changed")
    return result
