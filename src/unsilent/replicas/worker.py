"""A worker process: ``python -m unsilent.replicas.worker FD DRIVER-PID`` talks to its driver over an inherited socket.

Driver to worker: ``("start", spec)``, ``("describe",)``, ``("run", replica)``, ``("look", look)``. Worker to driver:
``("ready", cpu)``, ``("described", trained, cpu)``, ``("done", row or what was seen, cpu)``, ``("failed", error)``. What user
code prints goes to stderr.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection

from unsilent.campaigns.worker import main


def _serve(connection: Connection) -> None:
    from unsilent.replicas.runner import ReplicaRunner
    from unsilent.workloads.user import set_arguments

    command, spec = connection.recv()
    assert command == "start"
    set_arguments(spec.workload)
    runner = ReplicaRunner(spec)
    connection.send(("ready", time.process_time()))
    while True:
        message = connection.recv()
        if message[0] == "describe":
            connection.send(("described", runner.describe(), time.process_time()))
        else:
            done = runner.run if message[0] == "run" else runner.look
            connection.send(("done", done(message[1]), time.process_time()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), _serve)
