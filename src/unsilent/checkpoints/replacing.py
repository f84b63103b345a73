"""Replacement of a checkpoint and its manifest, so that both fit each other even after a kill at any moment.

Two names cannot be replaced at once, so the new manifest is first put next to the old one, as the *pending* manifest:

    draft/content, draft/manifest   written and flushed to the disk
    draft/manifest -> pending       the old checkpoint matches its manifest
    [folder -> old folder]          for folders only; if no new folder follows, the old one is put back
    draft/content  -> checkpoint    the new checkpoint matches the pending manifest
    pending        -> manifest      the new checkpoint matches its manifest

A reader accepts the manifest or the pending one. The next replacement first completes or undoes an interrupted one. The folder is
locked meanwhile (``flock``), so threads and processes replace one after the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from unsilent.basics.errors import UsageError, system_errors
from unsilent.basics.plainfiles import shown_path
from unsilent.checkpoints.editing import sync_folder
from unsilent.checkpoints.hashes import Progress, no_progress
from unsilent.checkpoints.manifest import (
    Manifest,
    manifest_content,
    manifest_path,
    read_manifest,
    verify,
    write_manifest,
)

_DRAFT = ".unsilent-draft"


@contextlib.contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """Context with a temporary folder next to a checkpoint for writing its next version.

    The folder is removed at the end; after a kill, the next draft removes it.

    Raises ``OSError``.
    """
    with _locked_folder(target.parent):
        _remove_dead_drafts(target.parent)
        draft = Path(tempfile.mkdtemp(_DRAFT, f"{_draft_prefix()}{target.name[:40]}.", target.parent))
        descriptor = os.open(draft, os.O_RDONLY)
        _lock(descriptor, fcntl.LOCK_EX)  # until the end, so that the draft does not look like one of a killed process
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(descriptor)


def replace_checkpoint(draft: Path, content: Path, manifest: Manifest, target: Path) -> None:
    """Move a finished draft and its manifest to the checkpoint's path.

    Raises ``OSError``.
    """
    new = draft / "manifest"
    with open(new, "xb") as file:
        file.write(manifest_content(manifest))
        file.flush()
        os.fsync(file.fileno())
    with _locked_folder(target.parent):
        _settle(target)
        _rename(new, _pending(target))
        if target.is_file():
            shutil.copymode(target, content)
        if content.is_dir() and target.is_dir():
            _rename(target, _old(target))
        _rename(content, target)
        _rename(_pending(target), manifest_path(target))
        _remove_old(target)


def put_manifest(manifest: Manifest, target: Path) -> Path:
    """Write a checkpoint's manifest next to it, replacing any other; returns its path.

    Raises ``UsageError`` if it cannot be written.
    """
    target = Path(os.path.realpath(target))
    result = manifest_path(target)
    with system_errors(f"cannot write {result}", "check the folder"), _locked_folder(target.parent):
        write_manifest(manifest, result)
        # The pending manifest of a killed save describes an older checkpoint.
        _pending(target).unlink(missing_ok=True)
    return result


def verify_with_own_manifest(
    path: Path, progress: Progress = no_progress, fast_only: bool = False
) -> tuple[list[str], Manifest]:
    """Differences between a checkpoint and the manifest next to it, see `verify`, and that manifest.

    Raises ``UsageError`` if there is no manifest.
    """
    target = Path(os.path.realpath(path))
    before = state_of_files(target)
    verdict: tuple[list[str], Manifest] | UsageError
    try:
        verdict = _verify_with_either(target, progress, fast_only)
    except UsageError as error:
        verdict = error
    if isinstance(verdict, UsageError) or verdict[0]:
        was_replaced = before != state_of_files(target) or before[0] is None
        if was_replaced and target.parent.is_dir():  # a save is running, or was killed
            with _locked_folder(target.parent):
                if not target.exists():
                    _settle(target)
                return _verify_with_either(target, progress, fast_only)
        if isinstance(verdict, UsageError):
            raise verdict
    return verdict


def _verify_with_either(target: Path, progress: Progress, fast_only: bool) -> tuple[list[str], Manifest]:
    """The result of `verify` with the one of the two manifests that matches, or else with the first.

    Raises ``UsageError`` if no manifest can be read.
    """
    verdicts = []
    unusable: list[UsageError] = []
    for file in (manifest_path(target), _pending(target)):
        if file.exists():
            try:
                manifest = read_manifest(file)
            except UsageError as error:
                unusable.append(error)
                continue
            verdicts.append((verify(target, manifest, progress, fast_only), manifest))
            if not verdicts[-1][0]:
                return verdicts[-1]
    if not verdicts:
        raise unusable[0] if unusable else UsageError(_no_manifest(target))
    return verdicts[0]


def state_of_files(target: Path) -> tuple[tuple[int, int] | None, ...]:
    """Inode and modification time of a checkpoint and its manifests; None for a missing file.

    A replacement changes them.
    """
    result: list[tuple[int, int] | None] = []
    for file in (target, manifest_path(target), _pending(target)):
        try:
            status = os.stat(file)
            result.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            result.append(None)
    return tuple(result)


def _no_manifest(target: Path) -> str:
    """The reason why a checkpoint cannot be verified, with advice."""
    expected, target = shown_path(manifest_path(target)), shown_path(target)
    if not target.exists():
        return f"there is no checkpoint {target}; check the path"
    problem = f"no manifest {expected} that says what {target} should be"
    inner = sorted(target.glob("*.manifest.json"))[:1] if target.is_dir() else []
    if inner:
        return f"{problem}; single files have one: unsilent checkpoint verify {str(inner[0]).removesuffix('.manifest.json')}"
    if manifest_path(target.parent).exists():
        return f"{problem}; its folder has one: unsilent checkpoint verify {target.parent}"
    return (
        f"{problem}; give one with --manifest, or make one of a checkpoint that you trust: unsilent checkpoint manifest"
    )


def _pending(target: Path) -> Path:
    return target.with_name(f".{target.name}.manifest.json.pending")


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _settle(target: Path) -> None:
    """Complete or revert a replacement that was interrupted; the folder must be locked."""
    if not target.exists() and _old(target).is_dir():
        _rename(_old(target), target)
    if _pending(target).exists():
        try:
            fits = not verify(target, read_manifest(_pending(target)))
        except UsageError:
            fits = False
        if fits:
            _rename(_pending(target), manifest_path(target))
        else:
            _pending(target).unlink()
    _remove_old(target)


def _remove_old(target: Path) -> None:
    """Remove the replaced folder, after a rename that prevents an incomplete folder from being restored."""
    if _old(target).is_dir() and target.exists():
        draft = Path(tempfile.mkdtemp(_DRAFT, f"{_draft_prefix()}old.", target.parent))
        os.rename(_old(target), draft / "old")
        shutil.rmtree(draft, ignore_errors=True)


def _draft_prefix() -> str:
    """The prefix of draft names, which contains the host's name because locks of other hosts may not be visible."""
    return f".{platform.node()[:20]}."


def _remove_dead_drafts(folder: Path) -> None:
    """Remove the drafts of killed processes of this host, whose locks are free."""
    for draft in folder.glob(f"{_draft_prefix()}*{_DRAFT}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft, ignore_errors=True)
            finally:
                os.close(descriptor)


def _rename(old: Path, new: Path) -> None:
    """Rename a file or folder, and return when the change is on disk."""
    os.rename(old, new)
    sync_folder(new.parent)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Context in which no other thread or process replaces a checkpoint in the folder.

    Raises ``OSError``.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: each step is atomic, but processes may interleave
        fcntl.flock(descriptor, how)
