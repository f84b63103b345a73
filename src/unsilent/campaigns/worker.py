"""A worker process: ``python -m unsilent.campaigns.worker FD`` talks to its driver over an inherited socket.

Driver to worker: ``("start", spec)``, ``("run", [trial, ...])``, ``("lost", trial, outcome, seconds)``, ``("stop",)``.
Worker to driver: ``("loading", what, done, total)``, ``("ready", description, cpu)``, ``("row", row, cpu)``,
``("failed", error)``, ``("stopped", cpu)``. What user code prints goes to stderr, so that the driver's stdout stays clean.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from unsilent.errors import UnsilentError


def main(fd: int) -> None:
    """Serve one driver until it says stop or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides
    os.dup2(2, 1)
    _die_with(os.getppid())
    connection = Connection(fd)
    try:
        _serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        connection.send(("failed", _portable(error)))


def _serve(connection: Connection) -> None:
    from unsilent.campaigns.runner import TrialRunner

    command, spec = connection.recv()
    assert command == "start"
    runner = TrialRunner(spec, progress=lambda what, done, total: connection.send(("loading", what, done, total)))
    connection.send(("ready", runner.describe(), time.process_time()))
    while True:
        message: tuple[Any, ...] = connection.recv()
        if message[0] == "run":
            for trial in message[1]:
                connection.send(("row", runner.run(trial), time.process_time()))
        elif message[0] == "lost":
            connection.send(("row", runner.lost(*message[1:]), time.process_time()))
        else:
            runner.prove()
            connection.send(("stopped", time.process_time()))
            return


def _portable(error: BaseException) -> UnsilentError:
    """An error that crosses the process border: ours as they are, anything else as a report of a defect."""
    if isinstance(error, UnsilentError):
        return error
    trace = "".join(traceback.format_exception(error))
    return UnsilentError(f"internal error in a worker: {type(error).__name__}: {error}\n{trace}")


def _die_with(parent: int) -> None:
    """End this process soon after its driver is gone, even in the middle of a trial."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
