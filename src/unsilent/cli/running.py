"""Execution of one command, from parsed command line words to its exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unsilent.basics.options import Request
from unsilent.cli.paths import check_writable
from unsilent.command import Command, ConfigOptions, DisplayOptions, PageOptions, ProgressOptions


def run_command(
    command: Command, option_texts: Mapping[str, Any], arguments: Sequence[str], script: Sequence[str]
) -> int:
    """Run a command and return its exit code.

    ``option_texts`` are the texts of options by field, and ``arguments`` the words of the command line that contain them.
    """
    request = Request(command.all_option_classes(arguments), option_texts)
    request.script = tuple(script)
    config = request[ConfigOptions].config if "config" in request.options else None
    if config is not None:
        read_config(request, config)
    if not command.has_report:
        return int(_run(command, request) or 0)
    page, display = request[PageOptions].output, request[DisplayOptions]
    check_writable(page)
    result = _run(command, request)
    if isinstance(result, int):
        return result
    from unsilent.cli.report_output import show_report
    from unsilent.report.model import Report

    report = result if isinstance(result, Report) else result.report()
    if not report.repeat_command:
        report = replace(report, repeat_command=request.command_line(command.name, *command.option_classes))
    show_report(report, page, display.as_json, display.plain)
    return int(getattr(result, "exit_code", 0))


def read_config(request: Request, path: Path) -> None:
    """Read options from a TOML file or a card; raises ``UsageError``."""
    from unsilent.cli.card import take_card
    from unsilent.studies.pvf.card import is_card

    if is_card(path):
        take_card(request, path)
    else:
        request.read_toml(path)


def _run(command: Command, request: Request) -> Any:
    """Run the function of a command and return its result, with a progress display for long commands."""
    if not command.is_long:
        return command.run(request)
    from unsilent.cli.progress import make_observer

    plain = "as_json" in request.options and (request[DisplayOptions].plain or request[DisplayOptions].as_json)
    with make_observer(quiet=request[ProgressOptions].quiet, plain=plain) as request.observer:
        return command.run(request)
