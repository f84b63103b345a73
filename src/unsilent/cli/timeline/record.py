"""``unsilent timeline record SCRIPT``: record some steps of a training script with the profiler.

Exit codes: those of the script; 2 if there is no such script or the folder cannot be used for a recording.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, Option, Request, check_count
from unsilent.cli.scripts import ScriptOptions, asked_program, split_at_script
from unsilent.cli.signals import end_as_python_does
from unsilent.command import EXPLAIN, Command, output_option

LEAST_WARMUP = 2
MOST_STEPS = 10_000


@dataclass(frozen=True)
class RecordOptions:
    """Options of ``unsilent timeline record``."""

    output: Annotated[Path | None, output_option("Folder for the traces.", metavar="DIR")] = None
    steps: Annotated[int, Option("Steps to record; a step ends when the optimizer has stepped.", EXECUTION_PANEL)] = 10
    warmup: Annotated[int, Option("Steps before the recorded ones.", EXECUTION_PANEL)] = 5

    def __post_init__(self) -> None:
        check_count("--steps", self.steps, 1, MOST_STEPS)
        check_count("--warmup", self.warmup, LEAST_WARMUP)


OPTION_CLASSES = (ScriptOptions, RecordOptions)


def record(request: Request) -> int:
    """Record some steps of a training script with the profiler, without changing it.

    Under torchrun, every rank runs it: torchrun ... -m unsilent timeline record -o DIR SCRIPT ARGUMENTS.
    """
    # Ends with a SystemExit that has the exit code of the script, and never returns.
    from unsilent.timeline.recorded_run import RecordedRun

    program, options = asked_program(request, "timeline record"), request[RecordOptions]
    if options.output is None:
        raise UsageError("no folder for the traces was given; add -o DIR")
    end_as_python_does()
    sys.exit(RecordedRun(program, options.output, options.steps, options.warmup).run())


COMMAND = Command(
    "timeline record", EXPLAIN, "unsilent timeline record -o traces train.py", OPTION_CLASSES, record,
    split_script=partial(split_at_script, OPTION_CLASSES),
)  # fmt: skip
