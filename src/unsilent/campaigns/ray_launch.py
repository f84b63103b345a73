"""Starting the bridge to Ray (`unsilent.campaigns.ray_bridge`) in a process of its own, and ending it. Imports no Ray."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType

from unsilent.campaigns.line import Line, Message
from unsilent.campaigns.ray_supervisor import Job
from unsilent.errors import UnsilentError, UsageError

KNOCK_SECONDS = 5.0
JOIN_SECONDS = 15.0
LOCAL_SECONDS = 120.0
END_SECONDS = 15.0
_PLACE = re.compile(r"(?:ray://)?(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Cluster:
    """An existing cluster, or (``address`` None) one on this machine with that many CPUs to count."""

    address: str | None
    cpus: int

    def __str__(self) -> str:
        return "this machine" if self.address is None else f"the Ray cluster at {self.address}"


def check_address(address: str | None) -> None:
    """Raise ``UsageError`` where Ray is not installed, or the address is none or nobody is there."""
    if find_spec("ray") is None:
        raise UsageError("--executor ray needs an extra: pip install 'unsilent[ray]'")
    if address is None or address == "auto":
        return
    found = _PLACE.fullmatch(address)
    if found is None or int(found[2]) > 65535:
        raise UsageError(
            f"--ray is {address!r}; expected the head node's host:port (like 10.0.0.1:6379), ray://host:port or auto"
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), KNOCK_SECONDS).close()
    except OSError as error:
        raise UsageError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); "
            "check the address, or start one there: ray start --head"
        ) from None


class Link:
    """The bridge's process and the line to it; joined to the cluster once made.

    Raises:
        UsageError: the cluster cannot be joined.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._cluster = cluster
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unsilent.campaigns.ray_bridge", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(cluster, os.environ),
                start_new_session=True,
            )
        self._line = Line(ours.detach())
        try:
            self.send("start", cluster, job)
            self._join(LOCAL_SECONDS if cluster.address is None else JOIN_SECONDS)
        except BaseException:
            os.killpg(self._process.pid, signal.SIGKILL)  # it may wait inside Ray, where it hears nothing
            self.close()
            raise

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.receive(0.5) is not None:
                return
        raise UsageError(f"{self._cluster} did not let us in within {seconds:.0f} s; is it Ray that answers there?")

    def send(self, *message: object) -> None:
        """Send an order."""
        self._line.send(*message)

    def receive(self, timeout: float) -> Message | None:
        """The next message or None; raises what the bridge failed of, and ``UnsilentError`` when it is gone."""
        try:
            message = self._line.receive(timeout)
        except EOFError:
            raise UnsilentError(
                f"{self._cluster} is lost; what was stored is safe: run the same command again when it is back"
            ) from None
        if message is not None and message[0] == "failed":
            raise message[1]
        return message

    def close(self) -> None:
        """End actors, workers, and a cluster of our own."""
        self._line.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def environment(cluster: Cluster, own: Mapping[str, str]) -> dict[str, str]:
    """What Ray reads of the environment: it reports to nobody, and a cluster of our own listens on loopback alone."""
    found = {**own, "RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    if cluster.address is None:
        # This variable is how Ray keeps itself to 127.0.0.1 where it is no cluster (on macOS and Windows by default).
        found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # A token of our own, so that none is written into the user's home.
        found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        found.pop("RAY_ADDRESS", None)
    else:
        found.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds that a wrong token or version is tried again
    return found
