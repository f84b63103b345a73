"""Running what the user named: a function without arguments, or a training workload."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from unsilent.errors import UsageError
from unsilent.studies.explaining.steps import Enough, Steps
from unsilent.workloads.registry import TRAINING_PARTS, load_training
from unsilent.workloads.user import find, user_code

WORKLOAD_STEPS = 100
"""Steps of a training workload that are run where nothing was said."""


def run_loop(ref: str, steps: Steps, limit: int | None, loaded: Callable[[], None]) -> Any:
    """Run it to its end, or for ``limit`` steps, and give what it returns; ``loaded`` is called once its file was read.

    Raises ``UsageError`` for what is not there or cannot be called, ``UserCodeError`` for what it raises.
    """
    found = _found(ref)
    loaded()
    if not _trains(found):
        if not callable(found):
            raise UsageError(
                f"{ref!r} is {type(found).__name__}; expected a function without arguments that trains, or a training workload"
            )
        _check_call(ref, found)
        found = _call(ref, found)
    return _train(ref, found, steps, limit) if _trains(found) else found


def _found(ref: str) -> Any:
    return find(ref) if ":" in ref or ref.endswith(".py") else load_training(ref)


def _trains(found: Any) -> bool:
    return not inspect.isclass(found) and all(hasattr(found, part) for part in TRAINING_PARTS)


def _check_call(ref: str, found: Callable[..., Any]) -> None:
    """Raise ``UsageError`` unless it can be called without arguments and is over when it returns."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # built in: nothing is known
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]:
        raise UsageError(f"{ref!r} needs {', '.join(needed)}; expected a function without arguments: wrap it in one")
    if inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found):
        raise UsageError(f"{ref!r} is a generator or coroutine, which does nothing when called; wrap it in a function")


def _call(ref: str, found: Callable[[], Any]) -> Any:
    with user_code(ref):
        try:
            return found()
        except Enough:
            return None
        except SystemExit as end:  # how many a script's main function ends
            if end.code not in (None, 0):
                raise
            return None


def _train(ref: str, workload: Any, steps: Steps, limit: int | None) -> Any:
    """Some steps from seed 0; the model of its state."""
    state = None

    def train() -> None:
        nonlocal state
        state = workload.start(0)
        for _ in range(min(limit or WORKLOAD_STEPS, workload.steps)):
            workload.step(state)

    _call(ref, train)
    return getattr(state, "model", None)
