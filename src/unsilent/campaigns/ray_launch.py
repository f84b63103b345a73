"""Starts and ends the process of the bridge to Ray (`unsilent.campaigns.ray_bridge`), without importing Ray.

No process and no file of a local Ray is left, however the bridge ends, even by an interrupt while Ray starts.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

from unsilent.basics.closing import Closing
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.campaigns.process_connection import Message, ProcessConnection
from unsilent.campaigns.ray_supervisor import SupervisorJob

KNOCK_SECONDS = 5.0
JOIN_SECONDS = 15.0
LOCAL_SECONDS = 120.0
END_SECONDS = 15.0
REMOVE_SECONDS = 5.0
LONGEST_FOLDER = 16
"""Most characters of our folder. Ray creates sockets below it, whose paths must be shorter than 108 characters."""
_PLACE = re.compile(r"(?:ray://)?(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Cluster:
    """An existing cluster, or one to start on this machine if ``address`` is None.

    ``cpus``: the number of CPUs that a new cluster has.
    """

    address: str | None
    cpus: int

    def __str__(self) -> str:
        return "the Ray cluster on this machine" if self.address is None else f"the Ray cluster at {self.address}"


def check_address(address: str | None) -> None:
    """Raise ``UsageError`` if Ray is not installed, or no cluster answers at the address."""
    if find_spec("ray") is None:
        raise UsageError("--executor ray needs an optional package; install it with: pip install 'unsilent[ray]'")
    if address is None or address == "auto":
        return
    match = _PLACE.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise UsageError(
            f"--ray is {address!r}; expected the head node's host:port (like 10.0.0.1:6379), ray://host:port or auto"
        )
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), KNOCK_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); "
            "check the address, or start a cluster on that machine: ray start --head"
        ) from None


class BridgeProcess(Closing):
    """The process of the bridge and the connection to it.

    The constructor joins the cluster.

    Raises:
        UsageError: The cluster cannot be joined.
    """

    def __init__(self, cluster: Cluster, job: SupervisorJob) -> None:
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None
        self._cleanup = ExitStack()
        try:
            folder = None if cluster.address else self._cleanup.enter_context(private_folder())
            self._cleanup.callback(self._end)
            ours, theirs = socket.socketpair()
            self._line = ProcessConnection(ours.detach())
            self._cleanup.callback(self._line.close)
            with theirs:
                self._process = self._start(theirs.fileno())
            self.send("start", cluster, job, folder)
            self._join(LOCAL_SECONDS if cluster.address is None else JOIN_SECONDS)
        except BaseException:
            self._kill()  # it may wait inside Ray and receive nothing
            self.close()
            raise

    def _start(self, fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "unsilent.campaigns.ray_bridge", str(fd)],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(self._cluster, os.environ),
            start_new_session=True,
        )

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Wait for the bridge to end after its connection was closed, and kill it if that takes too long."""
        if self._process is None:
            return
        try:
            self._process.wait(END_SECONDS)
        except BaseException as error:
            self._kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.receive(0.5) is not None:
                return
        raise UsageError(
            f"could not connect to {self._cluster} within {seconds:.0f} s; check that a Ray cluster runs at that address"
        )

    def send(self, *message: object) -> None:
        """Send a command to the bridge."""
        self._line.send(*message)

    def receive(self, timeout: float) -> Message | None:
        """The next message, or None if none arrives in time.

        Raises the error that the bridge reports, and ``UnsilentError`` if the bridge has ended.
        """
        try:
            message = self._line.receive(timeout)
        except EOFError:
            raise UnsilentError(
                f"the connection to {self._cluster} is lost; stored results are safe: "
                "run the same command again when the cluster is back"
            ) from None
        if message is not None and message[0] == "failed":
            raise message[1]
        return message

    def close(self) -> None:
        """End the actors, their workers and a cluster that was started here."""
        self._cleanup.close()


@contextmanager
def private_folder() -> Iterator[str]:
    """A temporary folder for a local Ray cluster that only this user can enter.

    Ray itself would create one that everybody can enter.
    """
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="unsilent-ray-", dir=base if len(base) <= LONGEST_FOLDER else "/tmp")  # noqa: S108
    try:
        yield folder
    finally:
        remove_busy_folder(folder)


def remove_busy_folder(folder: str) -> None:
    """Remove a folder to which ending Ray processes may still write."""
    end = time.monotonic() + REMOVE_SECONDS
    while os.path.exists(folder) and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def environment(cluster: Cluster, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for Ray: no usage reports, and a local cluster listens on loopback only."""
    result = {**variables, "RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    if cluster.address is None:
        # Without a cluster, this variable restricts Ray to 127.0.0.1 (the default on macOS and Windows).
        result["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # An own token, so that none is written into the user's home.
        result |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        result.pop("RAY_ADDRESS", None)
    else:
        result.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds for which a wrong token or version is retried
    return result
