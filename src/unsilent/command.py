"""The record that describes one verb of the command line: its options, its function and how its result is shown.

`cli.table` lists all of them by name. The same record makes a function for Python (`Command.function`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from unsilent.basics.option_function import OBSERVER, option_function
from unsilent.basics.options import OUTPUT_PANEL, Option, Request

if TYPE_CHECKING:
    from unsilent.report.model import Report

MEASURE, WATCH, AFTER_ALARM, EXPLAIN, FILES, RESULTS, LISTS = GROUPS = (
    "Measure", "Protect and watch", "After an alarm", "Explain", "Files", "Results", "Lists",
)  # fmt: skip
"""Headings of the overview, in this order."""


class Result(Protocol):
    """The result of a command with a report.

    Its ``exit_code``, if it has one, becomes the exit code of the command.
    """

    def report(self) -> Report:
        """The report of the result."""


@dataclass(frozen=True)
class DisplayOptions:
    """Options for how results are printed."""

    as_json: Annotated[bool, Option("Print one JSON object on stdout, and nothing else.", OUTPUT_PANEL, "json")] = False
    plain: Annotated[bool, Option("Print without colours and boxes, for pipes and logs.", OUTPUT_PANEL)] = False


@dataclass(frozen=True)
class ProgressOptions:
    """The option that hides the progress of a command."""

    quiet: Annotated[bool, Option("Do not show progress.", OUTPUT_PANEL)] = False


@dataclass(frozen=True)
class ConfigOptions:
    """The option that names a file with further options."""

    config: Annotated[Path | None, Option(
        "A TOML file with any of these options. The command line takes precedence.", OUTPUT_PANEL)] = None  # fmt: skip


def output_option(help_text: str, default_text: str = "", metavar: str = "") -> Option:
    """The option ``--output``, which names the file or folder that a command writes."""
    return Option(help_text, OUTPUT_PANEL, default_text=default_text, short_flag="o", metavar=metavar)


@dataclass(frozen=True)
class PageOptions:
    """The option that names the HTML page of a report."""

    output: Annotated[Path | None, output_option("Write the report to this HTML page as well.")] = None


@dataclass(frozen=True)
class Command:
    """One verb of the command line, with its options and the function that runs it.

    Attributes:
        name: One or two words that follow ``unsilent`` on the command line.
        group: One of `GROUPS`.
        example: Example of a command line.
        option_classes: Dataclasses of the command's own options.
        run: Function that runs the command. It takes a request, and returns a `Result` or a report if ``has_report`` is true,
            and otherwise an exit code.
        has_report: Whether the result of ``run`` is printed and can be written to a page. The command then has the options for
            that.
        options_by_arguments: Function that returns further dataclasses of options, which depend on a file named on the command
            line.
        is_long: Whether ``run`` reports progress to the observer of the request. The command then has the option ``--quiet``.
        split_script: Function that divides the words after the name into the command's own and the arguments of a user's
            script.
        help_text: Help of the command; if empty, the docstring of ``run`` is the help.
    """

    name: str
    group: str
    example: str
    option_classes: tuple[type, ...]
    run: Callable[[Request], Any]
    has_report: bool = False
    options_by_arguments: Callable[[Sequence[str]], tuple[type, ...]] | None = None
    is_long: bool = False
    split_script: Callable[[Sequence[str]], tuple[list[str], tuple[str, ...]]] | None = None
    help_text: str = ""

    @property
    def help(self) -> str:
        """The help text of the command, whose first line is one sentence."""
        return self.help_text or inspect.cleandoc(self.run.__doc__ or "")

    def all_option_classes(self, arguments: Sequence[str] = ()) -> tuple[type, ...]:
        """Dataclasses of all options that the command has on the command line.

        ``arguments``: the words that follow the name of the command.
        """
        further = self.options_by_arguments(arguments) if self.options_by_arguments else ()
        shown = (PageOptions, DisplayOptions, ConfigOptions) if self.has_report else ()
        return *self.option_classes, *further, *shown, *((ProgressOptions,) if self.is_long else ())

    def call(self, **arguments: Any) -> Any:
        """Run `function` with these arguments and return its result."""
        return self.function()(**arguments)

    def function(self) -> Callable[..., Any]:
        """``run`` as a Python function whose arguments are the options and whose docstring is the help.

        Its error messages name arguments; those of the command name options.
        """

        def run(arguments: Mapping[str, Any]) -> Any:
            request = Request.from_call(self.option_classes, arguments)
            request.observer = arguments.get("observer")
            return self.run(request)

        name = self.name.replace(" ", "_").replace("-", "_")
        further = (OBSERVER,) if self.is_long else ()
        return option_function(name, run, self.option_classes, self.help, module=self.run.__module__, further=further)
