"""Saves in a child process that is killed before its n-th call that changes files, for every n."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

CALLS = ("open", "write", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "fsync", "close")
"""Calls of ``os`` that change files or end one; Python's own ``open`` goes through an audit event instead."""


def kill_before_call(number):
    """Have this process killed before the n-th call that changes files; 0 for the first."""
    left = number

    def count():
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def counted(function):
        def call(*arguments, **options):
            count()
            return function(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))

    import unsilent.checkpoints.writing as writing

    class Writer(writing.HashingFile):
        def write(self, content):
            count()
            return super().write(content)

    writing.HashingFile = Writer


def run_killed(number, work):
    """Whether ``work`` ended before its n-th call; it runs in a child process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kill_before_call(number)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


SYSTEM_CALLS = (
    "open", "openat", "creat", "write", "pwrite64", "writev", "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir",
    "mkdirat", "rmdir", "fsync", "fdatasync", "ftruncate", "close", "flock", "sendfile", "copy_file_range",
)  # fmt: skip


def run_killed_by_system_call(name, number, work):
    """Whether ``work`` ended before its n-th system call of a name, counted from 1, by strace's injection of a signal.

    strace counts the calls of each name and thread on their own.
    """
    begin, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(begin, 1)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(child), "-o", os.devnull, "-e", f"inject=?{name}:signal=KILL:when={number}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    if "attached" not in (said := tracer.stderr.readline()):
        os.kill(child, signal.SIGKILL)
        pytest.skip(f"strace cannot attach: {said}")
    os.write(go, b"x")
    _, status = os.waitpid(child, 0)
    tracer.communicate()
    os.close(begin)
    os.close(go)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def leftovers(folder: Path):
    """Names in a folder that are neither checkpoints nor manifests."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
