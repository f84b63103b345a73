"""Child processes that talk to us over a socket they inherit: started, ended with all that they started, and never left alone."""

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
"""Set in the environment of worker processes: a campaign must not start campaigns."""
EXIT_TIMEOUT = 0.3
"""Seconds that a process has to end by itself once its connection is closed."""


def start_child(
    module: str, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """``python -m MODULE FD OUR-PID``, and our end of the socket. ``environment``: its variables, ours where None."""
    parent_end, child_end = socket.socketpair()
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(child_end.fileno()), str(os.getpid())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a group of its own: Ctrl-C is for the driver, a kill reaches its children too
        )
    return process, Connection(parent_end.detach())


def receive(process: subprocess.Popen[bytes], connection: Connection) -> Any:
    """The next message of a child, however long that takes; raises ``EOFError`` or ``OSError`` where it is gone.

    Its children may hold the socket open after it died, so the process itself is looked at as well.
    """
    while not connection.poll(0.2):
        if process.poll() is not None and not connection.poll():
            raise EOFError
    return connection.recv()


def end_child(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Let it end, which it does where it waits for us, else kill it; and its children, those of one that is over as well."""
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_TIMEOUT)
    kill_with_children(process)
    process.wait()


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """Kill a process that has a group of its own, and all that it started; those of one that is over as well."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all are gone
        os.killpg(process.pid, signal.SIGKILL)


def exit_with_parent(parent: int) -> None:
    """End this process when its parent is gone, whatever it is doing: by the kernel on Linux, else soon after."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
