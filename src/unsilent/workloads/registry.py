"""How a text on the command line becomes a workload.

A reference is one of

    digits-cnn                 a built-in workload (`ZOO`), trained on first use and kept in the cache
    path/to/file.py:name       an object in the user's own file, or a function (or class) that makes one
    package.module:name        the same in an importable module
    hf:DIR                     a local transformers folder
    path/to/model.pt2          a program of torch.export

Built-in factories and the user's functions are called alike: every keyword parameter is an option (``--with
key=value``, converted by its annotation or default), except ``data``, ``weights`` and ``progress``, which are passed
when declared.

Invariant: importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.errors import UsageError, unknown
from unsilent.named import convert
from unsilent.workloads.user import find, user_code
from unsilent.workloads.zoo import EXPORTED, HF, ZOO, Entry

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload
    from unsilent.workloads.training import Progress

PASSED = ("data", "weights", "progress")
"""Parameters of a factory that are not ``--with`` options."""
PARTS = ("name", "judge", "components", "info", "model", "batches", "run")
"""What an object must have to be a workload."""


_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".th", ".npz", ".onnx")


def load(
    ref: str,
    options: Mapping[str, str] | None = None,
    *,
    data: str | None = None,
    weights: str | None = None,
    progress: Progress | None = None,
) -> InferenceWorkload:
    """Make the workload that ``ref`` names (see the module's docstring).

    Args:
        ref: built-in name, ``file.py:name``, ``module:name``, ``hf:DIR`` or ``file.pt2``.
        options: ``--with`` values as texts.
        data: path given to a workload that takes data of the user's own.
        weights: path given to a workload that takes weights of the user's own.
        progress: told how far a training is; default nobody.

    Raises:
        UsageError: nothing is named so, an option is unknown or unreadable, data or weights are not taken or missing,
            or the object is not a workload.
        UserCodeError: the user's own file or function raised.
    """
    given = {"data": data, "weights": weights, "progress": progress or _silent}
    chosen = {key: value for key, value in given.items() if value is not None}
    if ref.startswith("hf:"):
        return _builtin(HF, ref, options or {}, chosen, {"folder": ref[3:]})
    if ref.endswith(".pt2"):
        return _builtin(EXPORTED, ref, options or {}, chosen, {"program": ref})
    if ref in ZOO:
        return _builtin(ZOO[ref], ref, options or {}, chosen, ZOO[ref].preset)
    if ":" not in ref and "/" not in ref and not ref.endswith(".py"):
        if Path(ref).suffix in _WEIGHTS:
            raise UsageError(
                f"{ref!r} holds weights at most, not what runs; expected a workload: FILE.py:NAME that loads them, a program "
                "FILE.pt2, a folder hf:DIR, or a built-in one with --weights (see unsilent workloads)"
            )
        raise unknown("workload", ref, ZOO)
    found = find(ref)
    with user_code(ref):
        ready = not inspect.isclass(found) and _is_workload(found)
    if not ready and callable(found) and not _is_module(found):
        arguments = _arguments(ref, found, options or {}, chosen, {})
        with user_code(ref):
            found = found(**arguments)
    else:
        for key in [*(options or {}), *(k for k in chosen if k != "progress")]:
            raise UsageError(f"workload {ref!r} is a ready object and takes no {key!r}; name a function to pass values")
    return _checked(ref, found)


def _silent(description: str, done: float, total: float) -> None:
    """Progress told to nobody."""


def _builtin(
    entry: Entry, ref: str, options: Mapping[str, str], chosen: Mapping[str, Any], preset: Mapping[str, Any]
) -> InferenceWorkload:
    """Call a factory of this package."""
    for key in options:
        if key not in entry.options:
            raise unknown(f"option of workload {ref!r}", key, entry.options)
    for key, need in (("data", entry.data), ("weights", entry.weights)):
        if need == "no" and key in chosen:
            raise UsageError(f"workload {ref!r} brings its own {key}; leave --{key} out")
    missing = [f"--{k} FILE" for k in ("weights", "data") if getattr(entry, k) == "required" and k not in chosen]
    if missing:
        raise UsageError(f"workload {ref!r} needs {' and '.join(missing)}")
    module, _, function = entry.target.partition(":")
    factory = getattr(importlib.import_module(module), function)
    return _checked(ref, factory(**_arguments(ref, factory, options, chosen, preset)))


def _arguments(
    ref: str,
    function: Callable[..., Any],
    options: Mapping[str, str],
    chosen: Mapping[str, Any],
    preset: Mapping[str, Any],
) -> dict[str, Any]:
    """The keyword arguments for ``function``: options converted, what is passed but not declared refused."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise UsageError(
            f"workload {ref!r} is {_kind(function)}; expected a workload or a function making one"
        ) from None
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    known = {p.name: p for p in named}
    arguments = dict(preset)
    for key, value in chosen.items():
        if key in known or (anything and key != "progress"):
            arguments[key] = value
        elif key != "progress":
            raise UsageError(
                f"workload {ref!r} takes no --{key}; give its function a parameter {key!r} or leave it out"
            )
    settable = [n for n in known if n not in PASSED and n not in preset]
    hints = _hints(function)
    for key, text in options.items():
        if key not in settable and not anything:
            raise unknown(f"option of workload {ref!r}", key, settable)
        arguments[key] = convert(text, _hint(known.get(key), hints), f"workload {ref!r}: option {key!r}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in arguments:
            how = f"--{name} FILE" if name in ("data", "weights") else f"--with {name}=VALUE"
            raise UsageError(f"workload {ref!r} needs {how}")
    return arguments


def _hint(parameter: inspect.Parameter | None, hints: Mapping[str, Any]) -> Any:
    """The type an option is converted to: its annotation, else the type of its default, else text."""
    if parameter is None:
        return str
    if parameter.name in hints:
        return hints[parameter.name]
    return type(parameter.default) if isinstance(parameter.default, (bool, int, float)) else str


def _hints(function: Any) -> dict[str, Any]:
    """Annotations by parameter; none when they cannot be evaluated (names imported for the type checker alone)."""
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:
        return {}


def _is_module(found: Any) -> bool:
    from torch import nn

    return isinstance(found, nn.Module)


def _is_workload(found: Any) -> bool:
    return all(hasattr(found, part) for part in PARTS)


def _kind(found: Any) -> str:
    return f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")


def _checked(ref: str, found: Any) -> InferenceWorkload:
    """``found`` if it is a workload, else an error saying what it is instead."""
    with user_code(ref):
        missing = [part for part in PARTS if not hasattr(found, part)]
    if missing and len(missing) < len(PARTS) - 2 and not _is_module(found):
        raise UsageError(
            f"workload {ref!r} is {_kind(found)} without {', '.join(missing)}; a workload has {', '.join(PARTS)}"
        )
    if missing or inspect.isclass(found):
        raise UsageError(
            f"workload {ref!r} is {_kind(found)}; expected a workload: wrap it as unsilent.Workload(model, batches)"
        )
    wrong = [part for part in ("judge", "model", "batches", "run") if not callable(getattr(found, part))]
    if wrong:
        raise UsageError(
            f"workload {ref!r}: {wrong[0]} is {_kind(getattr(found, wrong[0]))}; expected something callable"
        )
    return typing.cast("InferenceWorkload", found)
