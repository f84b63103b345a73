"""Loading of the user's objects by ``FILE.py:NAME`` or module name, and attribution of errors in the user's code.

Invariant: an exception in the user's code is raised again as `UserCodeError`, one in this package as `InternalError` (see
`error_origin`). A `UsageError` (for example for an unknown judge) passes unchanged, because it is already one clear line.
The file is compiled from its text at every load, so that stale byte code is never run and none is written next to it.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from unsilent.basics.error_origin import call_user_code, internal_error, is_user_error, user_code_error
from unsilent.basics.errors import UnsilentError, UsageError
from unsilent.basics.plainfiles import read_plain

MOST_BYTES = 2**26


def find_user_object(ref: str) -> Any:
    """The object that ``path/to/file.py:name`` or ``package.module:name`` names.

    Raises ``UsageError`` if the file, module or name does not exist, ``UserCodeError`` if the import raises an error.
    """
    place, _, name = (ref, "", "") if ref.endswith(".py") else ref.rpartition(":")
    if place.endswith(".py") or "/" in place or os.sep in place:
        module = file_module(Path(place).expanduser(), ref)
    else:
        module = _from_module(place, ref)
    if not name or not hasattr(module, name):
        wanted = f"has no {name!r}" if name else "needs a name after it, as in FILE.py:NAME"
        public = ", ".join(_public(module)) or "none"
        raise UsageError(f"{place} {wanted}; its public names: {public}")
    return getattr(module, name)


def set_script_arguments(ref: str, arguments: Sequence[str] = ()) -> None:
    """Set ``sys.argv`` to the user's script (or module) and its own arguments."""
    place = ref if ref.endswith(".py") else ref.rpartition(":")[0]
    sys.argv = [str(Path(place).expanduser()) if place.endswith(".py") else place or ref, *arguments]


def user_module_name(path: Path) -> str:
    """The module name under which a user's file is loaded."""
    return f"_unsilent_user_{path.stem}"


def file_module(path: Path, ref: str, noun: str = "workload") -> types.ModuleType:
    """Run a Python file as a module, with its folder importable like for ``python file.py``."""
    source = read_plain(path, MOST_BYTES, f"{path} of {noun} {ref!r}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = types.ModuleType(user_module_name(path))
    module.__file__ = str(path)
    # Dataclasses and pickling look the module up by its name.
    sys.modules[module.__name__] = module
    with user_code(ref, noun):
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - running the user's file is the point
    return module


def _from_module(place: str, ref: str) -> types.ModuleType:
    """Import a module by name, also from the current folder like ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"workload {ref!r}: {place!r} is neither a .py file nor a module name")
    with user_code(ref):
        try:
            return cast("types.ModuleType", call_user_code(importlib.import_module, place))
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(error.name + ".")):
                raise UsageError(
                    f"workload {ref!r}: no module named {error.name!r}; give package.module:name or file.py:name"
                ) from None
            raise


def _public(module: types.ModuleType) -> list[str]:
    """Names that a user could have meant: workloads, and functions and classes defined in the module."""
    names = []
    for name, value in vars(module).items():
        defined_here = getattr(value, "__module__", None) == module.__name__
        if not name.startswith("_") and ((callable(value) and defined_here) or hasattr(value, "batches")):
            names.append(name)
    return sorted(names)


@contextmanager
def user_code(ref: str, noun: str = "workload") -> Iterator[None]:
    """Context that turns errors of the user's code into ``UserCodeError`` and other errors into ``InternalError``.

    Errors of this package for the user, and Ctrl-C, pass unchanged.
    """
    try:
        yield
    except (UnsilentError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if is_user_error(error, 2):  # the frames of this function and of its caller
            raise user_code_error(ref, error, noun) from None
        raise internal_error(error) from error
