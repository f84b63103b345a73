"""Runs the loop that the user named: a function without arguments, or a training workload."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.user_code import find_user_object, user_code
from unsilent.explain.optimizer_steps import OptimizerStepCounter, StepLimitReached
from unsilent.workloads.registry import TRAINING_PARTS, load_training

WORKLOAD_STEPS = 100
"""Default number of steps of a training workload."""


def run_loop(ref: str, steps: OptimizerStepCounter, limit: int | None, on_loaded: Callable[[], None]) -> Any:
    """Run the loop to its end or for ``limit`` steps, and return its result.

    ``on_loaded`` is called once the user's file was read.

    Raises ``UsageError`` if the loop does not exist or cannot be called, ``UserCodeError`` if it raises an error.
    """
    result = find_user_object(ref) if ":" in ref or ref.endswith(".py") else load_training(ref)
    on_loaded()
    if not _trains(result):
        if not callable(result):
            raise UsageError(
                f"{ref!r} is {type(result).__name__}; expected a function without arguments that trains, or a training workload"
            )
        _check_call(ref, result)
        result = _call(ref, result)
    return _train(ref, result, steps, limit) if _trains(result) else result


def _trains(result: Any) -> bool:
    return not inspect.isclass(result) and all(hasattr(result, part) for part in TRAINING_PARTS)


def _check_call(ref: str, result: Callable[..., Any]) -> None:
    """Raise ``UsageError`` unless the function can be called without arguments and is not a generator."""
    try:
        parameters = inspect.signature(result).parameters.values()
    except (TypeError, ValueError):  # built in: unknown parameters
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]:
        raise UsageError(
            f"{ref!r} has required arguments ({', '.join(needed)}); expected a function without arguments: wrap it in one"
        )
    if inspect.isgeneratorfunction(result) or inspect.iscoroutinefunction(result):
        raise UsageError(f"{ref!r} is a generator or coroutine, which does nothing when called; wrap it in a function")


def _call(ref: str, result: Callable[[], Any]) -> Any:
    with user_code(ref):
        try:
            return result()
        except StepLimitReached:
            return None
        except SystemExit as end:  # many scripts end their main function in this way
            if end.code not in (None, 0):
                raise
            return None


def _train(ref: str, workload: Any, steps: OptimizerStepCounter, limit: int | None) -> Any:
    """Run some steps of a workload from seed 0, and return the trained model."""
    state = None

    def train() -> None:
        nonlocal state
        state = workload.start(0)
        for _ in range(min(limit or WORKLOAD_STEPS, workload.steps)):
            workload.step(state)

    _call(ref, train)
    return getattr(state, "model", None)
