"""Conversion of commands and options to typer's, and the overview of all commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from unsilent.basics.options import PANELS, OptionField, options_of
from unsilent.cli.running import run_command
from unsilent.cli.table import PYTHON_FUNCTIONS, summaries
from unsilent.command import GROUPS, Command

SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_UNBROKEN = "\u2011"
"""A hyphen at which no line is broken."""


def make_command_app(command: Command, arguments: Sequence[str] = ()) -> typer.Typer:
    """The typer application of one command.

    ``arguments`` are the words that follow its name.
    """
    options = options_of(*command.all_option_classes(arguments))

    def function(context: typer.Context, **values: Any) -> int:
        given_values = {name: value for name, value in values.items() if value is not None and value is not False}
        return run_command(command, given_values, arguments, context.obj or ())

    function.__doc__ = f"{command.help.strip()}\n\nExample: {command.example}"
    app = typer.Typer(**SETTINGS | {"no_args_is_help": False})
    app.command(command.name, cls=Panels)(_with_options(function, options))
    return app


def make_overview_app(first_word: str, root: Callable[..., None]) -> typer.Typer:
    """The typer application that lists all commands, or those whose name begins with ``first_word``."""
    app = typer.Typer(**SETTINGS, cls=Overview)
    if first_word:
        app.callback(help=f"The commands of unsilent {first_word}.")(root)
    else:
        app.callback()(root)
    for group, name, text in summaries(first_word):
        app.command(name.removeprefix(f"{first_word} "), short_help=text, rich_help_panel=group)(root)
    return app


def typer_parameter(asking: OptionField) -> Any:
    """The typer parameter for an option."""
    if asking.is_argument:
        return typer.Argument(help=asking.help_text, metavar=asking.flag, show_default=False)
    letter = [f"-{asking.option.short_flag}"] if asking.option.short_flag else []
    return typer.Option(
        f"--{asking.option_name}",
        *letter,
        help=asking.help_text,
        metavar=asking.metavar or None,
        show_default=False,
        rich_help_panel=asking.option.panel,
    )


def _with_options(function: Callable[..., int], options: Mapping[str, OptionField]) -> Callable[..., int]:
    """The function with a signature for typer, in which the options replace ``**values``."""
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context]
    for name, asking in options.items():
        kind: Any = bool if asking.is_boolean else list[str] | None if asking.option.is_repeatable else str | None
        default = False if asking.is_boolean else None
        annotation = Annotated[kind, typer_parameter(asking)]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


class Panels(TyperCommand):
    """A typer command whose help has a section for each panel of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            title = getattr(param, "rich_help_panel", None)
            if record := param.get_help_record(ctx):
                title = title or ("Arguments" if isinstance(param, TyperArgument) else "Options")
                panels.setdefault(title, []).append(record)
        known = ("Arguments", *PANELS, "Options")
        order = ("Arguments", *(title for title in panels if title not in known), *known[1:])
        for title in sorted(panels, key=order.index):
            _write_section(formatter, title, panels[title])

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_UNBROKEN, "-")


class Overview(TyperGroup):
    """A typer group whose help lists the commands by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for name, command in self.commands.items():
            groups[str(getattr(command, "rich_help_panel", ""))].append((name, command.short_help or ""))
        width = max((len(name) for rows in groups.values() for name, _ in rows), default=0)
        if "pvf" in self.commands:  # all commands, not those that begin with one word
            groups["In Python"] = list(PYTHON_FUNCTIONS.items())
        for group, rows in groups.items():
            if rows:
                _write_section(formatter, group, [(name.ljust(width), text) for name, text in rows])

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_UNBROKEN, "-")


def _write_section(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    with formatter.section(title):
        formatter.write_dl([(name, text.replace("-", _UNBROKEN)) for name, text in rows])
