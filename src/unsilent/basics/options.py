"""Options of commands and functions, declared once on the fields of frozen dataclasses.

``trials: Annotated[int, Option("Trials of each target.", PRECISION)] = 1000`` is an option of the command line, a key of a TOML
file and an argument of a Python function. A field marked `NOT_AN_OPTION` is not an option; it is derived from other fields.
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

from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.basics.plainfiles import parse_toml, read_plain

T = TypeVar("T")
PANELS = ("Workload", "Faults", "Precision", "Execution", "Output")
"""Panels of the help, in this order."""
WORKLOAD_PANEL, FAULTS_PANEL, PRECISION_PANEL, EXECUTION_PANEL, OUTPUT_PANEL = PANELS
NOT_AN_OPTION = "internal"
"""Mark of a field that users cannot set."""
MOST_BYTES = 2**20
"""Largest TOML file of options that is read, in bytes."""
LARGEST = 2**63 - 1
"""Largest whole number, as a store can hold it."""
LONGEST_SHOWN = 256
"""Most bits of a number that is written in full in a message."""
_NOUNS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", Path: "a file name"}
_METAVARS = {int: "<int>", float: "<float>", Path: "<path>"}
_BY_FIELD = object()


@dataclass(frozen=True)
class Option:
    """Description of an option of a command: how a dataclass field is shown and parsed.

    Attributes:
        help: One or two sentences.
        panel: Heading of the option in the help.
        name: Name of the option; empty: the name of the field.
        default_text: Text of the default in the help; empty: the field's default.
        unset_value: Value of an option that was not given, if it differs from the field's default.
        parser: Function that converts the given value; None: conversion by the type of the field.
        formatter: Inverse of ``parser``; returns one text for each time that the option is given.
        is_repeatable: Whether the option may be given more than once.
        separator: Separator of several whole numbers.
        short_flag: Short name on the command line.
        missing_error: Error message if a required positional argument is missing; empty: the option is not required.
        is_argument: Whether the option is a positional argument of the command, in the order of the fields.
        metavar: Placeholder of the value in the help (empty: the type), or the name of a positional argument.
    """

    help: str
    panel: str
    name: str = ""
    default_text: str = ""
    unset_value: Any = _BY_FIELD
    parser: Callable[[Any], Any] | None = None
    formatter: Callable[[Any], Sequence[str]] | None = None
    is_repeatable: bool = False
    separator: str = ""
    short_flag: str = ""
    missing_error: str = ""
    is_argument: bool = False
    metavar: str = ""


CONFIDENCE = Option("Confidence level of every interval.", PRECISION_PANEL)


@dataclass(frozen=True)
class OptionField:
    """An option and its field: ``hint`` is the field's type, ``default`` its value if the option is not given."""

    option: Option
    field: str
    hint: Any
    default: Any

    @property
    def option_name(self) -> str:
        """The name on the command line, without leading dashes, and in a TOML file."""
        return self.option.name or self.field.replace("_", "-")

    @property
    def python_name(self) -> str:
        """The name of the argument in Python."""
        name = self.option_name.replace("-", "_")
        return self.field if keyword.iskeyword(name) else name

    @property
    def is_argument(self) -> bool:
        """Whether it is a positional argument of the command."""
        return self.option.is_argument or bool(self.option.missing_error)

    @property
    def flag(self) -> str:
        """The name as shown on the command line: ``--with``, or ``WORKLOAD`` for a positional argument."""
        return self.option.metavar or self.option_name.upper() if self.is_argument else f"--{self.option_name}"

    @property
    def is_boolean(self) -> bool:
        """Whether the option is a flag without a value."""
        return self.hint is bool

    @property
    def default_text(self) -> str:
        """The default as shown in help; empty if there is none to show."""
        is_nothing = self.default is None or self.default is False or self.default == ()
        return self.option.default_text or ("" if is_nothing else " ".join(self.format_value(self.default)))

    @property
    def help_text(self) -> str:
        """The help text of the option, with its default."""
        return f"{self.option.help} [default: {self.default_text}]" if self.default_text else self.option.help

    @property
    def metavar(self) -> str:
        """The placeholder of the value in help; empty if the option has none."""
        if self.is_boolean:
            return ""
        hints = (self.hint, *typing.get_args(self.hint))
        is_plain = not (self.option.parser or self.option.separator)
        typed = next((name for hint, name in _METAVARS.items() if is_plain and hint in hints), "<str>")
        return typed if self.is_argument else self.option.metavar or typed

    @property
    def argument_hint(self) -> Any:
        """The type hint of the option as a function argument, for values that `parse_value` accepts."""
        hint = Any if self.option.parser is None else _argument_hint(self.option.parser)
        if hint is Any:
            hint = self.hint
            if self.option.separator:
                hint = int | str | Sequence[int]
            elif typing.get_origin(hint) is tuple:
                hint = str | Sequence[str]
            elif Path in (hint, *typing.get_args(hint)):
                hint = str | hint
        return hint | None if self.default is None and not self.option.missing_error else hint

    def parse_value(self, value: Any, name: str, *, typed: bool = False) -> Any:
        """Convert a given value to the field's type; raises ``UsageError`` that calls the option ``name``.

        ``typed``: whether the value already has a type (in Python or TOML), so that a text is not read as a number.
        """
        if self.option.parser is not None:
            return self.option.parser(value)
        if self.option.separator:
            return _numbers(value, self.option.separator, name, typed)
        if self.option.is_repeatable:
            items = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
            return tuple(_plain(item, Path if Path in typing.get_args(self.hint) else str, name) for item in items)
        return _plain(value, self.hint, name, typed)

    def format_value(self, value: Any) -> list[str]:
        """Convert a field's value back to texts, one for each time that the option is given."""
        if self.option.formatter is not None:
            return list(self.option.formatter(value))
        if self.option.separator:
            return [self.option.separator.join(map(str, value))]
        values = value if self.option.is_repeatable else [value]
        return [f"{item:.15g}" if isinstance(item, float) else str(item) for item in values]


