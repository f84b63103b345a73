"""Editing checkpoint files in place, so that every edit can be undone even after a crash or on a full disk.

Before the first byte of a checkpoint changes, the old and new bytes are written to its *undo record*, ``NAME.undo.jsonl`` next to
it, and flushed to the disk (fsync). The record has a line for every edit and a line for every change of its state:

    {"edit": 1, "patches": [["", 1024, "0000803f", "0000803e"]], "injection": [...], ...}   no byte is changed yet
    {"edit": 1, "state": "written"}                                                          all bytes are changed
    {"edit": 1, "state": "undone"}                                                           all bytes are restored

An edit without a state was interrupted: some of its bytes may be changed. Undoing writes the old bytes only if every byte is an
old or a new one, and reads them back. A record whose edits are all undone is removed.

A record may come with the checkpoint from somebody else. Therefore it can change only bytes of tensors and their checksums, as
the reader lists them, and no file that has a second name (a hard link).
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.basics.errors import InjectionError, UsageError, first_line, system_errors
from unsilent.basics.plainfiles import MOST_JSON_MEMORY, json_memory, parse_json, read_lines, read_plain
from unsilent.basics.printable import escape_unprintable
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.checkpoint_files import CheckpointFiles
from unsilent.checkpoints.formats.known import Format
from unsilent.checkpoints.stored_tensors import Patch

VERSION = 1
MOST_RECORD = 2**28
"""Largest size of an undo record in bytes: an edit takes about 90 for each element, and a packed block four times its size."""
_STATES_MEMORY = 2000
"""Memory for the two lines with the states of an edit; see `unsilent.basics.plainfiles.json_memory`."""


@dataclass(frozen=True)
class Edit:
    """One edit of a checkpoint, as its undo record describes it.

    Attributes:
        number: Number of the edit; the first one is 1.
        patches: The bytes that it changes.
        state: ``interrupted``, ``written`` or ``undone``.
        injection: The injection as JSON values, as described by the receipt.
    """

    number: int
    patches: tuple[Patch, ...]
    state: str
    injection: Any


def undo_record_of(path: Path) -> Path:
    """The path of a checkpoint's undo record.

    Raises ``UsageError`` if the path cannot be that of a checkpoint.
    """
    try:
        whole = Path(os.path.realpath(Path(path).expanduser()))
        return whole.with_name(f"{whole.name}.undo.jsonl")
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, the root folder; no home folder
        raise UsageError(
            f"{path} is no checkpoint: {getattr(error, 'strerror', None) or error}; check the path"
        ) from None


def apply_edit(path: Path, patches: Sequence[Patch], injection: Any) -> Path | None:
    """Change bytes of a checkpoint after writing the undo record to disk.

    Args:
        path: Path of the checkpoint.
        patches: Old and new bytes.
        injection: The injection as JSON values, which the record keeps.

    Returns:
        Path of the undo record; None if there is nothing to change.

    Raises:
        UsageError: the files are in use, cannot be written or do not have the expected bytes; nothing is changed then.
    """
    if not patches:
        return None
    record = undo_record_of(path)
    with _locked_files(path, patches) as files:
        refuse_interrupted(path)
        _check_now(files, path, patches, ("before",))
        number = len(edits_of(path)) + 1
        lines = [[patch.file, patch.offset, patch.before.hex(), patch.after.hex()] for patch in patches]
        entry = {"version": VERSION, "edit": number, "checkpoint": path.name, "patches": lines, "injection": injection}
        _check_room(record, entry)
        old_end = _append(record, entry)
        try:
            _write(files, path, [(p.file, p.offset, p.after) for p in patches])
            _append(record, {"edit": number, "state": "written"})
        except BaseException as error:
            _take_back(files, path, patches, record, old_end, error)
            if isinstance(error, OSError):
                raise UsageError(f"cannot write {path}: {error.strerror}; its bytes are as before") from None
            raise
    return record


def _check_room(record: Path, entry: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if one more edit would make the undo record too large to read."""
    old = read_plain(record, MOST_RECORD, f"the undo record {record}") if os.path.lexists(record) else b""
    line = json.dumps(entry, separators=(",", ":")).encode()
    needed = json_memory(old) + json_memory(line) + _STATES_MEMORY * entry["edit"]
    if len(old) + len(line) + _STATES_MEMORY * entry["edit"] > MOST_RECORD or needed > MOST_JSON_MEMORY:
        raise UsageError(
            f"the undo record {record} would be too large to be read again; nothing was changed; undo earlier edits, or edit "
            "fewer elements at once"
        )


