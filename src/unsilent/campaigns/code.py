"""A fingerprint of the user's code: whatever of it could change a row, besides weights, inputs and golden outputs.

It covers the user's file (Python, or an exported program), every loaded module that is not installed (standard library,
site-packages, this package), and the functions a live workload holds, with their constants, defaults and what they close over.
"""

from __future__ import annotations

import functools
import platform
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import xxhash

from unsilent.version import __version__

_INSTALLED = tuple(
    str(Path(p).resolve())
    for p in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])}
)


def code_fingerprint(workload: str, live: Any, judge: Any) -> str:
    """32 hex digits. ``workload`` is the reference that was loaded, ``live`` the object it gave."""
    digest = xxhash.xxh3_128()
    file, _, name = workload.rpartition(":")
    if name and file.endswith(".py") and Path(file).is_file():
        digest.update(Path(file).read_bytes())
    if workload.endswith(".pt2") and (program := Path(workload).expanduser()).is_file():
        with program.open("rb") as opened:  # it may be too large to be in memory twice
            while piece := opened.read(1 << 20):
                digest.update(piece)
    for name, path in sorted(_user_modules().items()):
        digest.update(f"{name}={xxhash.xxh3_128_hexdigest(path.read_bytes())};".encode())
    held = [value for _, value in sorted(vars(live).items())] if hasattr(live, "step") else []
    functions = [
        value for value in held if isinstance(value, (types.FunctionType, types.MethodType, functools.partial))
    ]
    for part in (getattr(live, "_run", None), getattr(type(live), "run", None), judge, *functions):
        digest.update(_describe(part, 0).encode())
    return digest.hexdigest()


def code_hash(*modules: str) -> str:
    """32 hex digits of the source files of loaded modules, for the fingerprint of a study; of a package all its files.

    ``code_hash(__name__)`` in the module of a runner makes a campaign another one when that module is changed.
    """
    digest = xxhash.xxh3_128()
    for name in modules:
        module = sys.modules[name]
        folders = [Path(folder) for folder in getattr(module, "__path__", ())]
        files = {file for folder in folders for file in folder.rglob("*.py")} or {Path(str(module.__file__))}
        for content in sorted(xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files):
            digest.update(f"{name}={content};".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions a report names; loads torch."""
    import numpy as np
    import torch

    return {
        "unsilent": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own: who unpickles it loads torch
        "numpy": np.__version__,
    }


def _user_modules() -> dict[str, Path]:
    result = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        if path.is_file() and not str(path).startswith(_INSTALLED):
            result[name] = path
    return result


def _describe(value: Any, depth: int) -> str:
    """Text that changes when the behaviour of a function may have: equal texts, equal code."""
    if depth > 6:
        return type(value).__qualname__
    if isinstance(value, functools.partial):
        return _describe((value.func, value.args, sorted(value.keywords.items())), depth + 1)
    if isinstance(value, types.MethodType):
        return _describe(value.__func__, depth + 1)
    if isinstance(value, types.FunctionType):
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:
                cells.append("empty cell")
        return _describe((value.__code__, value.__defaults__, cells), depth + 1)
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()}{value.co_names}{[_describe(c, depth + 1) for c in value.co_consts]}"
    if isinstance(value, (tuple, list)):
        return f"[{','.join(_describe(v, depth + 1) for v in value)}]"
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return repr(value)
    function = getattr(value, "function", None)  # a judge made of the user's function
    if isinstance(function, types.FunctionType):
        return _describe(function, depth + 1)
    # Addresses in a default repr would make every run another campaign; the class and its methods stand for such objects.
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else f"{type(value).__qualname__}:{text[:2000]}"
