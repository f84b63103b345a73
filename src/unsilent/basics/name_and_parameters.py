"""Parsing of names with parameters, written ``name:key=value,key=value`` on the command line.

Fault models, judges and workloads are all re-created from such a text: a registry maps the name to a frozen dataclass
(or a function), the parameters are checked against its signature and converted by their annotations.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from unsilent.basics.errors import UsageError, check_name, wrong_value_error

T = TypeVar("T")


def parse_named(text: str) -> tuple[str, dict[str, str]]:
    """Split ``"name:a=1,b=x"`` into ``("name", {"a": "1", "b": "x"})``; raises ``UsageError`` on anything else."""
    name, _, rest = text.partition(":")
    params: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, eq, value = item.partition("=")
        if not eq or not key.strip():
            raise UsageError(f"cannot read {item!r} in {text!r}; expected name:key=value,key=value")
        if key.strip() in params:
            raise UsageError(f"{key.strip()!r} is given twice in {text!r}; give it once")
        params[key.strip()] = value.strip()
    return name.strip(), params


def build_named(noun: str, text: str, registry: Mapping[str, Callable[..., T]]) -> T:
    """Build the object described by ``text`` from a registry; ``noun`` is used in error messages."""
    if not isinstance(text, str):
        raise wrong_value_error(noun, text, "a string")
    name, params = parse_named(text)
    check_name(noun, name, registry)
    factory = registry[name]
    hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    accepted = [p for p in inspect.signature(factory).parameters if p in hints]
    arguments: dict[str, Any] = {}
    for key, value in params.items():
        check_name(f"parameter of {noun} {name!r}:", key, accepted)
        arguments[key] = convert(value, hints[key], f"{noun} {name!r}: {key}")
    return factory(**arguments)


def convert(text: str, hint: Any, what: str) -> Any:
    """Convert ``text`` to the annotated type (int, float, bool, str, tuples of them joined by ``+``, or None)."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [o for o in typing.get_args(hint) if o is not type(None)]
        if text.lower() == "none" and len(options) < len(typing.get_args(hint)):
            return None
        for option in options[:-1]:
            try:
                return convert(text, option, what)
            except UsageError:
                continue
        return convert(text, options[-1], what)
    if origin is tuple:
        return tuple(convert(part, typing.get_args(hint)[0], what) for part in text.split("+"))
    if hint is bool:
        if text.lower() in ("true", "yes", "1", "false", "no", "0"):
            return text.lower() in ("true", "yes", "1")
    elif hint is int:
        try:
            return int(text, 0)
        except ValueError:
            pass
    elif hint is float:
        try:
            return float(text)
        except ValueError:
            pass
    else:
        return text
    raise UsageError(f"{what} is {text!r}; expected a value of type {hint.__name__}")