def _take_back(
    files: Mapping[str, int], path: Path, patches: Sequence[Patch], record: Path, old_end: int, error: BaseException
) -> None:
    """Restore the bytes from before a failed edit and remove the edit from the record; needs no disk space.

    Raises ``UsageError`` if that fails, too; the record then still has the edit.
    """
    try:
        _write(files, path, [(p.file, p.offset, p.before) for p in patches])
        _shorten(record, old_end)
    except (OSError, InjectionError):
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UsageError(
            f"cannot write {path}: {reason}; some of its bytes may be changed, restore them with: "
            f"unsilent checkpoint undo {path}"
        ) from None


def undo_edit(path: str | Path, everything: bool = False, known_format: Format | None = None) -> list[Edit]:
    """Undo the last edit of a checkpoint that is not undone yet, or all edits.

    Args:
        known_format: The checkpoint's format, as for `Checkpoint`.

    Returns:
        The edits that were undone, the latest first.

    Raises:
        UsageError: there is no such edit, or the files were changed otherwise since then.
        InjectionError: the bytes read afterwards differ from the bytes before the edit.
    """
    path = Path(path)
    open_edits = [edit for edit in edits_of(path) if edit.state != "undone"][::-1]
    if not open_edits:
        raise UsageError(f"{path} has no edit that can be undone; {undo_record_of(path)} holds none")
    result = open_edits if everything else open_edits[:1]
    _refuse_other_bytes(path, result, known_format)
    for edit in result:
        with _locked_files(path, edit.patches) as files:
            _check_now(files, path, edit.patches, ("before", "after"))
            with system_errors(f"cannot write {path}", "run the command again"):
                _write(files, path, [(p.file, p.offset, p.before) for p in edit.patches])
            _append(undo_record_of(path), {"edit": edit.number, "state": "undone"})
    _remove_finished(path)
    return result


def _refuse_other_bytes(path: Path, edits: Sequence[Edit], known_format: Format | None) -> None:
    """Raise ``UsageError`` if an edit changes bytes outside of editable tensors and their checksums."""
    with Checkpoint(path, known_format) as checkpoint:
        ranges = checkpoint.editable_ranges()
    for patch in (patch for edit in edits for patch in edit.patches):
        known = ranges.get(patch.file, [])
        at = bisect.bisect_right(known, (patch.offset, math.inf)) - 1
        if at < 0 or patch.offset + len(patch.before) > known[at][1]:
            where = escape_unprintable(patch.file[:80]) or path
            raise UsageError(
                f"{undo_record_of(path)} would change byte {patch.offset:,} of {where}, which "
                "belongs to no tensor; it is not the record of this checkpoint, move it away"
            )


def edits_of(path: Path) -> list[Edit]:
    """The edits in the undo record of a checkpoint, oldest first; an empty list if it has no record.

    Raises ``UsageError`` if the record cannot be read.
    """
    record = undo_record_of(path)
    if not os.path.lexists(record):
        return []
    edits: dict[int, Edit] = {}
    needed = 0
    try:
        for line in read_lines(record, MOST_RECORD, MOST_RECORD, f"the undo record {record}"):
            if not line.endswith(b"\n"):
                break  # the process died while it appended this line, so the line does not count
            needed += json_memory(line)
            if needed > MOST_JSON_MEMORY:
                raise UsageError(
                    f"the undo record {record} has more edits than can be read; move it away to edit {path}"
                )
            values = parse_json(line)
            number = int(values["edit"])
            if "patches" in values:
                if values["version"] != VERSION:
                    raise ValueError("another version")
                edits[number] = Edit(number, tuple(map(_patch, values["patches"])), "interrupted", values["injection"])
            else:
                old = edits[number]
                edits[number] = Edit(number, old.patches, str(values["state"]), old.injection)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise UsageError(f"{record} is no undo record of unsilent, or damaged; move it away to edit {path}") from None
    return list(edits.values())


def refuse_interrupted(path: Path) -> None:
    """Raise ``UsageError`` if an edit of the checkpoint was interrupted and may have changed some bytes."""
    if any(edit.state == "interrupted" for edit in edits_of(path)):
        raise UsageError(
            f"an edit of {path} was interrupted, so some of its bytes may be changed; "
            f"restore them with: unsilent checkpoint undo {path}"
        )


def _patch(values: Sequence[Any]) -> Patch:
    file, offset, before, after = values
    result = Patch(str(file), int(offset), bytes.fromhex(before), bytes.fromhex(after))
    if not 0 <= result.offset < 2**62 or len(result.before) != len(result.after):
        raise ValueError("a patch is none")
    return result


