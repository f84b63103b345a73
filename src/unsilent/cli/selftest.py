"""``unsilent selftest`` and ``unsilent selftest record``: test whether a device computes correctly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unsilent.basics.options import EXECUTION_PANEL, WORKLOAD_PANEL, Option, Request
from unsilent.basics.plainfiles import shown_path
from unsilent.cli.tables import show_result
from unsilent.command import AFTER_ALARM, Command, DisplayOptions, Result, output_option

NO_TRAINING = "no training was given; give one, like train-resnet (see unsilent workloads)"


@dataclass(frozen=True)
class SelfTestOptions:
    """Options of ``unsilent selftest``."""

    device: Annotated[str, Option("auto, cpu or cuda[:i].", EXECUTION_PANEL)] = "auto"
    minutes: Annotated[
        float, Option("Duration in minutes. Every operation is executed at least once.", EXECUTION_PANEL)
    ] = 1.0
    step: Annotated[
        Path | None,
        Option("A recorded step, which is executed as well.", WORKLOAD_PANEL, metavar="RECORDING"),
    ] = None
    code: Annotated[
        str | None,
        Option("FILE.py:NAME of a recorded step that is not built in.", WORKLOAD_PANEL),
    ] = None


@dataclass(frozen=True)
class RecordOptions:
    """Options of ``unsilent selftest record``."""

    training: Annotated[
        str, Option("A training: built in, or FILE.py:NAME.", "", metavar="TRAINING", missing_error=NO_TRAINING)
    ]
    device: Annotated[str, Option("auto, cpu or cuda[:i].", EXECUTION_PANEL)] = "auto"
    output: Annotated[Path, output_option("File to write.")] = Path("step.recording")


def selftest(request: Request) -> Result:
    """Execute operations with known answers on a device, and compare every element.

    The exit code is 17 if an answer was wrong, otherwise 0.
    """
    from unsilent.selftest.running import run_selftest

    options = request[SelfTestOptions]
    return run_selftest(options.device, options.minutes, options.step, options.code, observer=request.observer)


def record(request: Request) -> int:
    """Record a step of a training, with which selftest tests a device."""
    from unsilent.engine.device_placement import resolve_device
    from unsilent.selftest.recording import record_training

    options = request[RecordOptions]
    record_training(options.output, options.training, device=resolve_device(options.device))
    fields, line = {"training": options.training, "file": str(options.output)}, f"A step of {options.training}"
    show_result(
        request, "unsilent/selftest-record/1", "selftest record", fields, f"{line}: {shown_path(options.output)}"
    )
    return 0


COMMAND = Command(
    "selftest", AFTER_ALARM, "unsilent selftest --device cpu --minutes 10 --step step.recording", (SelfTestOptions,),
    selftest, has_report=True, is_long=True,
)  # fmt: skip
RECORD = Command(
    "selftest record", AFTER_ALARM, "unsilent selftest record train-resnet -o step.recording",
    (RecordOptions, DisplayOptions), record,
)  # fmt: skip