def _argument_hint(parser: Callable[[Any], Any]) -> Any:
    """The type of a parser's argument; `Any` if it has no hint or the hint cannot be resolved."""
    try:
        hints = typing.get_type_hints(parser)
    except NameError:
        return Any
    return next((hint for name, hint in hints.items() if name != "return"), Any)


def _plain(value: Any, hint: Any, name: str, typed: bool = False) -> Any:
    """Convert a value to a simple type, or to None if the type allows it; raises ``UsageError``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(member for member in typing.get_args(hint) if member is not type(None))
    try:
        if hint is bool and isinstance(value, bool):
            return value
        if hint in (str, Path) and isinstance(value, str | PathLike):
            return hint(fspath(value))
        if hint is int and isinstance(value, Integral if typed else str | Integral) and not isinstance(value, bool):
            number = int(value)
            if abs(number) <= LARGEST:
                return number
            raise UsageError(
                f"{name} is {_number_text(number)}; expected a whole number of at most {LARGEST.bit_length()} bits"
            )
        if hint is float and isinstance(value, Real if typed else str | Real) and not isinstance(value, bool):
            real = float(value)
            return real if math.isfinite(real) else _refuse(value, hint, name)
    except (ValueError, TypeError, OverflowError):
        pass
    return _refuse(value, hint, name)


def _refuse(value: Any, hint: Any, name: str) -> NoReturn:
    raise wrong_value_error(name, value, _NOUNS[hint])


def check_path(name: str, value: Any) -> Path:
    """Convert a value to a path; raises ``UsageError`` if it is not a path."""
    return Path(_plain(value, Path, name))


def check_count(name: str, value: Any, least: int, most: int = LARGEST) -> int:
    """Check that a value is a whole number within these limits and return it; raises ``UsageError``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise wrong_value_error(name, value, f"a whole number, {least} or more")
    number = int(value)
    if least <= number <= most:
        return number
    limit = f", and at most {most}" if number > most else ""
    raise UsageError(f"{name} is {_number_text(number)}; expected {least} or more{limit}")


