"""Replacements of the clocks of a process, which record their callers and are shifted or frozen.

Each further run gets a clock that is about a day later.

A frozen clock advances by a millisecond each time it is read, so that loops that wait for a time still end.
"""

from __future__ import annotations

import copyreg
import datetime
import importlib
import itertools
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from unsilent.basics.error_origin import calls_user_code

Replace = Callable[..., None]

_START = 1_700_000_000_000_000_000
_TICK = 1_000_000
_APART = 93_787_370_000_000
"""Nanoseconds between the clocks of two runs: 26 h 3 min 7.37 s, so that date, hour, minute and second all differ."""
_WALL = ("time",)
_SINCE = ("perf_counter", "monotonic", "process_time", "thread_time")
_datetime, _date = datetime.datetime, datetime.date
_REAL: dict[str, Any] = {"datetime": _datetime, "date": _date}


def replace_clocks(replace: Replace, pinned: bool, number: int) -> None:
    """Replace the functions that read a clock.

    ``replace(source, holder, name, call)`` puts a probe in the place of a function; ``number``: number of the run.
    """
    if find_spec("pandas") is not None:
        importlib.import_module("pandas")  # its compiled classes cannot be built from the classes that replace dates
    ticks, real = itertools.count(_START, _TICK), time.time_ns
    apart = number * _APART

    def wall() -> int:
        return next(ticks) if pinned else real() + apart

    for name in _WALL:
        replace("clock", time, name, lambda: wall() / 1e9)
        replace("clock", time, f"{name}_ns", wall)
    for name in _SINCE:
        if hasattr(time, name):
            replace("clock", time, name, (lambda: next(ticks) / 1e9) if pinned else None)
            replace("clock", time, f"{name}_ns", (lambda: next(ticks)) if pinned else None)
    for name, place in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("strftime", 1), ("asctime", 0)):
        _replace_formatting(replace, name, place, wall)
    _replace_dates(replace, wall)


def _replace_formatting(replace: Replace, name: str, place: int, wall: Callable[[], int]) -> None:
    """Replace a time function that reads the clock if its time argument is missing.

    ``place``: position of that argument.
    """
    plain, local = getattr(time, name), time.localtime

    @calls_user_code
    def call(*args: Any) -> Any:
        if len(args) > place and args[place] is not None:
            return plain(*args)
        now = wall() / 1e9
        return plain(*args[:place], local(now) if name in ("strftime", "asctime") else now)

    replace("clock", time, name, call)


def _replace_dates(replace: Replace, wall: Callable[[], int]) -> None:
    """Replace ``datetime.now()`` and similar methods.

    Their results are instances of the original classes.
    """

    class Clocked(type):
        """Metaclass that makes instances of the original date class count as instances of the replacement."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, _REAL[cls.__name__]) if cls in stands else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, _REAL[cls.__name__]) if cls in stands else type.__subclasscheck__(cls, subclass)

    stands: list[Any] = []
    for real in (_datetime, _date):
        stands.append(Clocked(real.__name__, (real,), {"__new__": _new(real, stands), "__module__": "datetime"}))
        # Pickle would not find the plain class under its name.
        copyreg.pickle(real, _reduce_to_made_value)
    stand, day = stands

    @calls_user_code
    def now(tz: Any = None) -> Any:
        return _datetime.fromtimestamp(wall() / 1e9, tz)

    @calls_user_code
    def utcnow() -> Any:
        return _datetime.fromtimestamp(wall() / 1e9, datetime.UTC).replace(tzinfo=None)

    for name, call in (("now", now), ("utcnow", utcnow), ("today", now)):
        replace("clock", stand, name, call)
    replace("clock", day, "today", lambda: _date.fromtimestamp(wall() / 1e9))
    datetime.datetime, datetime.date = stand, day  # type: ignore[misc]


def _new(real: Any, stands: list[Any]) -> Callable[..., Any]:
    """A ``__new__`` that makes instances of the original class, or of a class that the user has derived."""

    @calls_user_code
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return real.__new__(real if cls in stands else cls, *args, **kwargs)

    return new


def _reduce_to_made_value(value: Any) -> tuple[Any, ...]:
    return _made, (type(value).__name__, *value.__reduce__()[1])


def _made(name: str, *parts: Any) -> Any:
    return _REAL[name](*parts)
