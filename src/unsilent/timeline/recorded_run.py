"""Runs a training script and records some of its steps without changing its results, output or exit code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.errors import UsageError, kind_and_line
from unsilent.basics.printable import escape_unprintable
from unsilent.launch.program import InterruptAtExit, Program, ProgramNotFound, exit_code
from unsilent.launch.standard_error import StandardError
from unsilent.launch.torch_import import AfterTorchImport

if TYPE_CHECKING:
    from unsilent.timeline.capture import Recorder


class RecordedRun:
    """One recorded run of a program; see `unsilent.timeline.capture.Recorder` for the arguments."""

    def __init__(self, program: Program, folder: Path, steps: int, warmup: int) -> None:
        self._program, self._folder, self._steps, self._warmup = program, folder, steps, warmup
        self._recorder: Recorder | None = None
        self._has_failed = False
        self._process = os.getpid()
        self._stderr = StandardError()

    def run(self) -> Any:
        """Run the program to its end and return an exit status for `sys.exit`.

        Raises:
            UsageError: The program does not exist, or the folder already holds a recording.
        """
        check_folder(self._folder, os.environ)
        at_exit, waiting = InterruptAtExit(), AfterTorchImport(self._start)
        waiting.install()
        error: BaseException | None = None
        try:
            self._program.run()
        except BaseException as raised:
            error = raised
        waiting.remove()
        at_exit.is_wanted = isinstance(error, KeyboardInterrupt)
        # A child that the program has forked ends here as well.
        if os.getpid() == self._process and not isinstance(error, ProgramNotFound):
            self._stop()
        return exit_code(error)

    def _start(self) -> None:
        try:
            from unsilent.timeline.capture import Recorder

            self._recorder = Recorder(self._folder, self._steps, self._warmup, self._print)
            self._recorder.start()
        except Exception as error:
            self._has_failed = True
            self._print(f"cannot record: {kind_and_line(error)}; the program goes on without it")

    def _stop(self) -> None:
        recorder = self._recorder
        if recorder is not None:
            recorder.stop()
            self._has_failed |= recorder.has_failed
        if not self._has_failed and (line := self._summary()):
            self._print(line)

    def _summary(self) -> str:
        """Summary of the recording on rank 0, or on any rank the reason why fewer steps were recorded."""
        from unsilent.report.text import count_text

        recorder, count_of_steps = self._recorder, count_text(self._steps, "step")
        if recorder is None or not recorder.ended:
            return "no step of an optimizer of torch.optim was seen; nothing was recorded"
        if not recorder.recorded:
            ended = count_text(recorder.ended, "step")
            problem = f"the program ended after {ended}, and recording begins after {self._warmup}"
            return f"{problem}; nothing was recorded; give a smaller --warmup"
        if recorder.recorded < self._steps:
            return f"the program ended when {recorder.recorded} of {count_of_steps} were recorded; these are in {self._folder}"
        return "" if recorder.rank else f"{count_of_steps} recorded in {self._folder}; {recorder.cost_text()}"

    def _print(self, text: str) -> None:
        self._stderr.print_line(f"unsilent: {escape_unprintable(text)}")


def check_folder(folder: Path, environment: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if this rank's trace cannot be written to the folder.

    A restart by torchrun may replace the trace of its job.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give -o a folder")
    name = f"trace-rank{environment.get('RANK', '0')}.json.gz"
    if (folder / name).exists() and environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        raise UsageError(f"{folder} holds a recording ({name}); remove it, or give -o another folder")
