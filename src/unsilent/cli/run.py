"""``unsilent run SCRIPT``: run an unchanged training script under the monitor.

Exit codes: those of the script; 16 or 17 if the monitor stopped it; 2 if there is no such script or the settings are invalid.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import Option, Request, check_count, options_of
from unsilent.cli.scripts import ScriptOptions, asked_program, split_at_script
from unsilent.cli.signals import end_as_python_does
from unsilent.command import WATCH, Command, ConfigOptions
from unsilent.monitor.settings import ALARM_PANEL, MonitorSettings

if TYPE_CHECKING:
    from unsilent.launch.isolation import IsolatedJob
    from unsilent.launch.program import Program
    from unsilent.launch.switches import ResolvedSettings

ISOLATION_PANEL = "Isolation"
MOST_RANKS = 1024
STOPPING = ("replay", "stop")
"""Values of ``--on-alarm`` that end a job with a verdict."""


@dataclass(frozen=True)
class AlarmCommandOptions:
    """The option for a shell command to run on an alarm."""

    on_alarm_exec: Annotated[
        str | None,
        Option(
            "A shell command that rank 0 runs once, with the first verdict as JSON on stdin, such as one that drains the node.",
            ALARM_PANEL,
            metavar="CMD",
        ),
    ] = None


@dataclass(frozen=True)
class IsolationOptions:
    """Options for restarting a job without suspected devices."""

    isolate: Annotated[
        bool,
        Option(
            "Start the ranks here, and again without a suspected device. Needs --nproc, --checkpoints and --events; "
            "--on-alarm is replay unless it is given.",
            ISOLATION_PANEL,
        ),
    ] = False
    nproc: Annotated[int | None, Option("Ranks, one for each device of this host.", ISOLATION_PANEL)] = None
    spare: Annotated[int, Option("Further devices, which take the place of suspected ones.", ISOLATION_PANEL)] = 0
    checkpoints: Annotated[Path | None, Option(
        "Folder that the script saves to, with verified_save and its step. UNSILENT_RESUME_FROM names the last good one.",
        ISOLATION_PANEL)] = None  # fmt: skip
    restarts: Annotated[int, Option("Largest number of times that the job is started again.", ISOLATION_PANEL)] = 3
    selftest_minutes: Annotated[
        float, Option("How long a suspected device is tested while the job runs; 0: not at all.", ISOLATION_PANEL)
    ] = 1.0

    def __post_init__(self) -> None:
        check_count("--nproc", 1 if self.nproc is None else self.nproc, 1, MOST_RANKS)
        check_count("--spare", self.spare, 0, MOST_RANKS)
        check_count("--restarts", self.restarts, 0)
        if self.selftest_minutes < 0:
            raise UsageError(f"--selftest-minutes is {self.selftest_minutes:g}; expected 0 or more")


OPTION_CLASSES = (ScriptOptions, ConfigOptions, MonitorSettings, AlarmCommandOptions, IsolationOptions)


def checked_settings(request: Request) -> ResolvedSettings:
    """The settings of the monitor; raises ``UsageError`` for an unknown preset or rule.

    Rules of a preset are not created, as they need numpy, and a script may set variables that numpy reads when it is imported.
    """
    from unsilent.detectors.rules import PRESETS, make_rule
    from unsilent.launch.switches import resolve_settings

    monitor = {name: value for name, value in request.given_values.items() if name in options_of(MonitorSettings)}
    resolved = resolve_settings(monitor, None, os.environ)
    settings = resolved.settings or MonitorSettings()
    if settings.preset not in PRESETS:
        raise unknown_name_error("preset", settings.preset, PRESETS)
    for text in settings.rule:
        make_rule(text)
    return resolved


def run(request: Request) -> int:
    """Run a training script under the monitor, without changing it: unsilent run [OPTIONS] SCRIPT ARGUMENTS.

    With --isolate it starts the ranks itself. After an incident it starts them again from the last good checkpoint, without the
    device that is suspected.
    """
    # Ends with a SystemExit that has the exit code of the script, and returns only if its ranks were started here.
    from unsilent.launch.alarm_command import AlarmCommand
    from unsilent.launch.child import enter_rank
    from unsilent.launch.monitored_run import MonitoredRun

    enter_rank()
    program, isolation = asked_program(request, "run"), request[IsolationOptions]
    if isolation.isolate:
        return run_isolated(request, program, isolation)
    request.refuse_given(
        [name for name in options_of(IsolationOptions) if name != "isolate"], "without --isolate, nothing reads them"
    )
    resolved = checked_settings(request)
    command = request[AlarmCommandOptions].on_alarm_exec
    is_explained = resolved.settings is not None and resolved.settings.on_alarm == "replay"
    end_as_python_does()
    sys.exit(MonitoredRun(program, resolved, AlarmCommand(command, is_explained) if command else None).run())


def run_isolated(request: Request, program: Program, options: IsolationOptions) -> int:
    """Start the ranks of a job, restart them after an incident, and return the exit code."""
    from unsilent.basics.printable import escape_unprintable
    from unsilent.launch.isolation import Isolation
    from unsilent.launch.standard_error import StandardError

    request.given_values.setdefault("on_alarm", "replay")
    program.check_file()
    job = isolated_job(request, program, options)
    checked_settings(request)
    stderr = StandardError()
    return Isolation(job, lambda line: stderr.print_line(f"unsilent: {escape_unprintable(line)}")).run()


def isolated_job(request: Request, program: Program, options: IsolationOptions) -> IsolatedJob:
    """The job that these options describe; raises ``UsageError`` for missing options."""
    from unsilent.launch.isolation import IsolatedJob

    for flag, value, like in (
        ("--nproc", options.nproc, "--nproc 4"),
        ("--checkpoints", options.checkpoints, "--checkpoints checkpoints"),
        ("--events", request.value("events"), "--events events.jsonl"),
    ):
        if value is None:
            raise UsageError(f"--isolate needs {flag}; give it, like {like}")
    settings = request[MonitorSettings]
    if settings.on_alarm not in STOPPING:
        raise UsageError(
            f"--on-alarm is {settings.on_alarm!r}, which stops no job, so --isolate would do nothing; "
            f"give {' or '.join(STOPPING)}"
        )
    if settings.incident == "off":
        raise UsageError("--incident is 'off', but --isolate reads what it records; leave it out")
    assert options.nproc is not None
    assert options.checkpoints is not None
    assert settings.events is not None
    words = shlex.split(request.command_line("run", MonitorSettings, AlarmCommandOptions))[1:]
    script = ["-m", program.name] if program.is_module else ["--", program.name]
    return IsolatedJob(
        words=(*words, *script, *program.arguments), events=settings.events, checkpoints=options.checkpoints,
        ranks=options.nproc, spares=options.spare, restarts=options.restarts, test_minutes=options.selftest_minutes,
    )  # fmt: skip


COMMAND = Command(
    "run", WATCH, "unsilent run --events events.jsonl train.py", OPTION_CLASSES, run,
    split_script=partial(split_at_script, OPTION_CLASSES),
)  # fmt: skip
