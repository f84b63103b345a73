"""Saving a training's state so that what is on the disk is what was in memory, and loading only what still is.

``verified_save`` hashes the tensors in memory, writes a draft, makes the system write it to the disk and forget its cached pages,
reads the draft back, compares its bytes with those that were written and its tensors with those in memory, and only then puts it
and its manifest in place. ``verified_load`` compares every byte with the manifest before anything is loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch import Tensor

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.hashes import FileHash, RunningFileHash, TensorHash, hash_files
from unsilent.checkpoints.manifest import Manifest, make_manifest, manifest_path, write_manifest
from unsilent.checkpoints.memory_hashes import hashes_in_memory
from unsilent.checkpoints.replacing import (
    MOST_ATTEMPTS,
    draft_folder,
    replace_checkpoint,
    state_of_files,
    verify_with_own_manifest,
)
from unsilent.errors import UnsilentError, UsageError, first_line

ENDINGS = {
    ".safetensors": "safetensors",
    ".pt": "torch.save",
    ".pth": "torch.save",
    ".ckpt": "torch.save",
    ".bin": "torch.save",
}


class CheckpointDamaged(UnsilentError):
    """What a checkpoint holds is not what was saved."""


def verified_save(state: Mapping[str, Any], path: str | Path, *, format_name: str | None = None) -> Path:
    """Save a state, and prove that the disk has it.

    After a kill or on a full disk, the older checkpoint or the new one can be loaded with `verified_load`. Threads and processes
    that save to one path save one after the other; the last one stays.

    Args:
        state: What ``torch.save`` would save; for safetensors, tensors by name. Tensors that are spread over ranks are refused.
        path: Where to. An older checkpoint there is replaced at the end, at once; where the path is a link, the file it leads to.
        format_name: ``torch.save``, ``safetensors`` or ``dcp`` (a folder, this process alone); by default from the path's ending.

    Returns:
        The manifest, ``PATH.manifest.json``.

    Raises:
        CheckpointDamaged: the disk has something else; the older checkpoint is still there.
        UsageError: the format is not known, the state has a tensor that cannot be compared, or the file cannot be written.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    chosen = format_name or ENDINGS.get(target.suffix, "" if target.suffix else "dcp")
    if chosen not in (*ENDINGS.values(), "dcp"):
        raise UsageError(
            f"the format of {target.name!r} is not known; give format_name='torch.save', 'safetensors' or 'dcp'"
        )
    if not target.parent.is_dir():
        raise UsageError(f"no folder {target.parent} to write {target.name} into; make it first")
    if target.exists() and target.is_dir() != (chosen == "dcp"):
        there, kind = ("a folder", "file") if target.is_dir() else ("a file", "folder")
        raise UsageError(f"{target} is {there}, and {chosen} would write a {kind}; give another path")
    if chosen == "safetensors":
        state = _for_safetensors(state)
    expected = hashes_in_memory(state)
    try:
        with draft_folder(target) as draft:
            content = draft / ("content" + target.suffix)
            written = _write(state, content, chosen)
            manifest = _manifest_if_equal(content, expected, target, written)
            replace_checkpoint(draft, content, manifest, target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}; check the folder and its disk") from None
    return manifest_path(target)


def verify_saved(state: Mapping[str, Any], path: str | Path) -> Path:
    """Prove that a checkpoint which something else has just saved holds a state, and write its manifest.

    Args:
        state: What was saved. A tensor that the file lacks must be equal to one that it has, as a tied weight is.
        path: The checkpoint, a file or a folder; the manifest covers every file of it.

    Returns:
        The manifest, ``PATH.manifest.json``.

    Raises:
        CheckpointDamaged: the disk has something else.
    """
    target = Path(path).expanduser()
    manifest = _manifest_if_equal(target, hashes_in_memory(state), target)
    write_manifest(manifest, result := manifest_path(target))
    return result