def check_confidence(confidence: float) -> None:
    """Raise ``UsageError`` unless the value is a valid confidence level."""
    if not isinstance(confidence, Real) or not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence is {confidence!r}; expected a value from 0.5 to below 1, like 0.95")


def _number_text(value: int) -> str:
    """A number as text for a message; numbers with thousands of digits are shortened."""
    return str(value) if value.bit_length() < LONGEST_SHOWN else f"a number of {value.bit_length()} bits"


def _numbers(value: Any, separator: str, name: str, typed: bool) -> tuple[int, ...]:
    text = isinstance(value, str)
    items = value.split(separator) if text else [value] if isinstance(value, Integral) else value
    try:
        return tuple(_plain(item, int, name, typed and not text) for item in items)
    except (UsageError, TypeError):
        like = separator.join("28" if separator == "," else "24")
        raise UsageError(
            f"{name} is {value!r}; expected whole numbers separated by {separator!r}, like {like}"
        ) from None


def check_option_fields(cls: type, needs_defaults: bool = True) -> None:
    """Raise ``UsageError`` if a field of a dataclass cannot be given on the command line.

    Args:
        needs_defaults: Whether fields that are not options must have a default.
    """
    hints, options = typing.get_type_hints(cls, include_extras=True), options_of(cls)
    for field in fields(cls):
        name = f"{cls.__name__}.{field.name}"
        if field.name not in options:
            if NOT_AN_OPTION not in getattr(hints[field.name], "__metadata__", ()):
                raise UsageError(
                    f"{name} has no Option; expected Annotated[TYPE, Option(…)] or Annotated[TYPE, NOT_AN_OPTION]"
                )
            if needs_defaults and field.default is MISSING and field.default_factory is MISSING:
                raise UsageError(
                    f"{name} is not an option and has no default; give it one, or give the kind a resolve_spec"
                )
        elif options[field.name].option.parser is None and not _can_be_parsed(options[field.name]):
            hint = options[field.name].hint
            raise UsageError(f"{name} has type {getattr(hint, '__name__', hint)}; expected {SUPPORTED_TYPES}")


SUPPORTED_TYPES = (
    "int, float, str, bool, Path, one of these but bool or None, tuple[int, ...] with a separator, "
    "tuple[str, ...] with is_repeatable=True, or an Option with a parser"
)


def _can_be_parsed(asking: OptionField) -> bool:
    """Whether the option's texts can be converted to the field's type without a custom parser."""
    if asking.option.separator or asking.option.is_repeatable:
        item = int if asking.option.separator else str
        items = set(typing.get_args(asking.hint)) - {...}
        known = {item, item | None, Path} if asking.option.is_repeatable else {item, item | None}
        return typing.get_origin(asking.hint) is tuple and items <= known and bool(items)
    hints = [asking.hint]
    if typing.get_origin(asking.hint) in (typing.Union, types.UnionType):
        hints = [hint for hint in typing.get_args(asking.hint) if hint is not types.NoneType]
        return len(hints) == 1 and hints[0] in _NOUNS and hints[0] is not bool
    return hints[0] in _NOUNS


def options_of(*classes: type) -> Mapping[str, OptionField]:
    """The options of some dataclasses, by field name."""
    by_name: dict[str, OptionField] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            hint = hints[field.name]
            option = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Option)), None)
            if option is not None:
                factory = field.default_factory
                field_default = (
                    factory() if factory is not MISSING else None if field.default is MISSING else field.default
                )
                default = field_default if option.unset_value is _BY_FIELD else option.unset_value
                by_name[field.name] = OptionField(option, field.name, hint.__origin__, default)
    return by_name


