"""Options: what may be asked, said once on the fields of frozen dataclasses.

``trials: Annotated[int, Option("Trials of each target.", PRECISION)] = 1000`` is an option of the command line, a key of a TOML
file and an argument of a Python function. A field that is marked `INTERNAL` is none: it is derived from others.
"""

from __future__ import annotations

import keyword
import math
import shlex
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from unsilent.errors import UsageError, first_line, unknown
from unsilent.plainfiles import read_plain

T = TypeVar("T")
RUNS, FAULTS, PRECISION, MEANS, OUTPUT = "What runs", "Faults", "How precise", "How it runs", "Output"
"""Panels of the help, in this order."""
PANELS = (RUNS, FAULTS, PRECISION, MEANS, OUTPUT)
INTERNAL = "internal"
"""Marks a field that nobody asks for."""
MOST_BYTES = 2**20
"""Of a TOML file."""
_NOUNS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "the name of a file"}
_BY_FIELD = object()


@dataclass(frozen=True)
class Option:
    """How a field is asked for.

    Attributes:
        help: one or two sentences. panel: the heading that it stands under. name: of the option; empty: the field's.
        usual: what help shows as the default, where that is not the field's own.
        unasked: stands for nothing said, where something else than the field's default decides then.
        read: makes the value from what was given; None: by the type of the field. write: the reverse, a text for each time that
            the option is given. repeated: whether it may be given more than once. joined: what stands between whole numbers.
        letter: a short name on the command line.
        missing: makes it the argument of the command; the error where it is not given.
    """

    help: str
    panel: str
    name: str = ""
    usual: str = ""
    unasked: Any = _BY_FIELD
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Sequence[str]] | None = None
    repeated: bool = False
    joined: str = ""
    letter: str = ""
    missing: str = ""


CONFIDENCE = Option("Confidence of every interval.", PRECISION)


@dataclass(frozen=True)
class Asking:
    """An option and its field: ``hint`` is the field's type, ``default`` what nothing said means."""

    option: Option
    field: str
    hint: Any
    default: Any

    @property
    def key(self) -> str:
        """The name on the command line, without dashes in front, and in a TOML file."""
        return self.option.name or self.field.replace("_", "-")

    @property
    def argument(self) -> str:
        """The name in Python."""
        name = self.key.replace("-", "_")
        return self.field if keyword.iskeyword(name) else name

    @property
    def flag(self) -> str:
        """As a command is written: ``--with``, or ``WORKLOAD`` for its argument."""
        return self.key.upper() if self.option.missing else f"--{self.key}"

    @property
    def switch(self) -> bool:
        """Whether it is on or off."""
        return self.hint is bool

    @property
    def usual(self) -> str:
        """What help shows as the default; empty where that is nothing."""
        return self.option.usual or ("" if self.default in (None, False, ()) else " ".join(self.written(self.default)))

    def value(self, given: Any, name: str) -> Any:
        """The value of the field; raises ``UsageError``, where it is called ``name``."""
        if self.option.read is not None:
            return self.option.read(given)
        if self.option.joined:
            return _numbers(given, self.option.joined, name)
        if self.option.repeated:
            items = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
            return tuple(_plain(item, str, name) for item in items)
        return _plain(given, self.hint, name)

    def written(self, value: Any) -> list[str]:
        """The reverse: texts, one for each time that the option is given."""
        if self.option.write is not None:
            return list(self.option.write(value))
        if self.option.joined:
            return [self.option.joined.join(map(str, value))]
        return [f"{v:.15g}" if isinstance(v, float) else str(v) for v in (value if self.option.repeated else [value])]


