"""Decision whether an error comes from the user's code or from a defect of this package.

The innermost frame outside libraries and the interpreter decides. If it belongs to this package, the error is ours, even if a
library that we called raised it. There are two exceptions, in which we only forward a call: functions marked with
`calls_user_code` (a user's model may consist only of library code), and code of this package that a library or the user's code
calls back to run an operation (a dispatch mode, a hook). A missing attribute of one of our objects is an error of the line that
reads the attribute, not of the ``__getattr__`` that raises it.
"""

from __future__ import annotations

import importlib
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from unsilent.basics.errors import InternalError, UserCodeError

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(kind))) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PASSING: set[CodeType] = set()
_ADVICE = "_unsilent_advice"


def calls_user_code(function: F) -> F:
    """Mark a function that only calls the user's code: errors raised in it are the user's."""
    _PASSING.add(function.__code__)
    return function


@calls_user_code
def call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user, whose errors then count as the user's."""
    return function(*args, **kwargs)


def is_user_error(error: BaseException, handler_frames: int) -> bool:
    """Whether an error comes from the user's code, files, models or data.

    ``handler_frames``: number of frames that belong to the error handling.
    """
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith(_PACKAGE):
        return True
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)][handler_frames:]
    while isinstance(error, AttributeError) and frames and frames[-1].co_name == "__getattr__":
        frames.pop()
    in_library = False
    while frames:
        code = frames.pop()
        if code in _PASSING:
            return True
        if not _in_package(code.co_filename):
            if not _library(code.co_filename):
                return True
            in_library = True
            continue
        while frames and _in_package(frames[-1].co_filename) and frames[-1] not in _PASSING:
            frames.pop()
        if not in_library or not frames:  # raised in our own line, or not in a callback
            return False
    return False


def advise_on_arguments(error: TypeError, advice: str) -> None:
    """Add advice to the error of a model called with the wrong number of arguments; ignore other errors."""
    if "positional argument" in str(error) and "forward" in str(error):
        setattr(error, _ADVICE, (advice,))


def user_code_error(ref: str, error: BaseException, noun: str = "workload") -> UserCodeError:
    """The error in the user's code ``ref``, with kind, message and the user's innermost line."""
    place = _place(error)
    where = f" ({os.path.basename(place.filename)}, line {place.lineno})" if place else ""
    advice = "".join(f"; {note}" for note in getattr(error, _ADVICE, ()))
    return UserCodeError(f"{noun} {ref!r} raised {_kind_and_text(error)}{where}{advice}", _trace(error))


def unexpected_error(error: BaseException) -> InternalError | UserCodeError:
    """Convert an uncaught error to a user's error or to an internal error, by its origin."""
    place = _place(error)
    if place is None or not is_user_error(error, 0):
        return internal_error(error)
    problem = f"{place.filename}, line {place.lineno}, raised {_kind_and_text(error)}"
    return UserCodeError(f"{problem}; this file is not part of unsilent, so correct it there", _trace(error))


def _kind_and_text(error: BaseException) -> str:
    """The type of an error, and the first line of its message."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def _place(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost traceback line in the user's code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _hidden(f.filename)]
    return next((f for f in reversed(frames) if not _library(f.filename)), frames[-1] if frames else None)


def internal_error(error: BaseException) -> InternalError:
    """Convert an error of this package to an ``InternalError`` with the whole traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _in_package(f.filename)]
    where = f" ({frames[-1].filename.removeprefix(_PACKAGE)}, line {frames[-1].lineno})" if frames else ""
    problem = f"internal error of unsilent: {_kind_and_text(error)}{where}"
    trace = "".join(traceback.format_exception(error))
    return InternalError(f"{problem}; please report it together with the traceback", trace)


def _trace(error: BaseException) -> str:
    """The traceback of a chain of errors as text, without frames of this package and the import machinery."""
    top = traceback.TracebackException.from_exception(error)
    todo = [top]
    while todo:
        part = todo.pop()
        part.stack = traceback.StackSummary.from_list([f for f in part.stack if not _hidden(f.filename)])
        todo += [p for p in (part.__cause__, part.__context__) if p is not None]
    return "".join(top.format())


def _in_package(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def _library(filename: str) -> bool:
    """Whether a file belongs to an installed package or the standard library, or is generated code."""
    typed = filename.startswith(("<stdin", "<ipython", "<python-input", "<doctest"))
    return not typed and (filename.startswith((*_LIBRARIES, "<")) or f"{os.sep}site-packages{os.sep}" in filename)


def _hidden(filename: str) -> bool:
    """Whether frames of a file are hidden from users: this package, the import machinery, torch."""
    if _in_package(filename) or filename.startswith("<frozen importlib") or filename == importlib.__file__:
        return True
    return f"{os.sep}site-packages{os.sep}torch{os.sep}" in filename
