"""Finds the line of the user's own code that is running."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
_LIBRARIES = tuple(
    {
        os.path.realpath(folder) + os.sep
        for folder in (
            *(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)

_TORCH = os.path.join(sysconfig.get_paths()["platlib"], "torch") + os.sep
_BETWEEN = tuple(_TORCH + part for part in ("_dynamo", "_compile.py", "utils" + os.sep + "_device.py"))
"""Parts of torch that only forward a call."""
_IMPORTING = "<frozen importlib"

Line = tuple[str, int, str]
"""File, line (0 if there is none) and function."""
NOWHERE: Line = ("", 0, "")


class UserFrameFinder:
    """Finds the innermost frame of the user's own code.

    Code of this package and of installed libraries is not the user's own.

    If only libraries are running, their outermost frame is returned. ``own_file``: file that counts as the user's, wherever it
    is.
    """

    def __init__(self, own_file: str | None = None) -> None:
        self._own_file = own_file
        self._known: dict[str, bool] = {}

    def current_user_line(self, frame: FrameType | None = None, imports: bool = True) -> Line:
        """The user's line that is running, otherwise a line of a library, or `NOWHERE`.

        `NOWHERE` is also returned for code of a library that is being imported, unless ``imports`` is true.
        """
        frame = frame or sys._getframe(1)
        library: FrameType | None = None
        while frame is not None:
            if self.is_user_frame(frame):
                return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            if not imports and frame.f_code.co_filename.startswith(_IMPORTING):
                return NOWHERE
            if not _ours(frame.f_code.co_filename):
                library = frame
            frame = frame.f_back
        return (library.f_code.co_filename, library.f_lineno, library.f_code.co_name) if library else NOWHERE

    def is_called_by_user_code(self, frame: FrameType) -> bool:
        """Whether the function of this frame was called directly by the user's own code."""
        caller: FrameType | None = frame
        while caller is not None and (
            _ours(caller.f_code.co_filename) or caller.f_code.co_filename.startswith(_BETWEEN)
        ):
            caller = caller.f_back
        return caller is not None and self.is_user_frame(caller)

    def is_user_frame(self, frame: FrameType) -> bool:
        """Whether a frame is of the user's own code."""
        file = frame.f_code.co_filename
        if (known := self._known.get(file)) is None:
            known = self._known[file] = self._users(file)
        return known

    def _users(self, file: str) -> bool:
        if file == self._own_file:
            return True
        return not file.startswith("<") and not _ours(file) and not os.path.realpath(file).startswith(_LIBRARIES)


def _ours(file: str) -> bool:
    return file.startswith(("<", _PACKAGE)) or os.path.basename(file) == "runpy.py"
