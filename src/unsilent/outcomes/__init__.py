"""Outcomes of trials: judges, which decide whether an output is incorrect, and the outcome classes of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unsilent.basics.errors import UsageError, wrong_value_error
from unsilent.basics.name_and_parameters import build_named
from unsilent.outcomes.base import Judge as Judge
from unsilent.outcomes.base import JudgeVerdict as JudgeVerdict
from unsilent.outcomes.base import Outcome as Outcome

NUMERIC = "tolerance:rtol=0.001,atol=0.00001"
"""Judge of outputs that are not a decision."""


def judge(what: Judge | str | Callable[[Any, Any, Any], Any]) -> Judge:
    """A judge from an object, a text like ``"topk:k=5"``, or a function ``(golden, faulty, batch) -> incorrect[, severity]``."""
    from unsilent.outcomes.judges import ALL_JUDGES, Function

    if isinstance(what, str):
        return build_named("judge", what, ALL_JUDGES)
    if not callable(what) or isinstance(what, type):
        raise UsageError(f"expected a judge, the name of a judge or a function, found {what!r}")
    return Function(what) if hasattr(what, "__qualname__") else what  # the repr of an object shows its name


def judges_samples_apart(what: Judge) -> bool:
    """Whether the judge is known to judge each sample independently: all built-in judges, no user's own."""
    from unsilent.outcomes.judges import JUDGES

    return type(what) in JUDGES.values()


def judge_text(what: Judge) -> str:
    """The command-line text of a judge (``topk:k=3``); ``repr`` for a judge of the user."""
    from dataclasses import fields, is_dataclass

    from unsilent.outcomes.judges import JUDGES

    for name, judge_class in JUDGES.items():
        if type(what) is judge_class and is_dataclass(what):
            parameters = [
                f"{f.name}={getattr(what, f.name)}" for f in fields(what) if getattr(what, f.name) != f.default
            ]
            return f"{name}{':' if parameters else ''}{','.join(parameters)}"
    return repr(what)


def judge_for_output(output: Any) -> str:
    """The text of a built-in judge that fits the form of an output."""
    from unsilent.outcomes.decision_judges import decision_tensor
    from unsilent.outcomes.detections import is_detections

    if is_detections(output):
        return "detections"
    result = decision_tensor(output, judge(NUMERIC), 0)
    if result.ndim == 2 and result.shape[1] > 1:
        return "top1" if result.is_floating_point() else "exact-sequence"
    return "segmentation" if result.ndim == 3 and not result.is_floating_point() else NUMERIC


def judge_by_decision(decision: Callable[[Any], Any]) -> Judge:
    """A judge that compares ``decision(output)``, one value (or row) per sample, for equality."""
    from unsilent.outcomes.judges import Function, decision_judge_function

    if not callable(decision):
        raise wrong_value_error("decision", decision, "a function of an output")
    return Function(decision_judge_function(decision))
