"""Runs a training script under a monitor, with the same results, output, exit code and traceback as without."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import kind_and_line
from unsilent.basics.printable import escape_unprintable
from unsilent.events.sinks import Sink
from unsilent.launch.alarm_command import LIMIT_SECONDS, AlarmCommand
from unsilent.launch.program import InterruptAtExit, Program, exit_code
from unsilent.launch.run_summary import RunSummary, StderrHandler
from unsilent.launch.standard_error import StandardError
from unsilent.launch.switches import ResolvedSettings
from unsilent.launch.torch_import import AfterTorchImport

if TYPE_CHECKING:
    from unsilent.launch.attach import AutomaticMonitor


POLL_SECONDS = 0.02
OTHERS_SECONDS = LIMIT_SECONDS + 30
"""Seconds that a stopped rank waits for the other ranks; rank 0 may run a command meanwhile."""
_KEY = "unsilent/stopped"


def wait_for_stopped_ranks() -> None:
    """Under torchrun, wait until all ranks have called this function, for at most `OTHERS_SECONDS`.

    This way each rank can finish its part of an incident, and rank 0 can run ``--on-alarm-exec``.
    """
    import torch.distributed as dist

    if "TORCHELASTIC_RUN_ID" not in os.environ or not (dist.is_available() and dist.is_initialized()):
        return
    deadline = time.monotonic() + OTHERS_SECONDS
    with contextlib.suppress(RuntimeError):  # the store belongs to a rank that has ended
        store = dist.distributed_c10d._get_default_store()
        came = store.add(_KEY, 1)
        while came < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            came = store.add(_KEY, 0)


class MonitoredRun:
    """A run of a program under a monitor, or without one if there are no settings.

    Args:
        alarm_command: Command that runs once after an alarm.
    """

    def __init__(self, program: Program, resolved: ResolvedSettings, alarm_command: AlarmCommand | None = None) -> None:
        self._program, self._resolved, self._alarm_command = program, resolved, alarm_command
        self._automatic: AutomaticMonitor | None = None
        self._failed = False
        events = resolved.settings.events if resolved.settings else None
        self._summary = RunSummary(events)
        self._sinks: list[Sink] = [self._summary, *([alarm_command] if alarm_command else [])]
        self._process = os.getpid()
        self._stderr = StandardError()

    def run(self) -> Any:
        """Run the program to its end; returns the argument for `sys.exit`.

        Raises:
            UsageError: the program does not exist, or the monitor does not accept its settings for this model.
        """
        at_exit, waiting, handler = InterruptAtExit(), AfterTorchImport(self._start), StderrHandler(self._stderr)
        if (settings := self._resolved.settings) is not None:
            waiting.install()
            if settings.log_normal or settings.metrics_port is not None:
                handler.install()
        for note in self._resolved.notes:
            self._print(note)
        error: BaseException | None = None
        try:
            self._program.run()
        except BaseException as raised:
            error = raised
        is_child = os.getpid() != self._process  # a child that the program has forked ends here as well
        waiting.remove()
        error = error if is_child else self._stop(error)
        if self._alarm_command is not None and not is_child:
            self._alarm_command.wait()
        handler.remove()
        at_exit.is_wanted = isinstance(error, KeyboardInterrupt)
        has_succeeded = error is None or (isinstance(error, SystemExit) and not error.code)
        if has_succeeded and not is_child and (note := self._why_not_monitored()):
            self._print(note)
        if line := self._summary.text:
            self._print(line)
        return self._exit_code(error)

    def _stop(self, error: BaseException | None) -> BaseException | None:
        """End the monitor after the program, and return the error with which the run ends."""
        if self._automatic is None:
            return error
        from unsilent.monitor.actions import MonitorStop

        try:
            self._automatic.stop(wait=isinstance(error, SystemExit | None))
        except MonitorStop as stop:
            return error if isinstance(error, SystemExit) and error.code else stop
        return error

    def _start(self) -> None:
        settings = self._resolved.settings
        assert settings is not None
        try:
            from unsilent.launch.attach import AutomaticMonitor

            resolved = self._resolved
            self._automatic = AutomaticMonitor(settings, resolved.notes, resolved.uses_asd_variables, self._sinks)
            self._automatic.start()
        except Exception as error:
            if settings.strict:
                raise
            self._failed = True
            logging.getLogger("unsilent.monitor").error("cannot monitor the training: %s", kind_and_line(error))

    def _why_not_monitored(self) -> str:
        """The reason why a requested monitor was not created; empty if it was or if the reason is known."""
        automatic = self._automatic
        if self._resolved.settings is None or self._failed:
            return ""
        if automatic and (automatic.monitors or automatic.failed or automatic.is_program_monitored):
            return ""
        if automatic is not None and automatic.backward_passes:
            return "no optimizer of torch.optim was seen; nothing was monitored"
        return (
            "no backward pass was seen; nothing was monitored (if the script starts the ranks of a training itself, "
            "start it with torchrun instead)"
        )

    def _exit_code(self, error: BaseException | None) -> Any:
        if self._automatic is not None:
            from unsilent.monitor.actions import MonitorStop

            if (refused := self._automatic.refused) is not None and error is refused:
                raise refused
            if isinstance(error, MonitorStop):
                self._print(str(error))
                wait_for_stopped_ranks()
                return error.exit_code
        return exit_code(error)

    def _print(self, text: str) -> None:
        self._stderr.print_line(f"unsilent: {escape_unprintable(text)}")
