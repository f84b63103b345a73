"""Compares the clock of each rank with that of rank 0 by messages over separate sockets.

The job's process groups are not used, so their sequence numbers and the flight recorder are the same as without a recording. A
rank that does not connect costs the others a wait of seconds, but never the job. The clock is that of the profiler, Unix time.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MESSAGES = 300
WAIT_SECONDS = 10.0
_TIME = struct.Struct("<q")


def measure_offset(store: Store, label: str, rank: int, world_size: int) -> tuple[float, float, float]:
    """Time, clock offset and error bound of a comparison of this rank's clock with that of rank 0.

    All three are in seconds, and the first one is a Unix time. The offset is this rank's time minus that of rank 0.

    The fastest of `MESSAGES` exchanges counts; half its round trip bounds the error. All ranks call it with the same label, once.

    Raises:
        OSError: Rank 0 cannot be reached, or other ranks do not connect.
        RuntimeError: Rank 0 does not announce its address.
    """
    key = f"unsilent_clock/{label}"
    if rank == 0:
        _answer(store, key, world_size - 1)
        return time.time_ns() * 1e-9, 0.0, 0.0
    store.wait([key], timedelta(seconds=WAIT_SECONDS))
    host, _, port = store.get(key).decode().rpartition(" ")
    # Ranks are answered one after the other.
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS * 2) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return best_exchange([_exchange(connection) for _ in range(MESSAGES)])


def best_exchange(exchanges: list[tuple[int, int, int]]) -> tuple[float, float, float]:
    """Time, clock offset and error bound of the fastest exchange, all in seconds.

    Args:
        exchanges: Times in nanoseconds at which each message was sent (on this clock), answered (on the clock of rank 0), and
            its answer received (on this clock).
    """
    sent, answered, received = min(exchanges, key=lambda times: times[2] - times[0])
    middle = (sent + received) / 2
    return middle * 1e-9, (sent - answered + received - answered) / 2 * 1e-9, (received - sent) / 2 * 1e-9


def _exchange(connection: socket.socket) -> tuple[int, int, int]:
    sent = time.time_ns()
    connection.sendall(b".")
    answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
    received = time.time_ns()
    if len(answer) < _TIME.size:
        raise ConnectionError("rank 0 ended the comparison of clocks")
    return sent, _TIME.unpack(answer)[0], received


def _answer(store: Store, key: str, ranks: int) -> None:
    """Answer the messages of the given number of ranks with the time of this clock."""
    host = socket.gethostbyname(os.environ.get("MASTER_ADDR", "localhost"))  # that of rank 0, which all ranks can reach
    with socket.create_server((host, 0), backlog=ranks) as server:
        store.set(key, f"{host} {server.getsockname()[1]}")
        for _ in range(ranks):
            deadline = time.monotonic() + WAIT_SECONDS
            server.settimeout(WAIT_SECONDS)
            connection, _ = server.accept()
            with connection:
                connection.settimeout(WAIT_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while connection.recv(1) and time.monotonic() < deadline:
                    connection.sendall(_TIME.pack(time.time_ns()))
