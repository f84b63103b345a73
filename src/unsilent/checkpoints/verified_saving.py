"""Saving a training's state so that what is on the disk is what was in memory, and loading only what still is.

``verified_save`` hashes the tensors in memory, writes a draft, makes the system write it to the disk and forget its cached pages,
reads the draft back, compares every tensor, and only then puts it and its manifest in place. ``verified_load`` compares with the
manifest before anything is loaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.manifest import (
    Manifest,
    TensorHash,
    hash_content,
    make_manifest,
    manifest_path,
    read_manifest,
    verify,
    write_manifest,
)
from unsilent.checkpoints.names import optimizer_names, unique_names
from unsilent.errors import UnsilentError, UsageError
from unsilent.nested import leaves_in
from unsilent.sites.memory import content_of, dtype_name

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

    Args:
        state: What ``torch.save`` would save; for safetensors, tensors by name.
        path: Where to. An older checkpoint there is replaced at the end, at once.
        format_name: ``torch.save``, ``safetensors`` or ``dcp`` (a folder, this process alone); by default from the path's ending.

    Returns:
        The manifest, ``PATH.manifest.json``.

    Raises:
        CheckpointDamaged: the disk has something else; the older checkpoint is still there.
        UsageError: the format is not known, or the file cannot be written.
    """
    target = Path(path).expanduser()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part{target.suffix}")
    chosen = format_name or ENDINGS.get(target.suffix, "" if target.suffix else "dcp")
    if chosen not in (*ENDINGS.values(), "dcp"):
        raise UsageError(
            f"the format of {target.name!r} is not known; give format_name='torch.save', 'safetensors' or 'dcp'"
        )
    if not target.parent.is_dir():
        raise UsageError(f"no folder {target.parent} to write {target.name} into; make it first")
    if chosen == "safetensors" and (nested := [key for key, value in state.items() if not isinstance(value, Tensor)]):
        raise UsageError(
            f"{nested[0]!r} of the state is no tensor; safetensors holds tensors by name alone, use torch.save"
        )
    expected = hashes_in_memory(state)
    try:
        _write(state, draft, chosen)
        manifest = _manifest_if_equal(draft, expected, target)
        _move(draft, target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}; check the folder and its disk") from None
    finally:
        _remove(draft)
    result = manifest_path(target)
    write_manifest(manifest, result)
    return result


def verify_saved(state: Mapping[str, Any], path: str | Path) -> Path:
    """Prove that a checkpoint which something else has just saved holds a state, and write its manifest.

    Args:
        state: What was saved. A tensor that the file lacks must be equal to one that it has, as a tied weight is.
        path: The checkpoint.

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
    """Load what `verified_save` saved, if the manifest says that it is unchanged.

    Args:
        path: The checkpoint; its manifest is next to it.
        load_options: For ``torch.load``, which is called with ``weights_only=True`` unless they say otherwise.

    Returns:
        What ``torch.load`` or safetensors returns. A folder of DCP is verified, and its path is returned, as loading it needs
        the state that it is loaded into.

    Raises:
        CheckpointDamaged: a tensor has changed since; the message names it.
        UsageError: there is no manifest, or the checkpoint cannot be read.
    """
    import torch

    target = Path(path).expanduser()
    with Checkpoint(target) as checkpoint:
        problems = verify(checkpoint, read_manifest(manifest_path(target)))
        format_name = checkpoint.format
    if problems:
        raise CheckpointDamaged(f"{target} is not as it was saved: {'; '.join(problems[:3])}; use an older checkpoint")
    if target.is_dir():
        return target
    if format_name == "safetensors":
        from safetensors.torch import load_file

        return load_file(target)
    return torch.load(target, **{"weights_only": True, **load_options})


def hashes_in_memory(state: Mapping[str, Any]) -> dict[str, TensorHash]:
    """The hashes of every tensor by the name that a checkpoint file has for it."""
    found = [(path, value) for path, value in leaves_in(state) if isinstance(value, (Tensor, int, float))]
    names = unique_names([path for path, _ in found], [not isinstance(value, Tensor) for _, value in found])
    tensors = {name: value for name, (_, value) in zip(names, found, strict=True) if isinstance(value, Tensor)}
    renamed = optimizer_names(names, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return {
        renamed.get(name, name): hash_content([content_of(tensor)], dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def _write(state: Mapping[str, Any], draft: Path, format_name: str) -> None:
    if format_name == "torch.save":
        import torch

        torch.save(state, draft)
    elif format_name == "safetensors":
        from safetensors.torch import save_file

        save_file(dict(state), draft)
    else:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(dict(state), checkpoint_id=str(draft), no_dist=True)


def _forget_cached_pages(draft: Path) -> None:
    """Have the draft written to the disk, and read from there next time."""
    for file in [draft] if draft.is_file() else [p for p in draft.rglob("*") if p.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _manifest_if_equal(file: Path, expected: Mapping[str, TensorHash], target: Path) -> Manifest:
    """The manifest of a file, read from the disk, if it holds the tensors that were in memory. Raises `CheckpointDamaged`."""
    _forget_cached_pages(file)
    with Checkpoint(file) as checkpoint:
        manifest = make_manifest(checkpoint)
    stored = manifest.tensors
    for name, wanted in expected.items():
        if stored.get(name) != wanted and (name in stored or wanted not in stored.values()):
            raise CheckpointDamaged(f"the disk does not have {name} of {target} as it was in memory; check the disk")
    return replace(manifest, checkpoint=target.name)


def _move(draft: Path, target: Path) -> None:
    if target.is_dir():
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        os.rename(target, old)
        os.rename(draft, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(draft, target)


def _remove(draft: Path) -> None:
    with contextlib.suppress(OSError):
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)
