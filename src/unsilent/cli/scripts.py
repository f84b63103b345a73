"""Shared functions of commands that run a user's script with its own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from unsilent.basics.errors import UsageError
from unsilent.basics.options import EXECUTION_PANEL, Option, Request, options_of

if TYPE_CHECKING:
    from unsilent.launch.program import Program


@dataclass(frozen=True)
class ScriptOptions:
    """Options that name the script or module to run."""

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


def asked_program(request: Request, command: str) -> Program:
    """The program that the options name; raises ``UsageError`` if they name none."""
    from unsilent.launch.program import Program

    options = request[ScriptOptions]
    name = options.script or options.module
    if name is None:
        raise UsageError(
            f"no script was given; expected unsilent {command} [OPTIONS] SCRIPT ARGUMENTS, or -m MODULE ARGUMENTS"
        )
    return Program(name, request.script, is_module=options.script is None)


def split_at_script(option_classes: Sequence[type], arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words up to and including the script or module, and the arguments of the script."""
    switches = {asking.flag for asking in options_of(*option_classes).values() if asking.is_boolean} | {"-h", "--help"}
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


def _has_value(word: str) -> bool:
    """Whether a word is a short option joined with its value, such as ``-mNAME``."""
    return not word.startswith("--") and len(word) > len("-m")
