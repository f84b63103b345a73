"""Safe reading of the files of a checkpoint, which is a single file or a folder."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from unsilent.basics.closing import Closing
from unsilent.basics.errors import UsageError, system_errors
from unsilent.basics.plainfiles import open_plain
from unsilent.basics.printable import escape_unprintable

MOST_OPEN = 64
MOST_FILES = 1_000_000
"""Largest number of files in a folder."""
MOST_METADATA = 64 * 2**20
"""Largest size in bytes of a file that describes tensors: torch's ``data.pkl`` of 100,000 tensors has 11 MiB."""


MOST_DEPTH = 32
"""Largest depth of nested folders; Orbax, with a folder for each value, has three levels."""


class CheckpointFiles(Closing):
    """Reads the files of a checkpoint by their names within it.

    Args:
        root: A file, which has the name ``""``, or a folder.
    """

    def __init__(self, root: str | Path) -> None:
        self._descriptors: dict[str, int] = {}
        self._used: set[str] = set()
        try:
            self.root = Path(root).expanduser()
            self.is_folder = self.root.is_dir()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a user without a home folder
            raise UsageError(
                f"cannot read {root}: {getattr(error, 'strerror', None) or error}; check the path"
            ) from None

    def names(self) -> list[str]:
        """Names of the regular files directly in the folder; ``[""]`` if the checkpoint is a single file."""
        if not self.is_folder:
            return [""]
        with system_errors(f"cannot read {self.root}", "check the path"), os.scandir(self.root) as entries:
            return sorted(e.name for e in entries if e.is_file(follow_symlinks=False))

    def exists(self) -> bool:
        """Whether the checkpoint's file or folder exists."""
        return self.is_folder or self.root.is_file()

    def all_names(self) -> list[str]:
        """Names of all regular files in the folder and its subfolders; ``[""]`` if the checkpoint is a single file."""
        if not self.is_folder:
            return [""]
        return sorted(name for name, kind in self._entries() if kind == "")

    def others(self) -> list[tuple[str, str]]:
        """Name and description of each entry that is neither a regular file nor a folder."""
        return sorted(entry for entry in self._entries() if entry[1]) if self.is_folder else []

    def _entries(self) -> list[tuple[str, str]]:
        """Name and type of every entry in the folder and its subfolders, as `_tree` yields them.

        Raises ``UsageError`` if there are more than `MOST_FILES`.
        """
        entries = list(itertools.islice(self._tree(), MOST_FILES + 1))
        if len(entries) > MOST_FILES:
            raise UsageError(
                f"{self.root} has more than {MOST_FILES:,} files; no checkpoint has, give one of its folders"
            )
        return entries

    def _tree(self, inner: str = "") -> Iterator[tuple[str, str]]:
        """Yield name and type of every entry in the folder and its subfolders, except folders.

        The type is empty for a regular file.
        """
        if inner.count("/") > MOST_DEPTH:
            raise UsageError(
                f"{self.root} has folders more than {MOST_DEPTH} deep; no checkpoint has, give one of them"
            )
        problem = f"cannot read {self.shown(inner)}"
        with system_errors(problem, "check the path"), os.scandir(self.root / inner) as entries:
            for entry in entries:
                name = f"{inner}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    yield from self._tree(f"{name}/")
                elif entry.is_symlink():
                    yield name, "a symbolic link"
                else:
                    yield name, "" if entry.is_file() else "not a regular file"

    def unused(self) -> list[str]:
        """Names of the files and links, also in subfolders, that have not been read."""
        return sorted(name for name, _ in self._entries() if name not in self._used) if self.is_folder else []

    def path(self, name: str) -> Path:
        """The path of a file.

        Raises ``UsageError`` if the name leads out of the folder.
        """
        if not name:
            return self.root
        parts = PurePosixPath(name).parts
        if not self.is_folder or name.startswith("/") or "\0" in name or any(part in ("..", "/") for part in parts):
            raise UsageError(
                f"{self.root} names the file {ascii(name)[:80]}, which is not inside it; the checkpoint is damaged"
            )
        path = self.root.joinpath(*parts)
        # islink is false, not an error, for a name that no file can have
        inside = (p for p in (path, *path.parents) if p.is_relative_to(self.root) and p != self.root)
        if any(map(os.path.islink, inside)):
            raise UsageError(
                f"{self.shown(name)} is a symbolic link; copy the checkpoint with its files and give the copy"
            )
        return path

    def shown(self, name: str) -> str:
        """The name of a file with unprintable characters escaped, for error messages."""
        return f"{self.root}/{escape_unprintable(name[:80])}" if name else str(self.root)

    def descriptor(self, name: str) -> int:
        """An open file descriptor for reading the named file."""
        self._used.add(name)
        if name not in self._descriptors:
            if len(self._descriptors) >= MOST_OPEN:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            with open_plain(self.path(name), self.shown(name)) as file:
                self._descriptors[name] = os.dup(file.fileno())
        return self._descriptors[name]

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        return os.fstat(self.descriptor(name)).st_size

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a regular file with this name."""
        return os.path.isfile(self.path(name))

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes of a file from ``offset`` on.

        Raises ``UsageError`` if the file ends before.
        """
        if offset < 0 or length < 0 or offset + length > self.size(name):
            raise UsageError(
                f"{self.shown(name)} ends at byte {self.size(name):,}, but bytes {offset:,} to {offset + length:,} are needed; "
                "the file is truncated or damaged"
            )
        parts, missing = [], length
        try:
            while missing:
                part = os.pread(self.descriptor(name), missing, offset + length - missing)
                if not part:
                    raise UsageError(
                        f"{self.shown(name)} became shorter while it was read; wait until nothing writes to it"
                    )
                parts.append(part)
                missing -= len(part)
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            raise UsageError(f"cannot read {self.shown(name)}: {reason}; check the disk") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_all(self, name: str, what: str) -> bytes:
        """The whole content of a file that describes other files, such as an index.

        ``what`` names the file's purpose in messages.
        """
        if self.size(name) > MOST_METADATA:
            raise UsageError(f"{self.shown(name)} is larger than {MOST_METADATA >> 20} MiB, the size limit for {what}")
        return self.read(name, 0, self.size(name))

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
