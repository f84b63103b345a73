"""Workers that are forked from the test's own process, which has loaded torch: ready in milliseconds instead of seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import traceback
import warnings
from contextlib import contextmanager
from multiprocessing.connection import Connection
from unittest import mock

from unsilent.campaigns import worker


class Forked:
    """As much of a `subprocess.Popen` as an executor asks for."""

    def __init__(self, pid):
        self.pid, self._code = pid, None

    def poll(self):
        if self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if done else None
        return self._code

    def wait(self, timeout=60):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked worker", timeout)
            time.sleep(0.001)
        return self._code


def started(module, environment=None):
    assert module == "unsilent.campaigns.worker"
    ours, theirs = socket.socketpair()
    driver = os.getpid()
    with warnings.catch_warnings():  # of forking a process that has threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            ours.close()
            worker.main(theirs.detach(), driver, worker._serve)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    theirs.close()
    return Forked(pid), Connection(ours.detach())


@contextmanager
def forked_workers():
    """Executors start such workers inside."""
    with mock.patch("unsilent.campaigns.processes.start_child", started):
        yield