@contextlib.contextmanager
def _locked_files(path: Path, patches: Sequence[Patch]) -> Iterator[Mapping[str, int]]:
    """Context with descriptors of all files of an edit, open for writing and locked against other editors.

    Raises ``UsageError`` if they cannot be locked.
    """
    opened: dict[str, int] = {}
    folders: list[int] = []
    with CheckpointFiles(path) as files:
        try:
            if files.is_folder:  # edits of different files in the folder share one undo record
                folders.append(_lock_folder(files.root))
            for name in dict.fromkeys(patch.file for patch in patches):
                where = files.shown(name)
                try:
                    opened[name] = os.open(files.path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
                    if not stat.S_ISREG(os.fstat(opened[name]).st_mode):
                        raise UsageError(f"{where} is not a regular file, so it cannot be edited; edit a copy")
                    if os.fstat(opened[name]).st_nlink > 1:
                        raise UsageError(
                            f"{where} has another name as well (a hard link), which would change; edit a copy"
                        )
                    fcntl.flock(opened[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UsageError(f"{where} is in use by another program; wait for it to end") from None
                except (OSError, ValueError) as error:  # ValueError: a name that no file can have
                    reason = getattr(error, "strerror", None) or "no file has such a name"
                    raise UsageError(f"cannot write {where}: {reason}; check its permissions") from None
            yield opened
        finally:
            for descriptor in (*opened.values(), *folders):
                os.close(descriptor)


def _lock_folder(folder: Path) -> int:
    """Lock a folder and return its descriptor.

    Raises ``UsageError`` if another editor holds the lock.
    """
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        in_use = isinstance(error, BlockingIOError)
        why = "is in use by another program; wait for it to end" if in_use else f"cannot be locked: {error.strerror}"
        raise UsageError(f"{folder} {why}") from None
    return descriptor


def _check_now(files: Mapping[str, int], path: Path, patches: Sequence[Patch], allowed: Sequence[str]) -> None:
    """Raise ``UsageError`` unless each byte in the files equals one of the allowed versions in the patches."""
    for patch in patches:
        with system_errors(f"cannot read {path}", "check the disk"):
            now = os.pread(files[patch.file], len(patch.before), patch.offset)
        choices = [getattr(patch, name) for name in allowed]
        if len(now) != len(patch.before) or any(byte not in {c[i] for c in choices} for i, byte in enumerate(now)):
            problem = "was changed by something else since it was edited; restore it from a copy"
            planned = "was changed while the edit was planned; run the command again"
            raise UsageError(f"{path} {planned if len(allowed) == 1 else problem}")


def _write(files: Mapping[str, int], path: Path, parts: Sequence[tuple[str, int, bytes]]) -> None:
    """Write bytes, wait until they are on the disk, and read them again."""
    for name, offset, content in parts:
        done = 0
        while done < len(content):
            done += os.pwrite(files[name], content[done:], offset + done)
    for descriptor in files.values():
        os.fsync(descriptor)
    for name, offset, content in parts:
        if os.pread(files[name], len(content), offset) != content:
            raise InjectionError(f"{path} does not hold what was written at byte {offset:,}; check the disk")


def _append(record: Path, entry: Mapping[str, Any]) -> int:
    """Append a line to an undo record on disk, and return the line's offset.

    Raises ``UsageError`` if it cannot be written.
    """
    line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
    with system_errors(f"cannot write the undo record {record}", "nothing was changed"):
        descriptor = os.open(record, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        # A line that a killed process did not finish is overwritten.
        content = os.fstat(descriptor).st_size
        keep = _end_of_last_line(descriptor, content)
        try:
            done = 0
            while done < len(line):
                done += os.pwrite(descriptor, line[done:], keep + done)
            os.ftruncate(descriptor, keep + len(line))
            os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                _shorten(record, keep)
            raise UsageError(f"cannot write the undo record {record}: {error.strerror}; free some space") from None
    finally:
        os.close(descriptor)
    sync_folder(record.parent)
    return keep


def _shorten(record: Path, length: int) -> None:
    """Truncate an undo record, and remove the file if it is empty then."""
    if length:
        os.truncate(record, length)
    else:
        record.unlink(missing_ok=True)
    sync_folder(record.parent)


def _end_of_last_line(descriptor: int, size: int) -> int:
    end = size
    while end:
        begin = max(0, end - 65536)
        at = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, so that a new file name survives a crash."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_finished(path: Path) -> None:
    """Remove the undo record if all of its edits are undone."""
    edits = edits_of(path)
    if edits and all(edit.state == "undone" for edit in edits):
        undo_record_of(path).unlink(missing_ok=True)
        sync_folder(undo_record_of(path).parent)
