"""Manifests, which record the hashes of all files and tensors of a checkpoint, and verification against them.

A checkpoint matches its manifest if all of its files have the same bytes; the hashes of tensors only show which tensors changed.
The manifest has a hash of its own content, so that damage to it is not mistaken for damage to the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from unsilent.basics.errors import UsageError, system_errors
from unsilent.basics.plainfiles import MOST_JSON_MEMORY, json_memory, parse_json, read_plain, replace_file
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.hashes import (
    FileHash,
    Progress,
    TensorHash,
    hash_files,
    hash_stored_tensor,
    hash_tensors,
    no_progress,
)

SCHEMA = "unsilent/manifest/2"
MOST_BYTES = 128 * 2**20
"""Size of the largest manifest that is read; one takes about 200 bytes for each file and tensor."""
_ENCODER = json.JSONEncoder(sort_keys=True)


@dataclass(frozen=True)
class Manifest:
    """The files, tensors and numbers that a checkpoint held, with their hashes.

    Attributes:
        checkpoint: Name of its file or folder.
        files: Hashes of its files by their names within it; the name of a single file is empty.
        tensors: Hashes by the tensor's name.
        numbers: Values, by name, of numbers that are not stored as elements.
        skipped: Names of other entries of the folder, such as links; the manifest does not cover them.
        step: Number of steps of a training after which it was saved; None if no step was given.
    """

    checkpoint: str
    files: dict[str, FileHash]
    tensors: dict[str, TensorHash]
    numbers: dict[str, Any]
    skipped: tuple[str, ...] = ()
    step: int | None = None

    @property
    def is_fast_only(self) -> bool:
        """Whether the manifest has no SHA-256, so that it detects accidents but not deliberate changes."""
        return not all(file.sha256 for file in self.files.values())

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files.values())


def make_manifest(checkpoint: Checkpoint, files: dict[str, FileHash], progress: Progress = no_progress) -> Manifest:
    """Hash the tensors of a checkpoint and make its manifest from these and the given file hashes.

    ``progress`` is called with numbers of bytes.
    """
    numbers = {name: t.value for name, t in checkpoint.tensors.items() if t.value is not None}
    skipped = tuple(name for name, _ in checkpoint.files.others())
    return Manifest(checkpoint.path.name, files, hash_tensors(checkpoint, progress), numbers, skipped)


def manifest_path(checkpoint: Path) -> Path:
    """The default path of a checkpoint's manifest: ``NAME.manifest.json`` next to it, with links resolved.

    Raises ``UsageError``.
    """
    try:
        whole = Path(os.path.realpath(Path(checkpoint).expanduser()))
        return whole.with_name(f"{whole.name}.manifest.json")
    except (OSError, ValueError, RuntimeError):  # the root folder, a null byte; no home folder
        raise UsageError(f"{checkpoint} has no name for a manifest next to it; say where to write it") from None


def manifest_content(manifest: Manifest) -> bytes:
    """The bytes of a manifest's file.

    Raises ``UsageError`` if the file would be too large to be read.
    """
    hashes = {
        kind: {name: vars(entry) for name, entry in named.items()}
        for kind, named in (("files", manifest.files), ("tensors", manifest.tensors))
    }
    values = {"schema": SCHEMA, **vars(manifest), **hashes}
    values["xxh3_128"] = manifest_digest(values)
    content = "".join(_json_parts(values, 2, in_lines=True)).encode() + b"\n"  # a line for each file and tensor
    if len(content) > MOST_BYTES or json_memory(content) > MOST_JSON_MEMORY:
        count = len(manifest.files) + len(manifest.tensors)
        raise UsageError(
            f"{manifest.checkpoint} has {count:,} files and tensors, too many for a manifest; give a part of it"
        )
    return content


def manifest_digest(values: Mapping[str, Any]) -> str:
    """The checksum over all values of a manifest except the checksum itself."""
    result = xxhash.xxh3_128()
    for part in _json_parts(values, 2):
        result.update(part.encode())
    return result.hexdigest()


def _json_parts(value: Any, levels: int, in_lines: bool = False) -> Iterator[str]:
    """Yield ``json.dumps(value, sort_keys=True)`` in parts, which takes less memory.

    Args:
        levels: Number of nested levels that are split into parts.
        in_lines: Whether each value of these levels gets a line of its own, unsorted.
    """
    if not levels or not isinstance(value, dict):
        yield _ENCODER.encode(value)
        return
    between = "{"
    for key in value if in_lines else sorted(value):
        yield f"{between}{_ENCODER.encode(key)}: "
        between = ",\n" if in_lines else ", "
        yield from _json_parts(value[key], levels - 1, in_lines)
    yield "}" if value else "{}"


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest atomically in place of an older one.

    Raises ``UsageError`` if it cannot be written.
    """
    with system_errors(f"cannot write {path}", "check the folder and the space on its disk"):
        replace_file(path, manifest_content(manifest))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises ``UsageError`` if the file is not a manifest or is damaged.
    """
    content = read_plain(path, MOST_BYTES, f"the manifest {path}")
    try:
        values = parse_json(content)
        if values["schema"] != SCHEMA:
            raise UsageError(
                f"{path} has schema {ascii(values['schema'])[:40]}; expected {SCHEMA}; "
                "if you still trust the checkpoint, make its manifest again"
            )
        if values.pop("xxh3_128") != manifest_digest(values):
            raise UsageError(f"the manifest {path} does not have its own checksum; it is damaged, use a copy of it")
        files, tensors = {}, {}
        for name, v in values["files"].items():
            files[str(name)] = FileHash(int(v["size"]), str(v["xxh3_128"]), str(v["sha256"]))
        for name, v in values["tensors"].items():
            dtype, shape = escape_unprintable(v["dtype"])[:20], tuple(map(int, v["shape"]))
            tensors[escape_unprintable(name)] = TensorHash(dtype, shape, str(v["xxh3_128"]))
        numbers = {escape_unprintable(name): _number(value) for name, value in values["numbers"].items()}
        if not files:
            raise ValueError("no file")
        skipped = tuple(map(str, values["skipped"]))
        step = values.get("step")  # older manifests have no step
        if step is not None and (type(step) is not int or step < 0):
            raise ValueError("the step is none")
        return Manifest(escape_unprintable(values["checkpoint"])[:200], files, tensors, numbers, skipped, step)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UsageError(
            f"{path} is no manifest; expected a file written by unsilent checkpoint manifest; use a copy of it"
        ) from None


def _number(value: Any) -> float | int | bool:
    """A number from a manifest's JSON.

    Raises ``ValueError`` if the value is not a number.
    """
    if not isinstance(value, (int, float)):
        raise ValueError("a number is none")
    return value


def verify(path: Path, manifest: Manifest, progress: Progress = no_progress, fast_only: bool = False) -> list[str]:
    """Differences between a checkpoint and its manifest, one sentence each; an empty list if every byte is the same.

    Files that the manifest does not cover are listed as well.

    Args:
        path: Path of the checkpoint.
        manifest: The expected manifest.
        progress: Called with numbers of hashed bytes.
        fast_only: Whether only the fast hash is compared.

    Raises:
        UsageError: the checkpoint does not exist, or a file cannot be read.
    """
    fast_only = fast_only or manifest.is_fast_only
    with CheckpointFiles(path) as files:
        now = hash_files(files, progress, fast_only)
        uncovered = not_covered(files)
    absent = [f"{shown_name(name)} is missing" for name in manifest.files if name not in now]
    added = [f"{shown_name(name)} is not in the manifest" for name in now if name not in manifest.files]
    stored = manifest.files
    if fast_only:
        stored = {name: FileHash(entry.size, entry.xxh3_128) for name, entry in stored.items()}
    changed = [name for name, entry in stored.items() if name in now and now[name] != entry]
    return [*absent, *added, *(_changes(path, manifest, changed) if changed else []), *uncovered]


def shown_name(file: str) -> str:
    """The name of a checkpoint's file with unprintable characters escaped."""
    return escape_unprintable(file)[:200]


