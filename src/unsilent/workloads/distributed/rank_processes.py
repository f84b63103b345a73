"""The processes of all ranks: started together, and ended together if one of them is lost.

Ranks find each other through a file and communicate over the loopback interface. They end with this process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from unsilent.basics.child_processes import end_child, start_child
from unsilent.basics.closing import Closing
from unsilent.basics.errors import UnsilentError
from unsilent.workloads.distributed.orders import GangSettings
from unsilent.workloads.distributed.records import End

RANK_MODULE = "unsilent.workloads.distributed.rank"
START_SECONDS = 300.0
SETTLE_SECONDS = 0.5
"""Seconds for other ranks to report after one has failed, to find the cause: a lost rank causes errors in others."""
EXIT_SECONDS = 5.0
"""Seconds for a rank whose connection is closed to end."""
ANSWERS = ("ready", "trained", "ended")
"""Kinds of messages with which a rank completes an order."""
Take = Callable[[int, str, Any], None]


class GangLost(UnsilentError):
    """Raised when the ranks could not complete an order.

    They are ended, and the next request starts them again.

    Attributes:
        end: The same text as ``end`` of a `ResumeRecord`.
        detail: The rank, and the reason.
    """

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(
            f"{end}: {detail}; expected an answer of every rank: all were ended, the next request starts them again"
        )
        self.end, self.detail = end, detail


@dataclass(frozen=True)
class RankProcess:
    """The running process of one rank."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection


class RankProcesses(Closing):
    """The processes of all ranks of a gang.

    An error at the start of a rank is raised.
    """

    def __init__(self, settings: GangSettings) -> None:
        self._ranks: list[RankProcess] = []
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
        try:
            for number in range(settings.world_size):
                self._ranks.append(RankProcess(number, *start_child(RANK_MODULE, environment)))
                _send(self._ranks[-1], ("start", settings, number))
            self._gather(_nobody, START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Process ids in the order of ranks; empty once the processes are ended."""
        return [rank.process.pid for rank in self._ranks]

    def ask(self, order: Any, seconds: float, take: Take | None = None) -> list[Any]:
        """Send an order to all ranks and return their answers.

        ``take`` is called with each message that a rank sends before its answer. If an answer does not come in time,
        all ranks are ended, and `GangLost` or the error of the order is raised.
        """
        for rank in self._ranks:
            _send(rank, order)
        return self._gather(take or _nobody, seconds)

    def close(self) -> None:
        """End the processes of all ranks."""
        for rank in self._ranks:
            rank.connection.close()  # all at once, so that they end at the same time
        for rank in self._ranks:
            end_child(rank.process, rank.connection)
        self._ranks = []

    def _gather(self, take: Take, seconds: float) -> list[Any]:
        limit = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        troubles: dict[int, tuple[str, Any]] = {}
        try:
            while len(answers) + len(troubles) < len(self._ranks):
                left = limit - time.monotonic()
                if left <= 0:
                    break
                for rank in self._ready([*answers, *troubles], min(left, 0.5)):
                    kind, value = self._receive(rank)
                    if kind in ANSWERS:
                        answers[rank.number] = value
                    elif kind in ("lost", "raised", "failed"):
                        troubles[rank.number] = kind, value
                        limit = min(limit, time.monotonic() + SETTLE_SECONDS)
                    else:
                        take(rank.number, kind, value)
            if len(answers) < len(self._ranks):
                raise _cause(troubles, seconds)
        except BaseException:
            self.close()
            raise
        return [answers[number] for number in range(len(self._ranks))]

    def _ready(self, done: Sequence[int], seconds: float) -> list[RankProcess]:
        """The ranks that have sent a message or whose process is dead."""
        waiting = [rank for rank in self._ranks if rank.number not in done]
        ready = wait([rank.connection for rank in waiting], seconds)
        # Children of a rank may hold its socket open after it died.
        return [rank for rank in waiting if rank.connection in ready or rank.process.poll() is not None]

    def _receive(self, rank: RankProcess) -> tuple[str, Any]:
        """The next message of a rank; its kind is ``lost`` if the process is gone."""
        with contextlib.suppress(EOFError, OSError):  # its end of the socket is closed
            if rank.connection.poll():
                message: tuple[str, Any] = rank.connection.recv()
                return message
        try:
            code = rank.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "lost", "closed its connection"
        return "lost", f"ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _send(rank: RankProcess, message: Any) -> None:
    with contextlib.suppress(OSError):  # a lost rank is detected while waiting for its answer
        rank.connection.send(message)


def _cause(troubles: Mapping[int, tuple[str, Any]], seconds: float) -> UnsilentError:
    """The error that explains why ranks did not answer.

    A lost rank comes before the errors that it caused in other ranks, then the lowest rank is named.
    """
    for wanted in ("lost", "failed", "raised"):
        for number in sorted(troubles):
            kind, value = troubles[number]
            if kind != wanted:
                continue
            if kind == "failed":
                assert isinstance(value, UnsilentError)
                return value
            return GangLost("rank lost" if kind == "lost" else "raised", f"rank {number}: {value}")
    return GangLost("deadline", f"no answer after {seconds:g} s")


def _nobody(rank: int, kind: str, value: Any) -> None:
    """Ignore a message."""
