"""A connection to another process of this program: whole messages over a socket, sent and received by threads.

An interrupt reaches only the main thread, so it never splits a message. Both ends always read, so neither waits for the other
to do so. Messages are pickled, as both ends belong to this program.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[Any, ...]
FLUSH_SECONDS = 2.0


class ProcessConnection:
    """One end of a connection.

    The socket ``fd`` belongs to this object until ``close``.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._connection = Connection(os.dup(fd))
        self._in: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, *message: Any) -> None:
        """Queue a message for sending.

        If the other end is closed, `receive` raises the error.
        """
        self._out.put(message)

    def receive(self, timeout: float) -> Message | None:
        """The next message; None if there is none within ``timeout`` seconds.

        Raises ``EOFError`` if the other end is closed.
        """
        try:
            message = self._in.get(timeout=timeout) if timeout > 0 else self._in.get_nowait()
        except queue.Empty:
            return None
        if message is None:
            self._in.put(None)
            raise EOFError
        return message

    def close(self) -> None:
        """Send all queued messages, if the other end still reads, and close the connection."""
        self._out.put(None)
        self._writer.join(FLUSH_SECONDS)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that reads
        except OSError:
            pass  # the other end was faster
        self._writer.join()
        self._reader.join()
        self._socket.close()
        self._connection.close()

    def _write(self) -> None:
        try:
            while (message := self._out.get()) is not None:
                self._connection.send(message)
        except OSError:
            pass  # the other end is gone

    def _read(self) -> None:
        try:
            while True:
                self._in.put(self._connection.recv())
        except (EOFError, OSError):
            self._in.put(None)
