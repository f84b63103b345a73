"""The run of one command, from what was given on the command line to its exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unsilent.basics.options import Asked
from unsilent.cli.paths import check_writable
from unsilent.command import Command, ConfigOptions, DisplayOptions, PageOptions, ProgressOptions


def run_command(command: Command, given: Mapping[str, Any], arguments: Sequence[str], script: Sequence[str]) -> int:
    """Run a command; ``given``: texts of options by field, of those words of the command line that are its ``arguments``."""
    asked = Asked(command.all_option_classes(arguments), given)
    asked.script = tuple(script)
    config = asked[ConfigOptions].config if "config" in asked.options else None
    if config is not None:
        read_config(asked, config)
    if not command.has_report:
        return int(_run(command, asked) or 0)
    page, display = asked[PageOptions].output, asked[DisplayOptions]
    check_writable(page)
    result = _run(command, asked)
    if isinstance(result, int):
        return result
    from unsilent.cli.report_output import show_report
    from unsilent.report.model import Report

    report = result if isinstance(result, Report) else result.report()
    if not report.repeat_command:
        report = replace(report, repeat_command=asked.command_line(command.name, *command.option_classes))
    show_report(report, page, display.as_json, display.plain)
    return int(getattr(result, "exit_code", 0))


def read_config(asked: Asked, path: Path) -> None:
    """Take the options of a TOML file or of a card; raises ``UsageError``."""
    from unsilent.cli.card import take_card
    from unsilent.studies.pvf.card import is_card

    if is_card(path):
        take_card(asked, path)
    else:
        asked.read_toml(path)


def _run(command: Command, asked: Asked) -> Any:
    """The return value of the command; a long one shows its progress."""
    if not command.is_long:
        return command.run(asked)
    from unsilent.cli.progress import make_observer

    plain = "as_json" in asked.options and (asked[DisplayOptions].plain or asked[DisplayOptions].as_json)
    with make_observer(quiet=asked[ProgressOptions].quiet, plain=plain) as asked.observer:
        return command.run(asked)
