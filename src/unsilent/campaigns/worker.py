"""A worker process, which runs trials for a driver over an inherited socket.

It is started as ``python -m unsilent.campaigns.worker FD DRIVER-PID``.

Driver to worker: ``("start", make_runner, spec, settings)``, ``("run", [trial, ...], alone)``,
``("lost", trial, outcome, seconds, reason)``, ``("prove",)``, ``("ask", what, *arguments)``.
Worker to driver: ``("loading", description, done, total)``, ``("ready", baseline, cpu, max_trials_together)``,
``("rows", [row, ...], cpu, proven)`` (also for trials that must run alone), ``("proven", cpu)``, ``("answered", answer)``,
``("said", note)``, ``("failed", error)``, ``("unusable", error)``. What user code prints goes to stderr, so that the
driver's stdout stays clean.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from unsilent.basics.child_processes import INSIDE, exit_with_parent
from unsilent.basics.error_origin import unexpected_error
from unsilent.basics.errors import ProcessUnusable, UnsilentError

SEND_SECONDS = 0.05
"""Least seconds between two messages with rows of trials that run together."""


def main(fd: int, driver_pid: int, serve: Callable[[Connection], None]) -> None:
    """Serve one driver until it is gone.

    ``serve`` answers the driver's messages; its errors are reported to the driver.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    os.set_inheritable(fd, False)
    os.dup2(2, 1)
    os.environ[INSIDE] = "1"
    exit_with_parent(driver_pid)
    connection = _Own(fd)
    try:
        serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except ProcessUnusable as error:
        connection.send(("unusable", error))
        os._exit(1)  # an orderly end cannot be relied upon either
    except BaseException as error:
        connection.send(("failed", as_picklable_error(error)))


class _Own(Connection):
    """A connection that only this process may use.

    A child process forked by user code ends when it tries to use the connection.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._pid = os.getpid()

    def send(self, obj: Any) -> None:
        self._check()
        super().send(obj)

    def recv(self) -> Any:
        self._check()
        return super().recv()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            from unsilent.workloads.process_side_effects import end_child_of  # loads torch

            end_child_of(self._pid)


def _serve(connection: Connection) -> None:
    from unsilent.basics.user_code import set_script_arguments
    from unsilent.campaigns.runner import check_row_of_trial, run_trials_in_order
    from unsilent.workloads.process_side_effects import take_notes

    command, make_runner, spec, worker_settings = connection.recv()
    assert command == "start"
    set_script_arguments(spec.workload)

    def report_progress(description: str, done: float, total: float) -> None:
        connection.send(("loading", description, done, total))

    runner = make_runner(spec, progress=report_progress, worker_settings=worker_settings)
    connection.send(("ready", runner.establish_baseline(), time.process_time(), runner.max_trials_together))
    while True:
        message: tuple[Any, ...] = connection.recv()
        if message[0] == "run":
            together = runner.max_trials_together > 1
            rows: list[Any] = []
            sent = time.monotonic()
            for row in run_trials_in_order(runner, *message[1:]):
                rows.append(row)
                proven = runner.unverified_row_count == 0
                # If trials run one at a time, the driver has to know which one is running.
                if not together or proven or time.monotonic() - sent > SEND_SECONDS:
                    connection.send(("rows", rows, time.process_time(), proven))
                    rows, sent = [], time.monotonic()
            if rows:
                connection.send(("rows", rows, time.process_time(), False))
            for note in take_notes(runner.workload_name):
                connection.send(("said", note))
        elif message[0] == "ask":
            connection.send(("answered", runner.answer(*message[1:])))
        elif message[0] == "prove":
            runner.verify_restored_state()
            connection.send(("proven", time.process_time()))
        elif message[0] == "lost":
            row = check_row_of_trial(runner, runner.lost_trial_row(*message[1:]), message[1])
            connection.send(("rows", [row], time.process_time(), runner.unverified_row_count == 0))


def as_picklable_error(error: BaseException) -> UnsilentError:
    """An error that can be sent to another process: an ``UnsilentError`` itself, or a report on any other error."""
    return error if isinstance(error, UnsilentError) else unexpected_error(error)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), _serve)
