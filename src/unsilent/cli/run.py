"""``unsilent run SCRIPT``: runs a training script under the monitor, without changing it.

Exit codes: those of the script; 16 or 17 where the monitor stopped it; 2 where there is no such script or the settings cannot be.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from unsilent.cli.scripts import ScriptOptions, asked_program, split_at_script
from unsilent.cli.signals import end_as_python_does
from unsilent.command import WATCH, Command, ConfigOptions
from unsilent.errors import unknown_name_error
from unsilent.monitor.settings import MonitorSettings
from unsilent.options import Asked, options_of

if TYPE_CHECKING:
    from unsilent.launch.switches import ResolvedSettings

HELP = "Run a training script under the monitor, without changing it: unsilent run [OPTIONS] SCRIPT ARGUMENTS."
OPTION_CLASSES = (ScriptOptions, ConfigOptions, MonitorSettings)


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


def run(asked: Asked) -> int:
    """Run a script or module; ends by ``SystemExit`` with its exit code, and never returns."""
    from unsilent.launch.monitored_run import MonitoredRun
    from unsilent.launch.switches import resolve_settings

    program = asked_program(asked, "run")
    monitor = {name: value for name, value in asked.given_values.items() if name in options_of(MonitorSettings)}
    resolved = resolve_settings(monitor, None, os.environ)
    check_rules(resolved)
    end_as_python_does()
    sys.exit(MonitoredRun(program, resolved).run())


COMMAND = Command(
    "run",
    WATCH,
    HELP,
    "unsilent run --events events.jsonl train.py",
    OPTION_CLASSES,
    run,
    split_script=partial(split_at_script, OPTION_CLASSES),
)
