"""Judges: what counts as an incorrect output, always against the golden output of the same batch.

Outputs may be nested; the *decision tensor* is the output itself, its ``logits`` entry, or its first floating-point
tensor. All judges answer in numpy on the CPU and never raise because of NaN: a non-finite value compares as different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unsilent.error_origin import call_user_code
from unsilent.errors import UsageError
from unsilent.outcomes.base import Judge, JudgeVerdict
from unsilent.outcomes.detections import DetectionSet
from unsilent.outcomes.tensors import array_of, float8_as_float32, leaves, rows_of

Doubles = NDArray[np.float64]


def decision_tensor(output: Any, judge: Judge, dims: int = 1) -> Tensor:
    """The tensor a judge looks at, at least ``dims`` dimensions; raises ``UsageError`` when there is none."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        output = output["logits"]
    candidates = list(leaves(output))
    value = next((leaf for leaf in candidates if leaf.dtype.is_floating_point), next(iter(candidates), None))
    if value is None:
        raise UsageError(f"{judge!r} needs a tensor in the output, found {type(output).__name__}; choose another judge")
    if value.ndim < dims:
        raise UsageError(
            f"{judge!r} does not fit an output of shape {tuple(value.shape)}; it needs {dims} dimensions or more "
            "(samples first); choose another judge"
        )
    return value


def doubles(tensor: Tensor) -> Doubles:
    """The values as numpy float64 on the CPU."""
    return array_of(tensor).astype(np.float64, copy=False)


def _verdict(incorrect: NDArray[np.bool_], severity: Doubles) -> JudgeVerdict:
    return JudgeVerdict(incorrect, np.where(np.isnan(severity), np.inf, severity))


def to_verdict(judge: Judge, answer: Any) -> JudgeVerdict:
    """What a judge returned, as arrays; an answer without severity has 1 where incorrect.

    Args:
        answer: ``incorrect`` or the pair ``(incorrect, severity)``: tensors of any dtype and device, arrays,
            lists or numbers, one value a sample.

    Raises ``UsageError`` for anything else.
    """
    incorrect, severity = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    wrong = np.atleast_1d(array_of(incorrect))
    amount = wrong if severity is None else np.atleast_1d(array_of(severity))
    if (
        wrong.ndim != 1
        or wrong.dtype.kind not in "bui"
        or amount.dtype.kind not in "buif"
        or wrong.shape != amount.shape
    ):
        raise UsageError(
            f"judge {judge!r} returned {wrong.dtype}{list(wrong.shape)} and {amount.dtype}{list(amount.shape)}; "
            "expected bool[n] and float[n], one value per sample"
        )
    return _verdict(wrong.astype(bool), amount.astype(np.float64))


def _pair(golden: Any, faulty: Any, judge: Judge, dims: int) -> tuple[Tensor, Tensor]:
    g, f = decision_tensor(golden, judge, dims), decision_tensor(faulty, judge, dims)
    if g.shape != f.shape:
        raise UsageError(
            f"{judge!r} cannot compare outputs of different shapes ({tuple(g.shape)} golden, {tuple(f.shape)} faulty); "
            "use exact-sequence or a function of your own"
        )
    return g, f


def _choices(golden: Doubles, faulty: Doubles) -> JudgeVerdict:
    """Rows of scores, float64[n, classes]: whether the best class changed, and the fall of its softmax probability."""
    rows, choice = np.arange(len(golden)), golden.argmax(1)
    with np.errstate(all="ignore"):  # NaN and infinity are what faults make; they come out as infinite severity
        before, after = (np.exp(x - x.max(1, keepdims=True)) for x in (golden, faulty))
        fall = before[rows, choice] / before.sum(1) - after[rows, choice] / after.sum(1)
    return _verdict(choice != faulty.argmax(1), fall)


def _classes(golden: Any, faulty: Any, judge: Judge) -> tuple[Tensor, Tensor]:
    g, f = _pair(golden, faulty, judge, 2)
    if g.ndim > 2:
        raise UsageError(
            f"{judge!r} needs one row of class scores per sample, but the output has shape {tuple(g.shape)}; "
            "try next-token, exact-sequence, or a function of your own"
        )
    if g.shape[-1] < 2:
        raise UsageError(
            f"{judge!r} needs two or more classes, but the output has shape {tuple(g.shape)}; try threshold"
        )
    return g, f


@dataclass(frozen=True)
class Top1:
    """The most likely class changed; severity: fall of that class's softmax probability. Output [n, classes]."""

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = _classes(golden, faulty, self)
        return _choices(doubles(g), doubles(f))


@dataclass(frozen=True)
class TopK:
    """The set of the k most likely classes changed; severity: share of the golden set that was lost. Output [n, classes]."""

    k: int = 5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"topk: k is {self.k}; expected 1 or more")

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = _classes(golden, faulty, self)
        if self.k >= g.shape[-1]:
            raise UsageError(f"topk: k is {self.k}, but the output has {g.shape[-1]} classes; choose a smaller k")
        golden_set, faulty_set = (float8_as_float32(x).topk(self.k, -1).indices.cpu().numpy() for x in (g, f))
        kept = (golden_set[:, :, None] == faulty_set[:, None, :]).any(2).mean(1)
        return _verdict(kept < 1, 1 - kept)


