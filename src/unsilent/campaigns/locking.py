"""An advisory lock file ``FILE.lock``, which admits one writer and which the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from unsilent.basics.errors import StoreError


class FileLock:
    """A lock that is held from construction until ``release``.

    Raises ``StoreError`` if another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._fd = self._acquire(path)

    def _acquire(self, path: Path) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            except OSError as error:
                raise StoreError(
                    f"cannot write {path} ({error.strerror}); check that its folder exists and is writable"
                ) from None
            if not self._is_lock(fd):
                os.close(fd)
                raise StoreError(f"{self._path} is not a lock file of unsilent; move it away or give another --store")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise StoreError(
                    f"store {path} is in use by process {holder}; wait for it to end or give another --store"
                ) from None
            if self._is_current(fd):
                try:
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, str(os.getpid()).encode(), 0)
                except OSError:
                    pass  # a full disk: the lock is still held, only its holder's name is missing
                return fd
            os.close(fd)  # its last holder removed the file between our open and our lock

    def _is_lock(self, fd: int) -> bool:
        """Whether an open file is a lock file: a regular file with at most a process number in it."""
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        head = os.pread(fd, 32, 0)
        return not head or head.isdigit()

    def _is_current(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == os.stat(self._path).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the lock file and then give up the lock."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
