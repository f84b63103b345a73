"""A process for replicas whose environment variables must be set before torch is loaded.

It is started as ``python -m unsilent.replicas.replica_process FD PARENT-PID``.

Parent to child: ``("start", spec)``, ``("run", trial)``. Child to parent: ``("row", row)``, ``("failed", error)``. It ends when
its parent does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from unsilent.basics.child_processes import end_child, receive, start_child
from unsilent.basics.closing import Closing
from unsilent.basics.errors import UnsilentError
from unsilent.campaigns.spec import TrialId

if TYPE_CHECKING:
    from unsilent.campaigns.runner import MakeRunner
    from unsilent.replicas.spec import ReplicaRow, ReplicaSpec


class ReplicaProcess(Closing):
    """The parent's handle of a process that runs replicas.

    ``environment``: environment variables of the process in addition to those of the parent.
    """

    def __init__(self, make_runner: MakeRunner, spec: ReplicaSpec, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._workload = spec.workload
        self._process, self._connection = start_child(
            "unsilent.replicas.replica_process", {**os.environ, **environment}
        )
        self._connection.send(("start", make_runner, spec))

    def run_trial(self, trial: TrialId) -> ReplicaRow:
        """Run a trial and return its row.

        Raises the error that the trial raised, or ``UnsilentError`` if the process died.
        """
        try:
            self._connection.send(("run", trial))
            kind, result = receive(self._process, self._connection)
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise UnsilentError(
                f"{self._workload}: a process died ({how}) while it ran replica {trial}; stored results are safe: find out "
                "what ends it, then run the same command again"
            ) from None
        if kind == "failed":
            raise result
        row: ReplicaRow = result
        return row

    def close(self) -> None:
        """End the process."""
        end_child(self._process, self._connection)


def _serve(connection: Connection) -> None:
    from unsilent.basics.user_code import set_script_arguments

    _, make_runner, spec = connection.recv()
    set_script_arguments(spec.workload)
    runner = make_runner(spec)
    while True:
        connection.send(("row", runner.run_here(connection.recv()[1])))


if __name__ == "__main__":
    from unsilent.campaigns.worker import main

    main(int(sys.argv[1]), int(sys.argv[2]), _serve)
