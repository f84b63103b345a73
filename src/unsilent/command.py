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
        name: Its words after ``unsilent``: one, or two.
        group: One of `GROUPS`.
        example: A command line.
        option_classes: Dataclasses of its own options.
        run: Does it. Takes what was asked, and returns a `Result` or a report where ``has_report``, else an exit code.
        has_report: Whether what ``run`` returns is printed and written to a page, with the options for that.
        options_by_arguments: Further dataclasses of options, which depend on a file that the words of the command line name.
        is_long: Whether ``run`` reports progress to ``asked.observer``, with the option ``--quiet``.
        split_script: Divides the words after its name into its own and the arguments of a script of the user's.
        help_text: Its help where that is not the docstring of ``run``.
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

        Its errors name arguments where those of the command name options.
        """

        def run(arguments: Mapping[str, Any]) -> Any:
            request = Request.from_call(self.option_classes, arguments)
            request.observer = arguments.get("observer")
            return self.run(request)

        name = self.name.replace(" ", "_").replace("-", "_")
        further = (OBSERVER,) if self.is_long else ()
        return option_function(name, run, self.option_classes, self.help, module=self.run.__module__, further=further)
