"""Errors of Python functions name arguments (``trials=``), where command-line errors name options (``--trials``)."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from unsilent.basics.errors import UnsilentError

P = ParamSpec("P")
T = TypeVar("T")
_OPTION = re.compile(r"(?<![\w'\"-])--([a-z]+(?:-[a-z]+)*)(?: (?=[\d'\"A-Z]|\w+:\w))?")
"""Pattern of an option, with the blank before a value; a lower-case word after it belongs to the sentence."""
RENAMED = {"with": "options"}
"""Options whose names are keywords in Python."""


def name_arguments_in(text: str, known: Collection[str] | None) -> str:
    """Replace ``--trials`` by ``trials=`` in a text, for these known arguments (None: any)."""

    def argument(match: re.Match[str]) -> str:
        name = RENAMED.get(match[1], match[1].replace("-", "_"))
        return f"{name}=" if known is None or name in known else match[0]

    return _OPTION.sub(argument, text)


def names_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that makes a function's errors name its arguments instead of command-line options.

    The checks are shared with the command and name its options. Other option names are unchanged: they belong to a command that
    the message recommends.
    """
    parameters = inspect.signature(function).parameters
    known = None if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()) else parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except UnsilentError as error:
            error.args = tuple(name_arguments_in(part, known) if isinstance(part, str) else part for part in error.args)
            raise

    return call
