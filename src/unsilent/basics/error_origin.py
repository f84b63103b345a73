"""Whether an error is the user's or a defect of this package.

The frame that decides is the innermost one that is neither a library's nor the interpreter's. Where it is one of ours, the
error is ours, also when a library that we called raised it. Two exceptions, in which we only pass a call on: functions
marked with `calls_user_code` (a user's model may consist of library code alone), and code of ours that a library or the
user's code calls back to run an operation (a dispatch mode, a hook). A name that an object of ours does not have is the error
of the line that asked for it, not of the ``__getattr__`` that says so.
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
    """Mark a function that does nothing but call what the user gave: what is raised in it is the user's error."""
    _PASSING.add(function.__code__)
    return function


@calls_user_code
def call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call what the user gave."""
    return function(*args, **kwargs)


def is_user_error(error: BaseException, handler_frames: int) -> bool:
    """Whether an error is the user's, that of their files, models and data; ``handler_frames``: frames that handle it."""
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
        if not in_library or not frames:  # raised in our own line, or nobody called us back
            return False
    return False


def advise_on_arguments(error: TypeError, advice: str) -> None:
    """Add what to do to the error of a model that was called with too many or too few arguments; leave other errors alone."""
    if "positional argument" in str(error) and "forward" in str(error):
        setattr(error, _ADVICE, (advice,))


def user_code_error(ref: str, error: BaseException, noun: str = "workload") -> UserCodeError:
    """The error of the user's code that ``ref`` names: ``ref: Kind: message (file, line)``, at the user's innermost line."""
    place = _place(error)
    where = f" ({os.path.basename(place.filename)}, line {place.lineno})" if place else ""
    advice = "".join(f"; {note}" for note in getattr(error, _ADVICE, ()))
    return UserCodeError(f"{noun} {ref!r} raised {_kind_and_text(error)}{where}{advice}", _trace(error))


def unexpected_error(error: BaseException) -> InternalError | UserCodeError:
    """An error that nobody caught: of a file that is not part of this package, such as a study's, or of ours."""
    place = _place(error)
    if place is None or not is_user_error(error, 0):
        return internal_error(error)
    problem = f"{place.filename}, line {place.lineno}, raised {_kind_and_text(error)}"
    return UserCodeError(f"{problem}; this file is not part of unsilent, so correct it there", _trace(error))


def _kind_and_text(error: BaseException) -> str:
    """The type of an error, and the first line of what it says."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def _place(error: BaseException) -> traceback.FrameSummary | None:
    """The user's innermost line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _hidden(f.filename)]
    return next((f for f in reversed(frames) if not _library(f.filename)), frames[-1] if frames else None)


def internal_error(error: BaseException) -> InternalError:
    """An error of ours: its kind, message and our innermost line; the whole traceback goes with it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _in_package(f.filename)]
    where = f" ({frames[-1].filename.removeprefix(_PACKAGE)}, line {frames[-1].lineno})" if frames else ""
    problem = f"internal error of unsilent: {_kind_and_text(error)}{where}"
    trace = "".join(traceback.format_exception(error))
    return InternalError(f"{problem}; please report it together with the traceback", trace)


def _trace(error: BaseException) -> str:
    """The traceback as text without frames of this package and of the import machinery, through the whole chain."""
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
    """Installed packages, the standard library, and code that is in no file (``<string>``) unless it was typed in."""
    typed = filename.startswith(("<stdin", "<ipython", "<python-input", "<doctest"))
    return not typed and (filename.startswith((*_LIBRARIES, "<")) or f"{os.sep}site-packages{os.sep}" in filename)


def _hidden(filename: str) -> bool:
    """Frames a user can do nothing about: this package, the import machinery, the inside of torch."""
    if _in_package(filename) or filename.startswith("<frozen importlib") or filename == importlib.__file__:
        return True
    return f"{os.sep}site-packages{os.sep}torch{os.sep}" in filename
