"""Options as typer takes them: made from dataclasses of `unsilent.options`, and those that only verbs on stores have."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from unsilent.campaigns.options import read_pairs
from unsilent.errors import UsageError
from unsilent.options import OUTPUT_PANEL, PANELS, Option, OptionField, options_of
from unsilent.studies.pvf.spec import PvfSpec

_UNBROKEN = "\u2011"
"""A hyphen at which no line is broken."""
_METAVARS = {int: "<int>", float: "<float>", Path: "<path>"}


@dataclass(frozen=True)
class OutputOptions:
    """Where results go, and how they are shown."""

    store: Annotated[
        Path | None,
        Option(
            "File that stores the trials.", OUTPUT_PANEL, default_text="unsilent-VERB-….sqlite in the current folder"
        ),
    ] = None
    output: Annotated[
        Path | None,
        Option("Where to write the HTML page.", OUTPUT_PANEL, default_text="next to the store", short_flag="o"),
    ] = None
    as_json: Annotated[bool, Option("Print one JSON object on stdout, and nothing else.", OUTPUT_PANEL, "json")] = False
    plain: Annotated[bool, Option("Print without colours and boxes, for pipes and logs.", OUTPUT_PANEL)] = False
    quiet: Annotated[bool, Option("Do not show progress.", OUTPUT_PANEL)] = False
    dry_run: Annotated[
        bool, Option("Show what would run and how long it would take at most. No trial runs.", OUTPUT_PANEL)
    ] = False
    config: Annotated[Path | None, Option(
        "A TOML file with any of these options. The command line takes precedence.", OUTPUT_PANEL)] = None  # fmt: skip


def typer_parameter(asking: OptionField) -> Any:
    """What typer gets of an option."""
    text = f"{asking.option.help} [default: {asking.default_text}]" if asking.default_text else asking.option.help
    if asking.option.missing_error:
        return typer.Argument(help=text, metavar=asking.flag, show_default=False)
    hints = (asking.hint, *typing.get_args(asking.hint))
    plain = not (asking.option.parser or asking.option.separator)
    named = next((name for hint, name in _METAVARS.items() if plain and hint in hints), "<str>")
    metavar = None if asking.is_boolean else named
    letter = [f"-{asking.option.short_flag}"] if asking.option.short_flag else []
    return typer.Option(
        f"--{asking.option_name}",
        *letter,
        help=text,
        metavar=metavar,
        show_default=False,
        rich_help_panel=asking.option.panel,
    )


def make_typer_function(
    options: Mapping[str, OptionField], run: Callable[[dict[str, Any], Sequence[str]], int], about: str
) -> Callable[..., int]:
    """A function for typer with these options, that hands on those that were given, by field.

    ``run`` takes the arguments of a script, what follows ``--``, as well.
    """

    def verb(context: typer.Context, **values: Any) -> int:
        return run(given_values(values), context.obj or ())

    verb.__doc__ = about
    return with_options(verb, options)


def with_options(function: Callable[..., int], options: Mapping[str, OptionField]) -> Callable[..., int]:
    """The same function for typer, which has these options in the place of its parameter ``**values``."""

    @wraps(function)
    def verb(**values: Any) -> int:
        return function(**values)

    *own, _ = inspect.signature(function).parameters.values()
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in own]
    for name, asking in options.items():
        kind: Any = bool if asking.is_boolean else list[str] | None if asking.option.is_repeatable else str | None
        default = False if asking.is_boolean else None
        annotation = Annotated[kind, typer_parameter(asking)]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return verb


def given_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that were given."""
    return {name: value for name, value in values.items() if value is not None and value is not False}


class Panels(TyperCommand):
    """A command whose help has a section for each panel of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            title = getattr(param, "rich_help_panel", None)
            if record := param.get_help_record(ctx):
                title = title or ("Arguments" if isinstance(param, TyperArgument) else "Options")
                name, text = record
                panels.setdefault(title, []).append((name.replace("<list[Path]>", "<path>"), text))
        known = ("Arguments", *PANELS, "Options")
        order = ("Arguments", *(title for title in panels if title not in known), *known[1:])
        for title in sorted(panels, key=order.index):
            with formatter.section(title):
                formatter.write_dl([(name, text.replace("-", _UNBROKEN)) for name, text in panels[title]])

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_UNBROKEN, "-")


def _shared(cls: type, name: str) -> Any:
    return typer_parameter(options_of(cls)[name])


StoreOrCard = Annotated[
    Path,
    typer.Argument(
        metavar="STORE", help="A campaign store, a card, or events of a monitored training.", show_default=False
    ),
]
StoreFile = Annotated[Path, typer.Argument(metavar="STORE", help="A campaign store.", show_default=False)]
With = Annotated[list[str] | None, _shared(PvfSpec, "options")]
Json = Annotated[bool, _shared(OutputOptions, "as_json")]
Plain = Annotated[bool, _shared(OutputOptions, "plain")]
Quiet = Annotated[bool, _shared(OutputOptions, "quiet")]
Page = Annotated[Path | None, _shared(OutputOptions, "output")]
OUTPUT_FLAGS = ("--output", "-o")
Accelerator = Annotated[
    str | None,
    typer.Option(
        help="Show the fault models of this accelerator: nvdla, systolic, tensor-core or FILE.toml.", show_default=False
    ),
]


def reject_if_given(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise ``UsageError`` where one of these parameters of a verb was given and would be ignored."""
    words = {p.name: p.opts[0] if p.opts[0][0] == "-" else p.opts[0].upper() for p in context.command.params}
    given = [words[name] for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        raise UsageError(f"{why}: leave out {', '.join(given)}")


def parse_workload_options(items: list[str] | None) -> tuple[tuple[str, str], ...]:
    """What ``--with key=value`` says, sorted; raises ``UsageError``."""
    return read_pairs(items or ())