class Request:
    """Given options of some dataclasses; ``request[Spec]`` is the dataclass ``Spec`` with its options.

    Attributes:
        options: Options of all the dataclasses.
        given_values: Values of the options that were given.
        script: Arguments of the user's script.
        observer: Object that receives progress; None: no progress is reported.
    """

    script: tuple[str, ...] = ()
    observer: Any = None

    def __init__(self, classes: Sequence[type], given: Mapping[str, Any] | None = None, call: bool = False) -> None:
        """``given``: texts of a command line, or (``call``) arguments of a function, where the default counts as not given."""
        self.options = options_of(*classes)
        self._call = call
        self.given_values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            default = self.options[name].default
            if call and _equal(value, default):
                continue
            read = self.options[name].parse_value(value, self._option_or_argument_name(name), typed=call)
            if not (call and _equal(read, default)):
                self.given_values[name] = read

    @classmethod
    def from_call(cls, classes: Sequence[type], arguments: Mapping[str, Any]) -> Request:
        """The options that are given as arguments of a function; other arguments are ignored."""
        field_names = {asking.python_name: name for name, asking in options_of(*classes).items()}
        values = {field_names[name]: value for name, value in arguments.items() if name in field_names}
        return cls(classes, values, call=True)

    def _option_or_argument_name(self, name: str) -> str:
        asking = self.options[name]
        return f"{asking.python_name}=" if self._call else asking.flag

    def read_toml(self, path: Path) -> None:
        """Add the options of a TOML file that were not given on the command line; raises ``UsageError``."""
        record = parse_toml(read_plain(path, MOST_BYTES), str(path))
        field_names = {asking.option_name: name for name, asking in self.options.items() if name != "config"}
        for key, value in record.items():
            if key.replace("_", "-") not in field_names:
                raise unknown_name_error(f"key in {path}:", key, field_names, limit=len(field_names))
            name = field_names[key.replace("_", "-")]
            read = self.options[name].parse_value(value, f"{path}: {key}", typed=True)
            if name not in self.given_values and not (self.options[name].is_boolean and not read):
                self.given_values[name] = read

    def refuse_given(self, names: Collection[str], why: str) -> None:
        """Raise ``UsageError`` if one of these options was given, because it would be ignored."""
        if ignored := [self._option_or_argument_name(name) for name in names if name in self.given_values]:
            raise UsageError(f"{why}: leave out {', '.join(ignored)}")

    def value(self, name: str) -> Any:
        """The given value of a field, or its default."""
        return self.given_values.get(name, self.options[name].default)

    def __getitem__(self, cls: type[T]) -> T:
        """An instance of a dataclass with the given options; raises ``UsageError`` if a required argument is missing."""
        options = options_of(cls)
        for name, asking in options.items():
            if asking.option.missing_error and name not in self.given_values:
                raise UsageError(asking.option.missing_error)
        return cls(**{name: value for name, value in self.given_values.items() if name in options})

    def command_line(self, verb: str, *classes: type) -> str:
        """The command line with the given options of these dataclasses; it always contains the seed."""
        arguments: list[str] = []
        words: list[str] = []
        for asking, value in self._named_values(classes):
            texts = asking.format_value(value)
            if asking.is_argument:
                arguments += texts
                continue
            for text in texts:
                words += [asking.flag] if asking.is_boolean else [asking.flag, text]
        return shlex.join(["unsilent", *verb.split(), *arguments, *words])

    def python_call(self, function: str, *classes: type) -> str:
        """The Python call with the given options of these dataclasses, for a workload that has no name as text."""
        words = []
        for asking, value in self._named_values(classes):
            if not asking.is_argument:
                words.append(f"{asking.python_name}={list(value) if isinstance(value, tuple) else value!r}")
        return f"unsilent.{function}({', '.join(['workload', *words])})"

    def _named_values(self, classes: Sequence[type]) -> list[tuple[OptionField, Any]]:
        names = [name for name in options_of(*classes) if name in self.given_values or name == "seed"]
        ordered = [self.options[name] for name in sorted(names, key=lambda name: name == "seed")]
        return [(asking, self.value(asking.field)) for asking in ordered]


def _equal(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))
