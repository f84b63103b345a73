"""``--on-alarm-exec CMD``: a user's command that receives the verdict on an alarm, for example to drain the node."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from dataclasses import asdict
from typing import cast

from unsilent.basics.child_processes import kill_with_children
from unsilent.basics.errors import kind_and_line
from unsilent.basics.printable import escape_unprintable
from unsilent.events.event_kinds import AlarmExplained, Event, Verdict
from unsilent.events.host import first_step
from unsilent.events.incident_folder import not_executed_verdict
from unsilent.recovery.fault_codes import UNDETERMINED_EXIT_CODE, FaultKind
from unsilent.recovery.fault_verdict import FaultVerdict

LIMIT_SECONDS = 30.0
"""Seconds after which the command is killed."""
_log = logging.getLogger("unsilent.monitor")


class AlarmCommand:
    """A sink that runs a command once, on rank 0, with the first verdict as JSON on stdin.

    The command's failures do not affect the job.

    Args:
        command: Command for the shell.
        is_explained: Whether to wait for the verdict on the kind of fault; otherwise the verdict that names the rank is used.
    """

    def __init__(self, command: str, is_explained: bool) -> None:
        self._command, self._is_explained = command, is_explained
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if event.rank == 0 and self._thread is None and (verdict := self._verdict(event)) is not None:
            self._thread = threading.Thread(target=self._run, args=(_as_json(verdict),), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the command has ended."""
        if self._thread is not None:
            self._thread.join()

    def _verdict(self, event: Event) -> FaultVerdict | None:
        if isinstance(event, AlarmExplained):
            return FaultVerdict(
                kind=cast("FaultKind", event.fault), step=event.step, rank=event.suspect, host=event.host,
                device=event.device, code=event.code, level=event.level, action=event.action, reason=event.reason,
                exit_code=event.exit_code,
            )  # fmt: skip
        if not isinstance(event, Verdict) or self._is_explained:
            return None
        return not_executed_verdict(event, UNDETERMINED_EXIT_CODE if event.action == "stop" else 0)

    def _run(self, verdict: str) -> None:
        try:
            self._report(*run_in_shell(self._command, verdict))
        except Exception as error:
            _log.error("--on-alarm-exec: %s; the job goes on", kind_and_line(error))

    def _report(self, code: int | None, output: str) -> None:
        last = escape_unprintable(output.strip().rpartition("\n")[2])[:300]
        if code is None:
            _log.error("--on-alarm-exec: killed after %g seconds; the job goes on", LIMIT_SECONDS)
        elif code:
            _log.error("--on-alarm-exec: exit code %d%s; the job goes on", code, f": {last}" if last else "")


def _as_json(verdict: FaultVerdict) -> str:
    """The verdict as JSON, with its step also counted from the beginning of the training."""
    return json.dumps({**asdict(verdict), "training_step": (first_step() or 0) + verdict.step})


def run_in_shell(command: str, text: str) -> tuple[int | None, str]:
    """Run a user's command with a text on stdin, and return its exit code and its stderr.

    The exit code is None if the command was killed.
    """
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        _, output = process.communicate(text, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        kill_with_children(process)  # including processes that the shell has started
        process.communicate()
        return None, ""
    return process.returncode, output
