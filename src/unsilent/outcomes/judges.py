"""Built-in judges by name, which compare an output with the golden output of the same batch.

Outputs may be nested; the *decision tensor* is the output itself, its ``logits`` entry, or its first floating-point
tensor. All judges answer in numpy on the CPU and never raise because of NaN: a non-finite value compares as different.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unsilent.basics.entry_points import JUDGES as GROUP
from unsilent.basics.entry_points import WithInstalled
from unsilent.basics.error_origin import call_user_code
from unsilent.basics.errors import UsageError
from unsilent.outcomes.base import Judge, JudgeVerdict
from unsilent.outcomes.decision_judges import (
    ExactSequence,
    NextToken,
    Segmentation,
    Threshold,
    Top1,
    TopK,
    doubles,
    make_verdict,
    same_shaped,
)
from unsilent.outcomes.detections import DetectionSet
from unsilent.outcomes.tensors import array_of, rows_of


def to_verdict(judge: Judge, answer: Any) -> JudgeVerdict:
    """Convert a judge's answer to a verdict; an answer without severity gets 1 for incorrect samples.

    Args:
        answer: ``incorrect`` or the pair ``(incorrect, severity)``: tensors of any dtype and device, arrays,
            lists or numbers, one value per sample.

    Raises ``UsageError`` for anything else.
    """
    incorrect, severity = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    wrong = np.atleast_1d(array_of(incorrect))
    amount = wrong if severity is None else np.atleast_1d(array_of(severity))
    kinds_fit = wrong.dtype.kind in "bui" and amount.dtype.kind in "buif"
    if wrong.ndim != 1 or wrong.shape != amount.shape or not kinds_fit:
        raise UsageError(
            f"judge {judge!r} returned {wrong.dtype}{list(wrong.shape)} and {amount.dtype}{list(amount.shape)}; "
            "expected bool[n] and float[n], one value per sample"
        )
    return make_verdict(wrong.astype(bool), amount.astype(np.float64))


@dataclass(frozen=True)
class Tolerance:
    """Judges a sample incorrect if any value moved by more than ``atol + rtol * |golden|``.

    Severity: largest relative move. Output: [n, ...].
    """

    rtol: float = 1e-3
    atol: float = 1e-5

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = same_shaped(golden, faulty, self, 1)
        before, after = doubles(rows_of(g)), doubles(rows_of(f))
        with np.errstate(all="ignore"):
            moved = np.where(before == after, 0.0, np.abs(after - before))
            beyond = ~(moved <= self.atol + self.rtol * np.abs(before))
            relative = moved / (np.abs(before) + np.maximum(self.atol, np.finfo(np.float64).tiny))
        return make_verdict(np.asarray(beyond.any(1)), relative.max(1, initial=0))


@dataclass(frozen=True)
class Function:
    """A user's judge function: ``function(golden, faulty, batch)`` returns incorrect, or (incorrect, severity)."""

    function: Callable[[Any, Any, Any], Any]

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        return to_verdict(self, call_user_code(self.function, golden, faulty, batch))

    def __repr__(self) -> str:
        return f"Function({self.function.__module__}:{self.function.__qualname__})"


JUDGES: dict[str, Callable[..., Judge]] = {
    "top1": Top1,
    "topk": TopK,
    "threshold": Threshold,
    "next-token": NextToken,
    "exact-sequence": ExactSequence,
    "tolerance": Tolerance,
    "segmentation": Segmentation,
    "detections": DetectionSet,
}
ALL_JUDGES = WithInstalled("judge", GROUP, JUDGES)
"""Classes of judges by name, with those that other packages register as entry points of ``unsilent.judges``."""


def decision_judge_function(decision: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The judge function for `judge_by_decision`: incorrect if ``decision`` differs between the two outputs."""

    def unequal(golden: Any, faulty: Any, batch: Any) -> np.ndarray[Any, np.dtype[Any]]:
        g, f = array_of(decision(golden)), array_of(decision(faulty))
        return np.asarray((g != f).reshape(len(g), -1).any(1))

    unequal.__module__ = decision.__module__
    unequal.__qualname__ = getattr(decision, "__qualname__", type(decision).__qualname__)
    return unequal