def verified_load(path: str | Path, **load_options: Any) -> Any:
    """Load what `verified_save` saved, if every byte is as its manifest says.

    Args:
        path: The checkpoint; its manifest is next to it.
        load_options: For ``torch.load``, which is called with ``weights_only=True`` unless they say otherwise.

    Returns:
        What ``torch.load`` or safetensors returns. A folder is verified, and its path is returned, as loading it needs the state
        that it is loaded into.

    Raises:
        CheckpointDamaged: the checkpoint has changed since, or has files that its manifest does not cover.
        UsageError: there is no manifest, or the checkpoint cannot be read.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    for _ in range(MOST_ATTEMPTS):
        before = state_of_files(target)
        problems, _ = verify_with_own_manifest(target)
        if problems:
            raise CheckpointDamaged(
                f"{target} is not as it was saved: {'; '.join(problems[:3])}; use an older checkpoint"
            )
        if target.is_dir():
            return target
        result = _load(target, load_options)
        if before == state_of_files(target):  # else something has replaced it since it was verified
            return result
    raise UsageError(f"{target} is replaced again and again while it is loaded; load it when nothing saves")


def _load(file: Path, load_options: Mapping[str, Any]) -> Any:
    with Checkpoint(file) as checkpoint:
        format_name = checkpoint.format
    if format_name == "safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    import torch

    return torch.load(file, **{"weights_only": True, **load_options})


def _for_safetensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state with the values of conjugate and negative views, which safetensors would ignore. Raises ``UsageError``."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"{key!r} of the state is no tensor; safetensors holds tensors by name alone, use torch.save"
            )
    return {key: value.resolve_conj().resolve_neg() for key, value in state.items()}


class _HashingFile:
    """A file to write that hashes what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.running = file, RunningFileHash(fast_only=True)

    def write(self, content: Any) -> int:
        self.running.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def _write(state: Mapping[str, Any], draft: Path, format_name: str) -> FileHash | None:
    """Write a state; the hash of the file's bytes as they were made, where the format's writer shows them. Raises ``OSError``."""
    if format_name == "torch.save":
        import torch

        with open(draft, "xb") as file:
            hashing = _HashingFile(file)
            torch.save(state, cast(Any, hashing))
        return hashing.running.result()
    if format_name == "safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(dict(state), draft)
        except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
            raise UsageError(f"safetensors cannot save this state: {first_line(error)}") from None
        return None
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        save(dict(state), checkpoint_id=str(draft), no_dist=True)
    return None


def _forget_cached_pages(draft: Path) -> None:
    """Have the draft written to the disk, and read from there next time."""
    for file in [draft] if draft.is_file() else [p for p in draft.rglob("*") if p.is_file() or p.is_dir()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if file.is_file():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _manifest_if_equal(
    path: Path, expected: Mapping[str, TensorHash], target: Path, written: FileHash | None = None
) -> Manifest:
    """The manifest of a checkpoint, read from the disk, if it holds what was written and what was in memory.

    Raises `CheckpointDamaged` where it does not, and ``UsageError`` where that cannot be found out.
    """
    _forget_cached_pages(path)
    with CheckpointFiles(path) as files:
        hashes = hash_files(files)
    if written is not None and replace(hashes[""], sha256="") != written:
        raise CheckpointDamaged(f"the disk does not have {target} as it was written; check the disk")
    with Checkpoint(path) as checkpoint:
        manifest = make_manifest(checkpoint, hashes)
        unread = {name for name, tensor in checkpoint.tensors.items() if not tensor.is_readable}
    stored = manifest.tensors
    for name, wanted in expected.items():
        if name in unread:
            raise UsageError(
                f"{name} of the state cannot be compared with what {target} holds; save it in another form"
            )
        if stored.get(name) != wanted and (name in stored or wanted not in stored.values()):
            raise CheckpointDamaged(f"the disk does not have {name} of {target} as it was in memory; check the disk")
    return replace(manifest, checkpoint=target.name)