def _plain(given: Any, hint: Any, name: str) -> Any:
    """A value of a simple type, or None where that is one; raises ``UsageError``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if given is None:
            return None
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    try:
        if hint is bool and isinstance(given, bool):
            return given
        if hint in (str, Path) and isinstance(given, str | PathLike):
            return hint(fspath(given))
        if hint is int and isinstance(given, str | Integral) and not isinstance(given, bool):
            return int(given)
        if hint is float and isinstance(given, str | Real) and not isinstance(given, bool):
            number = float(given)
            return number if math.isfinite(number) else _refuse(given, hint, name)
    except (ValueError, TypeError, OverflowError):
        pass
    return _refuse(given, hint, name)


def _refuse(given: Any, hint: Any, name: str) -> NoReturn:
    raise UsageError(f"{name} is {given!r}; expected {_NOUNS[hint]}")


def _numbers(given: Any, joined: str, name: str) -> tuple[int, ...]:
    items = given.split(joined) if isinstance(given, str) else [given] if isinstance(given, Integral) else given
    try:
        return tuple(_plain(item, int, name) for item in items)
    except (UsageError, TypeError):
        like = joined.join("28" if joined == "," else "24")
        raise UsageError(f"{name} is {given!r}; expected whole numbers joined by {joined!r}, like {like}") from None


def options_of(*classes: type) -> Mapping[str, Asking]:
    """The options of some dataclasses, by field."""
    by_name: dict[str, Asking] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            hint = hints[field.name]
            option = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Option)), None)
            if option is not None:
                made = field.default_factory
                own = made() if made is not MISSING else None if field.default is MISSING else field.default
                default = own if option.unasked is _BY_FIELD else option.unasked
                by_name[field.name] = Asking(option, field.name, hint.__origin__, default)
    return by_name


class Asked:
    """What was asked of some dataclasses, by field; of what was not, the defaults.

    Attributes:
        options: all there are. given: values of those that were asked.
    """

    def __init__(self, classes: Sequence[type], given: Mapping[str, Any] | None = None, call: bool = False) -> None:
        """``given``: texts of a command line, or (``call``) arguments of a function, where the default counts as not given."""
        self.options = options_of(*classes)
        self._call = call
        self.given: dict[str, Any] = {}
        for name, value in (given or {}).items():
            default = self.options[name].default
            if call and _equal(value, default):
                continue
            read = self.options[name].value(value, self._named(name))
            if not (call and _equal(read, default)):
                self.given[name] = read

    @classmethod
    def in_call(cls, classes: Sequence[type], arguments: Mapping[str, Any]) -> Asked:
        """What the arguments of a function ask, those of other names left out."""
        own = {asking.argument: name for name, asking in options_of(*classes).items()}
        return cls(classes, {own[name]: value for name, value in arguments.items() if name in own}, call=True)

    def _named(self, name: str) -> str:
        asking = self.options[name]
        return asking.argument if self._call else asking.flag

    def read_file(self, path: Path) -> None:
        """Take what a TOML file asks and the command line does not; raises ``UsageError``."""
        import tomllib

        try:
            record = tomllib.loads(read_plain(path, MOST_BYTES).decode())
        except (ValueError, RecursionError) as error:
            raise UsageError(f"cannot read {path} as TOML: {first_line(error)}") from None
        own = {asking.key: name for name, asking in self.options.items() if name != "config"}
        for key, value in record.items():
            if key.replace("_", "-") not in own:
                raise unknown(f"key of {path}", key, own, limit=len(own))
            name = own[key.replace("_", "-")]
            read = self.options[name].value(value, f"{path}: {key}")
            if name not in self.given and not (self.options[name].switch and not read):
                self.given[name] = read

    def __getitem__(self, name: str) -> Any:
        return self.given[name] if name in self.given else self.options[name].default

    def refuse(self, names: Collection[str], why: str) -> None:
        """Raise ``UsageError`` where one of these was given and would be ignored."""
        if given := [self._named(name) for name in names if name in self.given]:
            raise UsageError(f"{why}: leave out {', '.join(given)}")

    def make(self, cls: type[T]) -> T:
        """One of the dataclasses, with what was asked; raises ``UsageError`` where the argument of the command is missing."""
        own = options_of(cls)
        for name, asking in own.items():
            if asking.option.missing and name not in self.given:
                raise UsageError(asking.option.missing)
        return cls(**{name: value for name, value in self.given.items() if name in own})

    def command(self, verb: str, *classes: type) -> str:
        """The command line that asks for this, of these dataclasses; the seed is named in any case."""
        argument, words = [], []
        for asking, value in self._said(classes):
            texts = asking.written(value)
            if asking.option.missing:
                argument = texts
            else:
                words += [word for text in texts for word in ([asking.flag] if asking.switch else [asking.flag, text])]
        return shlex.join(["unsilent", verb, *argument, *words])

    def call(self, function: str, *classes: type) -> str:
        """The same as a call in Python, of an argument that no text can name."""
        words = [
            f"{asking.argument}={list(value) if isinstance(value, tuple) else value!r}"
            for asking, value in self._said(classes)
            if not asking.option.missing
        ]
        return f"unsilent.{function}({', '.join(['workload', *words])})"

    def _said(self, classes: Sequence[type]) -> list[tuple[Asking, Any]]:
        names = [name for name in options_of(*classes) if name in self.given or name == "seed"]
        return [(self.options[name], self[name]) for name in sorted(names, key=lambda name: name == "seed")]


def _equal(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))
