"""A fingerprint of the user's code, so that changed code makes another campaign.

The fingerprint covers the user's file (Python, or an exported program), the modules of a live workload's classes and functions,
their direct and indirect imports, and the functions themselves, with their constants, defaults and closures. Only content
counts, not the names of files. Installed modules (standard library, site-packages, this package) and modules that the workload
does not import are left out.
"""

from __future__ import annotations

import ast
import functools
import platform
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from unsilent.basics.lazy_numpy import np
from unsilent.basics.user_code import user_module_name
from unsilent.version import __version__

_INSTALLED = tuple(
    str(Path(p).resolve())
    for p in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])}
)


def code_fingerprint(workload: str, live: Any, judge: Any, faults: str | None = None) -> str:
    """The fingerprint of the user's code for a workload, a judge and a fault model: 32 hex digits.

    Args:
        workload: Reference of the loaded workload.
        live: The workload object that was loaded.
        faults: A Python file with fault models.
    """
    digest = xxhash.xxh3_128()
    file, _, name = workload.rpartition(":")
    roots = set[str]()
    for path in [file if name and file.endswith(".py") else None, faults]:
        if path is not None and Path(path).expanduser().is_file():
            digest.update(Path(path).expanduser().read_bytes())
            roots.add(user_module_name(Path(path)))
    if workload.endswith(".pt2") and (program := Path(workload).expanduser()).is_file():
        with program.open("rb") as opened:  # the file may be too large to be in memory twice
            while piece := opened.read(1 << 20):
                digest.update(piece)
    paths = {path for name, path in imported_modules({file, *roots, *_modules_of(live), *_modules_of(judge)}).items()}
    for content in sorted({xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths}):
        digest.update(f"{content};".encode())
    held = [value for _, value in sorted(vars(live).items())] if hasattr(live, "step") else []
    functions = [
        value for value in held if isinstance(value, (types.FunctionType, types.MethodType, functools.partial))
    ]
    score = getattr(live, "score", None)
    functions += [score] if callable(score) and score not in functions else []
    for part in (getattr(live, "_run", None), getattr(type(live), "run", None), judge, *functions):
        digest.update(_describe(part, 0).encode())
    return digest.hexdigest()


def code_hash(*modules: str) -> str:
    """A hash of the source files of loaded modules, as 32 hex digits.

    For a package, all files count.

    With ``code_hash(__name__)`` in the module of a runner, a change of that module makes another campaign.
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
    """The versions of Python and libraries that a report names.

    Loads torch.
    """
    import torch

    return {
        "unsilent": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a separate class: unpickling it loads torch
        "numpy": np.__version__,
    }


def imported_modules(roots: Iterable[str]) -> dict[str, Path]:
    """The user's loaded modules with these names, and the user's modules that they import, directly or not."""
    known, result = _user_modules(), dict[str, Path]()
    waiting = [name for name in roots if name in known]
    while waiting:
        name = waiting.pop()
        if name not in result:
            result[name] = known[name]
            waiting += [imported for imported in _imports(name, known[name]) if imported in known]
    return result


def _imports(name: str, path: Path) -> Iterator[str]:
    """Names of all modules that a module imports or holds objects of, with the names of their packages."""
    module = sys.modules[name]
    package = getattr(module, "__package__", None) or ""
    names = {
        value.__name__ if isinstance(value, types.ModuleType) else _module_of(value) for value in vars(module).values()
    }
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    for module_name in names:
        parts = module_name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _modules_of(live: Any) -> set[str]:
    """Names of the modules that define the class of an object and of its attributes.

    A model counts with all its submodules.
    """
    import torch

    result = {_module_of(live)}
    for value in getattr(live, "__dict__", {}).values():
        parts = value.modules() if isinstance(value, torch.nn.Module) else [value]
        result.update(map(_module_of, parts))
    return result


def _module_of(value: Any) -> str:
    """The name of the module that defines a class, a function or the class of an object."""
    value = value.func if isinstance(value, functools.partial) else value
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _user_modules() -> dict[str, Path]:
    result = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(_INSTALLED):
            continue
        path = Path(file).resolve()
        if path.is_file() and not str(path).startswith(_INSTALLED):
            result[name] = path
    return result


def _describe(value: Any, depth: int) -> str:
    """A text that is the same for functions with the same code, defaults and closures."""
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
