"""``unsilent run SCRIPT``: runs a training script under the monitor, without changing it.

Exit codes: those of the script; 16 or 17 where the monitor stopped it; 2 where there is no such script or the settings cannot be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from unsilent.cli.signals import end_as_python_does
from unsilent.command import WATCH, Command, ConfigOptions
from unsilent.errors import UsageError, unknown_name_error
from unsilent.monitor.settings import MonitorSettings
from unsilent.options import EXECUTION_PANEL, Asked, Option, options_of

if TYPE_CHECKING:
    from unsilent.launch.switches import ResolvedSettings

HELP = "Run a training script under the monitor, without changing it: unsilent run [OPTIONS] SCRIPT ARGUMENTS."
NO_SCRIPT = "no script was given; expected unsilent run [OPTIONS] SCRIPT ARGUMENTS, or -m MODULE ARGUMENTS"


@dataclass(frozen=True)
class RunCommandOptions:
    """What is run."""

    script: Annotated[
        str | None, Option("The script. All that follows it are its own arguments.", "", is_argument=True)
    ] = None
    module: Annotated[
        str | None,
        Option(
            "Run this module, as python -m does. All that follows it are its own arguments.",
            EXECUTION_PANEL,
            short_flag="m",
        ),
    ] = None


OPTION_CLASSES = (RunCommandOptions, ConfigOptions, MonitorSettings)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Arguments of ``unsilent run`` up to the script or module, and those that follow it."""
    switches = {asking.flag for asking in options_of(*OPTION_CLASSES).values() if asking.is_boolean} | {"-h", "--help"}
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--" and at + 1 < len(arguments):  # the script is next, whatever its name
            return [*arguments[: at + 2]], tuple(arguments[at + 2 :])
        is_value_next = word.startswith("-") and word not in switches and "=" not in word and not _has_value(word)
        at += 2 if is_value_next else 1
        if not word.startswith("-") or word.startswith("-m") or word.partition("=")[0] == "--module":
            break
    return [*arguments[:at]], tuple(arguments[at:])


def check_rules(resolved: ResolvedSettings) -> None:
    """Raise ``UsageError`` for a preset or rule that does not exist, before the script has begun.

    Rules of a preset are not made: they need numpy, and a script may set variables that numpy reads when it is imported.
    """
    from unsilent.detectors.rules import PRESETS, make_rule

    settings = resolved.settings or MonitorSettings()
    if settings.preset not in PRESETS:
        raise unknown_name_error("preset", settings.preset, PRESETS)
    for text in settings.rule:
        make_rule(text)


def _has_value(word: str) -> bool:
    """Whether a word is ``-mNAME``."""
    return word.startswith("-m") and len(word) > len("-m")


def run(asked: Asked) -> int:
    """Run a script or module; ends by ``SystemExit`` with its exit code, and never returns."""
    from unsilent.launch.monitored_run import MonitoredRun
    from unsilent.launch.program import Program
    from unsilent.launch.switches import resolve_settings

    options = asked[RunCommandOptions]
    name = options.script or options.module
    if name is None:
        raise UsageError(NO_SCRIPT)
    monitor = {name: value for name, value in asked.given_values.items() if name in options_of(MonitorSettings)}
    resolved = resolve_settings(monitor, None, os.environ)
    check_rules(resolved)
    end_as_python_does()
    sys.exit(MonitoredRun(Program(name, asked.script, is_module=options.script is None), resolved).run())


COMMAND = Command(
    "run", WATCH, HELP, "unsilent run --events events.jsonl train.py", OPTION_CLASSES, run, split_script=split_arguments
)