def not_covered(files: CheckpointFiles) -> list[str]:
    """Sentences on entries of a folder that a manifest does not cover, such as links."""
    return [f"{shown_name(name)} is not covered: it is {description}" for name, description in files.others()]


def _changes(path: Path, manifest: Manifest, changed_files: list[str]) -> list[str]:
    """Sentences on the changes in changed files, with the tensors and numbers affected if these can be read."""
    sentences = {file: f"{shown_name(file) or manifest.checkpoint} has changed" for file in changed_files}
    try:
        with Checkpoint(path) as checkpoint:
            result, where = _changed_values(checkpoint, manifest)
    except UsageError as error:
        return [*sentences.values(), f"it cannot be read any more: {error}"]
    if not result:
        return [f"{sentence}, but no tensor or number that is read of it has" for sentence in sentences.values()]
    return result + [sentence for file, sentence in sentences.items() if file and file not in where]


def _changed_values(checkpoint: Checkpoint, manifest: Manifest) -> tuple[list[str], set[str]]:
    """Sentences on tensors and numbers that differ from the manifest, and the files that contain them."""
    expected = {*manifest.tensors, *manifest.numbers}
    present = {name: t for name, t in checkpoint.tensors.items() if t.is_readable or t.value is not None}
    absent = [name for name in expected if name not in present]
    if absent and len(absent) == len(expected):
        lost = f"none of the tensors of the manifest, which is of {manifest.checkpoint}, is in {checkpoint.path}"
        return [lost], set()
    result = [f"{name} is missing" for name in sorted(absent)]
    result += [f"{name} is not in the manifest" for name in present if name not in expected]
    where: set[str] = set()
    for name, tensor in present.items():
        sentence = ""
        if name in manifest.numbers and not _same_number(tensor.value, manifest.numbers[name]):
            sentence = f"{name} is {tensor.value}; the manifest has {manifest.numbers[name]}"
        elif (stored := manifest.tensors.get(name)) is not None and tensor.is_readable:
            if (tensor.dtype, tensor.shape) != (stored.dtype, stored.shape):
                old = f"{stored.dtype}{list(stored.shape)}"
                sentence = f"{name} is {tensor.dtype}{list(tensor.shape)}; the manifest has {old}"
            else:
                try:
                    is_same = hash_stored_tensor(checkpoint, tensor) == stored
                    sentence = "" if is_same else f"{name} has changed"
                except UsageError as error:  # damage that shows in the compression or in missing parts
                    sentence = f"{name} cannot be read any more: {error}"
        if sentence:
            result.append(sentence)
            where |= {block.file for block in tensor.blocks}
    return result, where


def _same_number(now: Any, stored: Any) -> bool:
    return bool(now == stored or (now != now and stored != stored))
