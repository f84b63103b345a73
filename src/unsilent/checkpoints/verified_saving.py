"""Saving a state with proof that the disk holds what was in memory, and loading it only if it is unchanged.

``verified_save`` hashes the tensors in memory, writes a draft, makes the system flush it to the disk and drop its cached pages,
and reads the draft back. It compares the bytes with the written ones and the tensors with those in memory, and only then puts the
draft and its manifest in place. ``verified_load`` compares every byte with the manifest before it loads anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import Tensor

from unsilent.basics.errors import UnsilentError, UsageError, first_line, system_errors, wrong_value_error
from unsilent.basics.options import check_count, check_path
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.hashes import FileHash, TensorHash, hash_files
from unsilent.checkpoints.manifest import Manifest, make_manifest, manifest_path, shown_name
from unsilent.checkpoints.memory_hashes import hashes_in_memory, with_own_values
from unsilent.checkpoints.recent_loads import note_load, note_save
from unsilent.checkpoints.replacing import (
    draft_folder,
    put_manifest,
    replace_checkpoint,
    state_of_files,
    verify_with_own_manifest,
)
from unsilent.checkpoints.writing import forget_cached_pages, write_state

_DCP_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
"""Names of the files in a folder that ``verified_save`` writes and may replace."""
ENDINGS = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "torch.save")}


MOST_ATTEMPTS = 20
"""Largest number of attempts to load a checkpoint that is replaced meanwhile."""


class CheckpointDamaged(UnsilentError):
    """Raised if the content of a checkpoint is not what was saved."""


def verified_save(
    state: Mapping[str, Any], path: str | Path, *, format_name: str | None = None, step: int | None = None
) -> Path:
    """Save a state and verify that the disk holds it.

    After a kill or on a full disk, the older checkpoint or the new one can be loaded with `verified_load`. Threads and processes
    that save to the same path take turns; the last checkpoint remains.

    Args:
        state: Objects for ``torch.save``; for safetensors, tensors by name. Tensors spread over ranks are refused.
        path: Path of the file. An older file is replaced atomically at the end; if the path is a link, its target is replaced.
        format_name: ``torch.save``, ``safetensors`` or ``dcp`` (a folder, this process alone); by default from the path's ending.
        step: Number of steps of the training after which it is saved; the manifest records it for `last_good_checkpoint`.

    Returns:
        The manifest, ``PATH.manifest.json``.

    Raises:
        CheckpointDamaged: the disk has other content; the older checkpoint is still there.
        UsageError: the format is not known, the state has a tensor that cannot be compared, or the file cannot be written.
    """
    target, step = _target(path), _checked(step)
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
    if target.is_dir() and (others := [file.name for file in target.iterdir() if not _DCP_FILE.fullmatch(file.name)]):
        raise UsageError(
            f"{target} holds {shown_name(min(others))}, which is no part of a distributed checkpoint and would be lost; "
            "give another path"
        )
    if chosen != "torch.save" and not isinstance(state, Mapping):
        raise wrong_value_error(
            "state", state, f"a mapping, as {chosen} holds tensors by name; use torch.save for others"
        )
    if chosen == "safetensors" and (others := [key for key, value in state.items() if not isinstance(value, Tensor)]):
        raise UsageError(
            f"{others[0]!r} of the state is no tensor; safetensors holds tensors by name alone, use torch.save"
        )
    state = with_own_values(state)
    expected = hashes_in_memory(state)
    with system_errors(f"cannot write {target}", "check the folder and its disk"), draft_folder(target) as draft:
        content = draft / ("content" + target.suffix)
        written = write_state(state, content, chosen)
        manifest = replace(_manifest_if_equal(content, expected, target, written), step=step)
        replace_checkpoint(draft, content, manifest, target)
    note_save(target, manifest_path(target), manifest)
    return manifest_path(target)


def verify_saved(state: Mapping[str, Any], path: str | Path, *, step: int | None = None) -> Path:
    """Verify that a checkpoint saved by other code holds a state, and write its manifest.

    Args:
        state: The saved state. A tensor that is missing in the file must be equal to one in the file, for example a tied weight.
        path: File or folder of the checkpoint; the manifest covers every file of it.
        step: Number of steps of the training after which it was saved.

    Returns:
        The manifest, ``PATH.manifest.json``.

    Raises:
        CheckpointDamaged: the disk has other content.
    """
    target, step = _target(path), _checked(step)
    manifest = replace(_manifest_if_equal(target, hashes_in_memory(with_own_values(state)), target), step=step)
    result = put_manifest(manifest, target)
    note_save(target, result, manifest)
    return result


def verified_load(path: str | Path, **load_options: Any) -> Any:
    """Load a checkpoint saved by `verified_save`, if every byte matches its manifest.

    Args:
        path: Path of the checkpoint, with its manifest next to it.
        load_options: Options for ``torch.load``; ``weights_only=True`` is the default.

    Returns:
        The result of ``torch.load`` or safetensors. A folder is verified and its path is returned, because loading it needs the
        target state.

    Raises:
        CheckpointDamaged: the checkpoint has changed since, or has files that its manifest does not cover.
        UsageError: there is no manifest, or the checkpoint cannot be read.
    """
    target = _target(path)
    for _ in range(MOST_ATTEMPTS):
        before = state_of_files(target)
        problems, _ = verify_with_own_manifest(target)
        if problems:
            raise CheckpointDamaged(
                f"{target} is not as it was saved: {'; '.join(problems[:3])}; use an older checkpoint"
            )
        try:
            result = target if target.is_dir() else _load(target, load_options)
        except Exception:
            if before == state_of_files(target) and before[0] is not None:
                raise
            continue  # it was replaced after its verification
        if before == state_of_files(target):
            note_load()
            return result
    raise UsageError(f"{target} is replaced again and again while it is loaded; load it when nothing saves")


def _load(file: Path, load_options: Mapping[str, Any]) -> Any:
    with Checkpoint(file) as checkpoint:
        format_name = checkpoint.format
    if format_name == "safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    import torch

    try:
        return torch.load(file, **{"weights_only": True, **load_options})
    except UnpicklingError as error:
        raise UsageError(
            f"{file} is as it was saved, but torch.load refuses it: {first_line(error)[:200]}; "
            "give weights_only=False if you trust it"
        ) from None


def _checked(step: int | None) -> int | None:
    return None if step is None else check_count("step", step, 0)


def _target(path: str | Path) -> Path:
    """The path of a checkpoint with links resolved.

    Raises ``UsageError`` if the path cannot be that of a checkpoint.
    """
    try:
        result = Path(os.path.realpath(check_path("path", path).expanduser()))
    except (OSError, ValueError, RuntimeError) as error:  # a null byte; no home folder
        raise UsageError(f"{str(path)!r} is no path of a checkpoint: {first_line(error)}; check it") from None
    if not str(path) or not result.name:
        raise UsageError(f"{str(path)!r} is no path of a checkpoint; give the name of a file or folder")
    return result


def _manifest_if_equal(
    path: Path, expected: Mapping[str, TensorHash], target: Path, written: FileHash | None = None
) -> Manifest:
    """The manifest of a checkpoint, if a new read from disk matches what was written and what was in memory.

    Raises `CheckpointDamaged` if it does not match, and ``UsageError`` if this cannot be determined.
    """
    forget_cached_pages(path)
    with CheckpointFiles(path) as files:
        hashes = hash_files(files)
    if written is not None and replace(hashes[""], sha256="") != written:
        raise CheckpointDamaged(f"the disk does not have {target} as it was written; check the disk")
    with Checkpoint(path) as checkpoint:
        manifest = make_manifest(checkpoint, hashes)
        unread = {name: tensor.obstacle for name, tensor in checkpoint.tensors.items() if not tensor.is_readable}
    stored = manifest.tensors
    for name, wanted in expected.items():
        if name in unread:
            raise UsageError(
                f"{name} of the state cannot be compared with what {target} holds: {unread[name]}; save it in another form"
            )
        if stored.get(name) != wanted and (name in stored or wanted not in stored.values()):
            raise CheckpointDamaged(f"the disk does not have {name} of {target} as it was in memory; check the disk")
    return replace(manifest, checkpoint=target.name)
