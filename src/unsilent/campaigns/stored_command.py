"""The command line in a store, whose options are the defaults for later reports on that store."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar

from unsilent.basics.errors import StoreError, UsageError
from unsilent.basics.options import OptionField, Request, options_of
from unsilent.campaigns.store import AnyStore

T = TypeVar("T")
MOST_CALL = 10_000
"""Most characters of a call in Python."""


def stored_options(store: AnyStore, cls: type[T]) -> T:
    """The options of a dataclass as given by the command in a store, else their defaults.

    Raises ``StoreError`` if they cannot be read.
    """
    command = store.largest_budget()[1]
    words, kind = _command_words(command), store.kind
    unknown_words = _command_words(without_options(command, *kind.option_classes, kind.report_options))
    if removed := [word for word in unknown_words if word.startswith("--")]:
        raise store.other_options_error(", ".join(removed))
    try:
        if not words:
            return Request.from_call([cls], _call_arguments(command))[cls]
        return Request([cls], dict(given_options(words, options_of(cls))))[cls]
    except UsageError as error:
        raise StoreError(f"{store.path} names a command that cannot be used ({error}); restore a copy") from None


def without_options(command: str, *classes: type) -> str:
    """The command line without the options of some dataclasses.

    A call in Python is returned unchanged.
    """
    words, options = _command_words(command), options_of(*classes)
    if not words:
        return command
    left: list[str] = []
    while words:
        word = words.pop(0)
        option = _option(word, options)
        if option is None:
            left.append(word)
        elif not option.is_boolean:
            del words[:1]
    return shlex.join(left)


def _call_arguments(command: str) -> dict[str, Any]:
    """The literal keyword arguments of a Python call, which is parsed but not executed.

    The result is empty for any other text.
    """
    if len(command) > MOST_CALL:
        return {}
    try:
        call = ast.parse(command, mode="eval").body
        return {word.arg: ast.literal_eval(word.value) for word in getattr(call, "keywords", ()) if word.arg}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return {}


def _command_words(command: str) -> list[str]:
    """The words of an ``unsilent`` command line; empty for any other text, such as a call in Python."""
    words = shlex.split(command)
    return words if words[:1] == ["unsilent"] else []


def given_options(words: list[str], options: Mapping[str, OptionField]) -> Iterator[tuple[str, Any]]:
    """The options among the words, as pairs of field name and text."""
    texts: dict[str, list[str]] = {}
    for word, value in pairwise([*words, ""]):
        option = _option(word, options)
        if option is not None and option.is_boolean:
            yield option.field, True
        elif option is not None:
            texts.setdefault(option.field, []).append(value)
    for name, values in texts.items():
        yield name, values if options[name].option.is_repeatable else values[-1]


def _option(word: str, options: Mapping[str, OptionField]) -> OptionField | None:
    return next((option for option in options.values() if option.flag == word), None)
