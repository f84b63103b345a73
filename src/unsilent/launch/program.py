"""A user's program, run in this process as ``python`` would run it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.util
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep


class ProgramNotFound(UsageError):
    """Raised if the file or module of a program does not exist."""


@dataclass(frozen=True)
class Program:
    """A script or module with its arguments.

    Attributes:
        name: Name of the file or the module.
        arguments: ``sys.argv[1:]``.
        is_module: Whether it runs as with ``python -m``.
    """

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def run(self) -> None:
        """Run the program as ``__main__``, with its own arguments and import path.

        Raises `ProgramNotFound`, and any error of the program.
        """
        if self.is_module:
            self._run_module()
        else:
            self._run_file()

    def check_file(self) -> None:
        """Raise `ProgramNotFound` if the program is a script that does not exist; modules are not checked."""
        if not self.is_module and not os.path.isfile(self.name):
            problem = "is a folder" if os.path.isdir(self.name) else "does not exist"
            raise ProgramNotFound(f"the script {self.name} {problem}; expected a Python file, or -m and a module")

    def _run_file(self) -> None:
        self.check_file()
        path = os.path.abspath(self.name)
        self._set_arguments(os.path.dirname(os.path.realpath(path)))
        loader = SourceFileLoader("__main__", path)
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
        sys.modules["__main__"] = main  # not undone: at exit, classes of the script may still be looked up in it
        exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - it is what the user asked for

    def _run_module(self) -> None:
        self._set_arguments(os.getcwd())
        try:
            spec = importlib.util.find_spec(self.name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.name}.__main__")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.name}.".startswith(f"{error.name}."):
                raise  # a package of the user needs a missing module
            spec = None
        if spec is None:
            raise ProgramNotFound(
                f"the module {self.name} does not exist, or is a package without __main__; give another"
            )
        runpy.run_module(self.name, run_name="__main__", alter_sys=True)

    def _set_arguments(self, folder: str) -> None:
        sys.argv = [self.name, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = folder


def exit_code(error: BaseException | None) -> Any:
    """The argument of `sys.exit` after a program has ended; an uncaught error is printed.

    Raises:
        ProgramNotFound: the program does not exist.
    """
    if error is None:
        return 0
    if isinstance(error, ProgramNotFound):
        raise error
    return error.code if isinstance(error, SystemExit) else show_uncaught(error)


def show_uncaught(error: BaseException) -> int:
    """Print an uncaught error as Python does, without frames of this package; returns the exit code."""
    chain: list[BaseException | None] = [error]
    while (last := chain[-1]) is not None and last not in chain[:-1]:
        last.__traceback__ = _without_our_frames(last.__traceback__)
        chain.append(last.__context__ if last.__cause__ is None else last.__cause__)
    sys.excepthook(type(error), error, error.__traceback__)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _without_our_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without frames of this package and of runpy.

    If the error was raised in this package, only its first frames are removed.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if frames and _is_ours(frames[-1]) and any(not _is_ours(frame) for frame in frames):
        while _is_ours(frames[0]):
            del frames[0]
        return frames[0]
    user_frames = [frame for frame in frames if not _is_ours(frame)]
    following = None
    for frame in reversed(user_frames):
        frame.tb_next, following = following, frame
    return following


def _is_ours(trace: types.TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith((_PACKAGE, "<frozen runpy>"))


class InterruptAtExit:
    """Ends the process by SIGINT at exit, as Python does after an uncaught ``KeyboardInterrupt``.

    Create it before the program runs: the function that is registered first is called last at exit.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        atexit.register(self._end)

    def _end(self) -> None:
        if self.is_wanted:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # the program may have closed it
                    stream.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
