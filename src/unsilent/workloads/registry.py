"""Loading of workloads by the names that are given on the command line.

A reference is one of

    digits-cnn                 a built-in workload (`ZOO`), trained on first use and kept in the cache
    train-resnet               a built-in training (`TRAININGS`)
    path/to/file.py:name       an object in the user's own file, or a function (or class) that makes one
    package.module:name        such an object in an importable module hf:DIR                     a local transformers
    folder (inference) path/to/model.pt2          a program of torch.export (inference)

Built-in factories and the user's functions are called alike: every keyword parameter is an option (``--with
key=value``, converted by its annotation or default), except ``data``, ``weights`` and ``progress``, which are passed
when declared.

Invariant: importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsilent.basics.error_origin import call_user_code
from unsilent.basics.errors import UsageError, unknown_name_error, wrong_value_error
from unsilent.basics.lazy_module import load_named
from unsilent.basics.name_and_parameters import convert
from unsilent.basics.user_code import find_user_object, user_code
from unsilent.workloads.zoo import EXPORTED, HF, TRAININGS, ZOO, WorkloadEntry

if TYPE_CHECKING:
    from unsilent.workloads.base import InferenceWorkload
    from unsilent.workloads.model_fitting import Progress
    from unsilent.workloads.trainings.base import TrainingWorkload

PASSED = ("data", "weights", "progress")
"""Parameters of a factory that are not ``--with`` options."""
PARTS = ("name", "judge", "components", "info", "model", "batches", "run")
"""Attributes that an object must have to be an inference workload."""
TRAINING_PARTS = (
    "name",
    "steps",
    "world_size",
    "info",
    "start",
    "step",
    "evaluate",
    "snapshot",
    "restore",
    "restore_into",
)
"""Attributes that an object must have to be a training workload."""

_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".th", ".npz", ".onnx")


@dataclass(frozen=True)
class Origin:
    """The arguments that a training workload was loaded with, so that another process can load it too."""

    ref: str
    options: Mapping[str, str]
    data: str | None


_origins: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()


def load(
    ref: str,
    options: Mapping[str, str] | None = None,
    *,
    data: str | None = None,
    weights: str | None = None,
    progress: Progress | None = None,
) -> InferenceWorkload:
    """The inference workload that ``ref`` names; see the module's docstring.

    Args:
        ref: Built-in name, ``file.py:name``, ``module:name``, ``hf:DIR`` or ``file.pt2``.
        options: ``--with`` values as texts.
        data: Path of the user's data, for a workload that takes data.
        weights: Path of the user's weights, for a workload that takes weights.
        progress: Receives the progress of a training; default: no reports.

    Raises:
        UsageError: the name is unknown, an option is unknown or unreadable, data or weights are not taken or missing,
            or the object is not an inference workload.
        UserCodeError: the user's file or function raised.
    """
    _check_types(ref, options)
    arguments = {"data": data, "weights": weights, "progress": progress or _silent}
    chosen = {key: value for key, value in arguments.items() if value is not None}
    if ref.startswith("hf:"):
        result = _builtin(HF, ref, options or {}, chosen, {"folder": ref[3:]})
    elif ref.endswith(".pt2"):
        result = _builtin(EXPORTED, ref, options or {}, chosen, {"program": ref})
    elif ref in ZOO:
        result = _builtin(ZOO[ref], ref, options or {}, chosen, ZOO[ref].fixed_options)
    elif ref in TRAININGS:
        raise _other_kind(ref, "inference")
    else:
        check_reference_form(ref, ZOO)
        result = load_own(ref, options or {}, chosen, PARTS)
    return typing.cast("InferenceWorkload", _checked_workload(ref, result, PARTS))


def load_training(
    ref: str, options: Mapping[str, str] | None = None, *, data: str | None = None, progress: Progress | None = None
) -> TrainingWorkload:
    """The training workload that ``ref`` names.

    ``ref`` is a built-in name, ``file.py:name`` or ``module:name``. For the other arguments see `load`.
    """
    _check_types(ref, options)
    arguments = {"data": data, "progress": progress or _silent}
    chosen = {key: value for key, value in arguments.items() if value is not None}
    if ref in TRAININGS:
        result = _builtin(TRAININGS[ref], ref, options or {}, chosen, TRAININGS[ref].fixed_options)
    elif ref in ZOO or ref.startswith("hf:") or ref.endswith(".pt2"):
        raise _other_kind(ref, "training")
    else:
        check_reference_form(ref, TRAININGS)
        result = load_own(ref, options or {}, chosen, TRAINING_PARTS)
    workload = typing.cast("TrainingWorkload", _checked_workload(ref, result, TRAINING_PARTS))
    # The object takes no weak references or has no hash, so its reference cannot be looked up later.
    with contextlib.suppress(TypeError):
        _origins[workload] = Origin(ref, dict(options or {}), data)
    return workload


def _check_types(ref: str, options: Mapping[str, str] | None) -> None:
    """Raise ``UsageError`` if the reference is not a string or the options are not named."""
    if not isinstance(ref, str):
        raise wrong_value_error("workload", ref, "a string: a built-in name, file.py:name or module:name")
    if not isinstance(options, Mapping | None):
        raise wrong_value_error("--with", options, "values by name")


def origin_of(workload: Any) -> Origin | None:
    """The arguments with which `load_training` made this object, or None for other objects."""
    try:
        return _origins.get(workload)
    except TypeError:
        return None


def _other_kind(ref: str, wanted: str) -> UsageError:
    """The error for a training in place of an inference workload, or the other way round."""
    there, entries = ("a training", ZOO) if wanted == "inference" else ("for inference", TRAININGS)
    return UsageError(
        f"workload {ref!r} is {there}; expected {'a workload for inference' if wanted == 'inference' else 'a training'}: "
        f"{', '.join(entries)}, or your own"
    )


def is_weights_file(ref: str) -> bool:
    """Whether a reference has the file ending of a weights file, such as a checkpoint."""
    return ":" not in ref and Path(ref).suffix in _WEIGHTS


def check_reference_form(ref: str, known: Mapping[str, WorkloadEntry]) -> None:
    """Raise unless the reference has the form of a reference to user code."""
    if ":" in ref or "/" in ref or ref.endswith(".py"):
        return
    if Path(ref).suffix in _WEIGHTS:
        raise UsageError(
            f"{ref!r} can hold only weights, not a model to run; expected a workload: FILE.py:NAME that loads them, a program "
            "FILE.pt2, a folder hf:DIR, or a built-in one with --weights (see unsilent workloads)"
        )
    raise unknown_name_error("workload", ref, known)


def load_own(ref: str, options: Mapping[str, str], chosen: Mapping[str, Any], parts: Sequence[str]) -> Any:
    """The user's object that a reference names, or the result of the user's function.

    ``parts``: attributes by which a finished object is recognised.
    """
    result = find_user_object(ref)
    with user_code(ref):
        ready = not inspect.isclass(result) and _has(result, parts)
    if not ready and callable(result) and not _is_module(result):
        if _returns_nothing(result):  # calling it would run a whole training before this error
            raise UsageError(
                f"workload {ref!r} is a function that returns nothing; expected one that returns "
                f"{_how_to_make(parts is TRAINING_PARTS)}; runs of a training loop as it is are compared by "
                f"unsilent explain {ref}"
            )
        arguments = _arguments(ref, result, options, chosen, {})
        with user_code(ref):
            return call_user_code(result, **arguments)
    for key in [*options, *(k for k in chosen if k != "progress")]:
        raise UsageError(
            f"workload {ref!r} is an object and cannot take {key!r}; name a function that returns the workload instead"
        )
    return result


def _returns_nothing(function: Callable[..., Any]) -> bool:
    """Whether a plain function never returns or yields a value.

    False if its source cannot be read.
    """
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return False
    try:
        lines = textwrap.dedent(inspect.getsource(function))
        todo: list[ast.AST] = [*typing.cast("ast.FunctionDef", ast.parse(lines).body[0]).body]
    except (OSError, SyntaxError, TypeError, AttributeError):
        return False
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return False
        if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
            return False
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo += ast.iter_child_nodes(node)
    return True


def _how_to_make(training: bool) -> str:
    """An example call that makes a training or an inference workload, as text for an error."""
    if training:
        return "unsilent.Training(model=…, optimizer=…, batches=…, loss=…, evaluate=…)"
    return "unsilent.Workload(model, batches)"


def _silent(description: str, done: float, total: float) -> None:
    """A progress function that shows nothing."""


def _builtin(
    entry: WorkloadEntry, ref: str, options: Mapping[str, str], chosen: Mapping[str, Any], preset: Mapping[str, Any]
) -> Any:
    """Make a built-in workload by calling its factory."""
    for key in options:
        if key not in entry.options:
            raise unknown_name_error(f"option of workload {ref!r}", key, entry.options)
    for key, need in (("data", entry.data), ("weights", entry.weights)):
        if need == "no" and key in chosen:
            raise UsageError(f"workload {ref!r} brings its own {key}; leave --{key} out")
    missing = [f"--{k} FILE" for k in ("weights", "data") if getattr(entry, k) == "required" and k not in chosen]
    if missing:
        raise UsageError(f"workload {ref!r} needs {' and '.join(missing)}")
    factory = load_named(entry.factory_path)
    return factory(**_arguments(ref, factory, options, chosen, preset))


def _arguments(
    ref: str,
    function: Callable[..., Any],
    options: Mapping[str, str],
    chosen: Mapping[str, Any],
    preset: Mapping[str, Any],
) -> dict[str, Any]:
    """The keyword arguments for ``function``, with options converted to their types.

    Arguments that the function does not declare are refused.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise UsageError(
            f"workload {ref!r} is {_type_name(function)}; expected a workload or a function that returns one"
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
                f"workload {ref!r} takes no --{key}; give its function a parameter {key!r} or leave out --{key}"
            )
    settable = [n for n in known if n not in PASSED and n not in preset]
    hints = _hints(function)
    for key, text in options.items():
        if key not in settable and not anything:
            raise unknown_name_error(f"option of workload {ref!r}", key, settable)
        arguments[key] = convert(text, _hint(known.get(key), hints), f"workload {ref!r}: option {key!r}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in arguments:
            how = f"--{name} FILE" if name in ("data", "weights") else f"--with {name}=VALUE"
            raise UsageError(f"workload {ref!r} needs {how}")
    return arguments


def _hint(parameter: inspect.Parameter | None, hints: Mapping[str, Any]) -> Any:
    """The type that an option is converted to.

    Its annotation, or else the type of its default, or else str.
    """
    if parameter is None:
        return str
    if parameter.name in hints:
        return hints[parameter.name]
    return type(parameter.default) if isinstance(parameter.default, (bool, int, float)) else str


def _hints(function: Any) -> dict[str, Any]:
    """Annotations of a function by parameter.

    Empty if they cannot be evaluated, for instance names that are imported only for the type checker.
    """
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:
        return {}


def _is_module(result: Any) -> bool:
    from torch import nn

    return isinstance(result, nn.Module)


def _has(result: Any, parts: Sequence[str]) -> bool:
    return all(hasattr(result, part) for part in parts)


def _type_name(result: Any) -> str:
    return f"{type(result).__module__}.{type(result).__qualname__}".removeprefix("builtins.")


def _checked_workload(ref: str, result: Any, parts: Sequence[str]) -> Any:
    """The result if it is a complete workload of the wanted kind.

    Otherwise an error is raised that describes the result.
    """
    training = parts is TRAINING_PARTS
    wanted = "training" if training else "workload"
    with user_code(ref):
        if not inspect.isclass(result) and _has(result, PARTS if training else TRAINING_PARTS):
            raise _other_kind(ref, "training" if training else "inference")
        missing = [part for part in parts if not hasattr(result, part)]
    if missing and len(missing) < len(parts) - 2 and not _is_module(result):
        raise UsageError(
            f"workload {ref!r} is {_type_name(result)} without {', '.join(missing)}; a {wanted} has {', '.join(parts)}"
        )
    if missing or inspect.isclass(result):
        how = f"{'make one with' if training else 'wrap it as'} {_how_to_make(training)}"
        raise UsageError(f"workload {ref!r} is {_type_name(result)}; expected a {wanted}: {how}")
    wrong = [
        part for part in ("judge", "model", "batches", "run") if not training and not callable(getattr(result, part))
    ]
    if wrong:
        raise UsageError(
            f"workload {ref!r}: {wrong[0]} is {_type_name(getattr(result, wrong[0]))}; expected a callable"
        )
    return result
