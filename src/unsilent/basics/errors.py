"""Errors that a user can meet.

UnsilentError            any error that this package raises on purpose
├── UsageError           bad input: one line with the value found, the value expected, and advice (exit code 2)
│   └── UserCodeError    the user's own file raised an error; contains the traceback, which is shown in a frame
├── Interrupted          a campaign was interrupted; the message says whether trials are stored (exit code 130)
├── InternalError        a defect of this package; contains the traceback, which should be reported (exit code 1)
├── InjectionError       a fault could not be applied, was applied the wrong number of times, or was not undone
│   └── ValueModelError  the user's function for new words raised an error or returned a wrong value (exit code 2)
├── ProcessUnusable      the model cannot be restored after an exception, or a fault-free run fails: trials need another process
└── StoreError           a campaign store is foreign, corrupt, locked, full, or contains another campaign (exit code 2)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from unsilent.basics.printable import escape_unprintable


class UnsilentError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(UnsilentError):
    """Bad input from the user; the message is one line: found, expected, what to do."""


class _WithTraceback(UnsilentError):
    """An error with a traceback as text, which it keeps when it comes from another process."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.traceback_text = trace

    def __reduce__(self) -> tuple[type[_WithTraceback], tuple[str, str]]:
        return type(self), (str(self), self.traceback_text)


class UserCodeError(_WithTraceback, UsageError):
    """An error raised by the user's own code; ``traceback_text`` is its traceback as text."""


class Interrupted(UnsilentError):
    """A campaign was interrupted; the message says whether trials are stored."""


class InternalError(_WithTraceback):
    """A defect of this package; ``traceback_text`` is the whole traceback as text."""


class InjectionError(UnsilentError):
    """A fault was not applied exactly as requested, or its undo did not restore the bits."""


class ValueModelError(InjectionError, UsageError):
    """The user's function for new words raised an error, returned a wrong value, or is missing."""


class ProcessUnusable(UnsilentError):
    """The process cannot run further trials, for example after a device-side assertion.

    Attributes:
        caused_by_trial: Whether the running trial certainly caused the error.
        while_preparing_shortcuts: Whether the error occurred during the preparation of the engine's shortcuts, so no trial
            caused it.
    """

    def __init__(self, reason: str, known: bool = False, shortcuts: bool = False) -> None:
        super().__init__(reason)
        self.caused_by_trial, self.while_preparing_shortcuts = known, shortcuts


class StoreError(UnsilentError):
    """A campaign store cannot be used."""


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, else its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def kind_and_line(error: BaseException) -> str:
    """Type and first line of an error: ``RuntimeError: CUDA error: device-side assert triggered``."""
    kind, text = type(error).__name__, " ".join(first_line(error).split())
    return escape_unprintable(kind if text == kind else f"{kind}: {text}")[:300]


def check_name(noun: str, name: object, known: Collection[str]) -> None:
    """Raise `unknown_name_error` for a name that does not exist."""
    if name not in known:
        raise unknown_name_error(noun, name, known)


@contextmanager
def system_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Context that turns an ``OSError`` into a ``UsageError``: the problem, the system's reason, and the advice."""
    try:
        yield
    except OSError as error:
        raise UsageError("; ".join(filter(None, (f"{problem}: {error.strerror or error}", advice)))) from None


@contextmanager
def content_errors(problem: str, advice: str, *kinds: type[Exception]) -> Iterator[None]:
    """Context that turns errors in reading a file into a ``UsageError``: the problem, their first line, and the advice.

    Args:
        kinds: Further error classes besides ``ValueError`` and ``RecursionError``.
    """
    caught: tuple[type[Exception], ...] = (ValueError, RecursionError, *kinds)
    try:
        yield
    except caught as error:
        raise UsageError(f"{problem}: {first_line(error)[:200]}; {advice}") from None


_MOST_SHOWN = 150
"""Most characters of one name in an error."""
_MOST_LISTED = 600
"""Most characters of all names in an error."""
_MOST_COMPARED = 10_000
"""Most names that are searched for the closest one, which takes about a second."""


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``add.2`` before ``add.10``."""
    return [(int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in re.split(r"(\d+)", name)]


def wrong_value_error(name: str, value: object, expected: str) -> UsageError:
    """The error for an argument of the wrong type or size, always in one line."""
    return UsageError(f"{name} is {escape_unprintable(repr(value))[:60]}; expected {expected}")


def unknown_name_error(noun: str, name: object, known: Iterable[str], limit: int = 20) -> UsageError:
    """The error for an unknown name, with the closest match first and then all known names.

    ``noun`` is the noun ("workload"), ``name`` the requested name, ``known`` the existing names (at most ``limit`` are listed).
    """
    name = name if isinstance(name, str) else escape_unprintable(repr(name))
    names = sorted(known, key=_natural)
    close = difflib.get_close_matches(name[:_MOST_SHOWN], names[:_MOST_COMPARED], n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    candidates = names[:limit]
    while len(candidates) > 1 and sum(map(len, candidates)) > _MOST_LISTED:
        candidates.pop()
    listed = ", ".join(map(_shortened_text, candidates)) + (
        f", … ({len(names)} in all)" if len(names) > len(candidates) else ""
    )
    return UsageError(
        f"unknown {noun} {_shortened_text(name)!r}{_shortened_text(hint) or '.'} Known: {listed or 'none'}."
    )


def missing_name_error(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that a module does not have, with the closest known name."""
    names = sorted(known)
    by_word = {word: known_name for known_name in names for word in known_name.split("_")}
    by_word |= {known_name: known_name for known_name in names}
    close = difflib.get_close_matches(name[:_MOST_SHOWN], by_word, n=1, cutoff=0.55)
    hint = f"; did you mean {by_word[close[0]]!r}?" if close else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def _shortened_text(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
