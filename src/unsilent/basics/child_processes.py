"""Child processes that communicate over an inherited socket and never outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

INSIDE = "UNSILENT_INSIDE_WORKER"
"""Environment variable that is set in worker processes, because a campaign must not start campaigns."""
EXIT_TIMEOUT = 0.3
"""Seconds in which a process must end after its connection was closed."""


def start_child(
    module: str, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start ``python -m MODULE FD PARENT-PID`` and return it with the parent's end of the socket.

    ``environment``: the child's environment variables, by default those of this process.
    """
    parent_end, child_end = socket.socketpair()
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(child_end.fileno()), str(os.getpid())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # own process group: Ctrl-C reaches only the driver, a kill also the child's children
        )
    return process, Connection(parent_end.detach())


def receive(process: subprocess.Popen[bytes], connection: Connection) -> Any:
    """Wait for the next message of a child; raises ``EOFError`` or ``OSError`` if the child is gone.

    The child's own children may keep the socket open after its death, so the process itself is checked as well.
    """
    while not connection.poll(0.2):
        if process.poll() is not None and not connection.poll():
            raise EOFError
    return connection.recv()


def end_child(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Let a child exit, or kill it after a timeout, and kill all processes that it started."""
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_TIMEOUT)
    kill_with_children(process)
    process.wait()


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads its own process group, and all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)


def exit_with_parent(parent: int) -> None:
    """End this process when its parent exits: immediately on Linux, else soon after."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