@dataclass(frozen=True)
class Threshold:
    """A score crossed ``at`` and moved by more than ``tolerance``; severity: size of the move. Output [n] or [n, 1].

    ``logits=True`` applies the sigmoid first.
    """

    at: float = 0.5
    tolerance: float = 0.0
    logits: bool = False

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = _pair(golden, faulty, self, 1)
        if g.numel() != g.shape[0]:
            raise UsageError(
                f"{self!r} needs one score per sample, but the output has shape {tuple(g.shape)}; try top1"
            )
        with np.errstate(all="ignore"):
            before, after = (
                1 / (1 + np.exp(-x)) if self.logits else x for x in (doubles(g).ravel(), doubles(f).ravel())
            )
            moved = np.abs(after - before)
            crossed = (before >= self.at) != (after >= self.at)
        return _verdict(crossed & ~(moved <= self.tolerance), moved)


@dataclass(frozen=True)
class NextToken:
    """The most likely next token (last position) changed; severity: fall of its probability. Output [n, time, vocabulary]."""

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = _pair(golden, faulty, self, 3)
        return _choices(doubles(g[:, -1]), doubles(f[:, -1]))


@dataclass(frozen=True)
class ExactSequence:
    """Any token differs; severity: share of differing positions. Output: token ids [n, time], or logits [n, time, vocabulary].

    Lengths may differ (generation that stops early): the missing part counts as different.
    """

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = (self._tokens(decision_tensor(o, self, 2)) for o in (golden, faulty))
        if g.shape[0] != f.shape[0]:
            raise UsageError(
                f"{self!r}: the golden output has {g.shape[0]} sequences, the faulty one {f.shape[0]}; "
                "the batch size must not change"
            )
        longest, common = max(g.shape[1], f.shape[1]), min(g.shape[1], f.shape[1])
        differing = (g[:, :common] != f[:, :common]).sum(1) + float(longest - common)
        return _verdict(differing > 0, differing / max(longest, 1))

    @staticmethod
    def _tokens(output: Tensor) -> NDArray[np.int64]:
        return (float8_as_float32(output).argmax(-1) if output.dtype.is_floating_point else output).long().cpu().numpy()


@dataclass(frozen=True)
class Tolerance:
    """Any value moved by more than ``atol + rtol * |golden|``; severity: largest relative move. Output [n, ...]."""

    rtol: float = 1e-3
    atol: float = 1e-5

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = _pair(golden, faulty, self, 1)
        before, after = doubles(rows_of(g)), doubles(rows_of(f))
        with np.errstate(all="ignore"):
            moved = np.where(before == after, 0.0, np.abs(after - before))
            beyond = ~(moved <= self.atol + self.rtol * np.abs(before))
            relative = moved / (np.abs(before) + np.maximum(self.atol, np.finfo(np.float64).tiny))
        return _verdict(np.asarray(beyond.any(1)), relative.max(1, initial=0))


@dataclass(frozen=True)
class Segmentation:
    """The map of pixel labels changed too much; severity: 1 - intersection over union of the golden and the faulty map.

    Output: class scores [n, classes, height, width], or whole-number labels [n, height, width]. A map is taken as the set of its
    pairs (pixel, label), without pairs of the label ``background``; an answer is incorrect if the intersection over union of the
    two sets is below ``iou``. With ``iou=1`` a single pixel makes it incorrect.
    """

    iou: float = 0.95
    background: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.iou <= 1:
            raise UsageError(f"segmentation: iou is {self.iou}; expected a value above 0, at most 1")

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = (self._labels(x) for x in _pair(golden, faulty, self, 3))
        counted = [np.ones_like(m, bool) if self.background is None else m != self.background for m in (g, f)]
        both = ((g == f) & counted[0]).sum(1, dtype=np.float64)
        either = sum(c.sum(1, dtype=np.float64) for c in counted) - both
        overlap = np.where(either > 0, both / np.maximum(either, 1), 1.0)
        return _verdict(overlap < self.iou, 1 - overlap)

    def _labels(self, output: Tensor) -> NDArray[np.int64]:
        """One row of labels per sample: [n, height * width]."""
        scores = output.dtype.is_floating_point
        if output.ndim != (4 if scores else 3):
            raise UsageError(
                f"{self!r} does not fit an output {output.dtype} of shape {tuple(output.shape)}; it needs class scores "
                "[n, classes, height, width] or whole-number labels [n, height, width]"
            )
        return rows_of(float8_as_float32(output).max(1).indices if scores else output).long().cpu().numpy()


@dataclass(frozen=True)
class Function:
    """A user's own rule: ``function(golden, faulty, batch) -> (incorrect bool[n], severity float[n])`` or incorrect alone."""

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


def decision_judge_function(decision: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """The function behind `judge_by_decision`: incorrect where ``decision`` of the two outputs is unequal."""

    def unequal(golden: Any, faulty: Any, batch: Any) -> np.ndarray[Any, np.dtype[Any]]:
        g, f = array_of(decision(golden)), array_of(decision(faulty))
        return np.asarray((g != f).reshape(len(g), -1).any(1))

    unequal.__module__ = decision.__module__
    unequal.__qualname__ = getattr(decision, "__qualname__", type(decision).__qualname__)
    return unequal
