"""Judges that compare a model's decision for each sample (a class, a few tokens) with the fault-free decision.

The few numbers that such a judge needs from an output, its *decision rows*, are computed on the device of the output,
on a GPU without waiting for it. They are compared on the CPU in numpy, for any number of trials at once. NaN never
raises: it compares as different.

`right_answers` compares their answers with the labels of a workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.outcomes.base import Judge, JudgeVerdict
from unsilent.outcomes.tensors import array_of, float8_as_float32, leaves, rows_of

Doubles = NDArray[np.float64]


def decision_tensor(output: Any, judge: Judge, dims: int = 1) -> Tensor:
    """The tensor that a judge examines, with at least ``dims`` dimensions; raises ``UsageError`` if there is none."""
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
    """The values of a tensor as numpy float64 on the CPU."""
    with np.errstate(invalid="ignore"):  # bit flips can make a signalling NaN
        return array_of(tensor).astype(np.float64, copy=False)


def make_verdict(incorrect: NDArray[np.bool_], severity: Doubles) -> JudgeVerdict:
    """A verdict in which NaN severities are replaced by infinity; both arguments are [n]."""
    return JudgeVerdict(incorrect, np.where(np.isnan(severity), np.inf, severity))


def same_shaped(golden: Any, faulty: Any, judge: Judge, dims: int) -> tuple[Tensor, Tensor]:
    """The decision tensors of two outputs; raises ``UsageError`` if their shapes differ."""
    g, f = decision_tensor(golden, judge, dims), decision_tensor(faulty, judge, dims)
    if g.shape != f.shape:
        raise UsageError(
            f"{judge!r} cannot compare outputs of different shapes ({tuple(g.shape)} golden, {tuple(f.shape)} faulty); "
            "use exact-sequence or a function of your own"
        )
    return g, f


class DecisionJudge:
    """Base of the judges that compare decision rows; a subclass selects the rows and compares them."""

    DIMENSIONS: ClassVar[int] = 1
    """Smallest number of dimensions of an output."""

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        """The verdict on a faulty output, as defined by `Judge`."""
        g, f = (self.rows(x) for x in same_shaped(golden, faulty, self, self.DIMENSIONS))
        return self.compare(host_rows(g), host_rows(f))

    def decision_rows(self, output: Any) -> Tensor:
        """The decision rows of an output, [n, ...], on its device and without synchronisation."""
        return self.rows(decision_tensor(output, self, self.DIMENSIONS))

    def rows(self, output: Tensor) -> Tensor:
        """The decision rows of a decision tensor; raises ``UsageError`` if its shape does not fit."""
        raise NotImplementedError

    def compare(self, golden: NDArray[Any], faulty: NDArray[Any]) -> JudgeVerdict:
        """Compare golden and faulty rows from `host_rows`, both [n, ...], of one or several trials."""
        raise NotImplementedError

    def is_right(self, rows: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Mask of the rows that agree with the labels, bool[n]; None if the decision cannot be compared with labels."""
        return None


def host_rows(rows: Tensor) -> NDArray[Any]:
    """Decision rows as a contiguous numpy array on the CPU; floating-point rows as float64."""
    values = doubles(rows) if rows.dtype.is_floating_point else array_of(rows)
    return np.ascontiguousarray(values)


def _scores_of_classes(output: Tensor, judge: Judge) -> Tensor:
    if output.ndim > 2:
        raise UsageError(
            f"{judge!r} needs one row of class scores per sample, but the output has shape {tuple(output.shape)}; "
            "try next-token, exact-sequence, or a function of your own"
        )
    if output.shape[-1] < 2:
        raise UsageError(
            f"{judge!r} needs two or more classes, but the output has shape {tuple(output.shape)}; try threshold"
        )
    return output


@dataclass(frozen=True)
class Top1(DecisionJudge):
    """Judges a sample incorrect if the most likely class changed.

    Severity: fall of that class's softmax probability. Output: [n, classes].
    """

    DIMENSIONS = 2

    def rows(self, output: Tensor) -> Tensor:
        return _scores_of_classes(output, self)

    def compare(self, golden: NDArray[Any], faulty: NDArray[Any]) -> JudgeVerdict:
        golden, faulty = (scores.astype(np.float64, copy=False) for scores in (golden, faulty))  # whole numbers, bool
        rows, choice = np.arange(len(golden)), golden.argmax(1)
        with np.errstate(all="ignore"):  # faults make NaN and infinity, which get infinite severity
            before, after = (np.exp(x - x.max(1, keepdims=True)) for x in (golden, faulty))
            fall = before[rows, choice] / before.sum(1) - after[rows, choice] / after.sum(1)
        return make_verdict(choice != faulty.argmax(1), fall)

    def is_right(self, rows: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray(rows.argmax(1) == labels)


@dataclass(frozen=True)
class TopK(DecisionJudge):
    """Judges a sample incorrect if the set of the k most likely classes changed.

    Severity: share of the golden set that was lost. Output: [n, classes].

    If classes have equal scores, the first ones count.
    """

    k: int = 5
    DIMENSIONS = 2

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"topk: k is {self.k}; expected 1 or more")

    def rows(self, output: Tensor) -> Tensor:
        scores = _scores_of_classes(output, self)
        if self.k >= scores.shape[-1]:
            raise UsageError(f"topk: k is {self.k}, but the output has {scores.shape[-1]} classes; choose a smaller k")
        return float8_as_float32(scores).sort(dim=-1, descending=True, stable=True).indices[:, : self.k]

    def compare(self, golden: NDArray[Any], faulty: NDArray[Any]) -> JudgeVerdict:
        share_kept = (golden[:, :, None] == faulty[:, None, :]).any(2).mean(1)
        return make_verdict(share_kept < 1, 1 - share_kept)

    def is_right(self, rows: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray((rows == labels[:, None]).any(1))


@dataclass(frozen=True)
class Threshold(DecisionJudge):
    """Judges a sample incorrect if its score crossed ``at`` and moved by more than ``tolerance``.

    Severity: size of the move. Output: [n] or [n, 1].

    ``logits=True`` applies the sigmoid first.
    """

    at: float = 0.5
    tolerance: float = 0.0
    logits: bool = False

    def rows(self, output: Tensor) -> Tensor:
        if output.numel() != output.shape[0]:
            raise UsageError(
                f"{self!r} needs one score per sample, but the output has shape {tuple(output.shape)}; try top1"
            )
        return output.reshape(-1)

    def compare(self, golden: NDArray[Any], faulty: NDArray[Any]) -> JudgeVerdict:
        with np.errstate(all="ignore"):
            before, after = self._scores(golden), self._scores(faulty)
            moved = np.abs(after - before)
            crossed = (before >= self.at) != (after >= self.at)
        return make_verdict(crossed & ~(moved <= self.tolerance), moved)

    def is_right(self, rows: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray((self._scores(rows) >= self.at) == (labels > 0))

    def _scores(self, rows: NDArray[Any]) -> Doubles:
        rows = rows.astype(np.float64, copy=False)  # whole numbers, bool
        return np.asarray(1 / (1 + np.exp(-rows)) if self.logits else rows)


@dataclass(frozen=True)
class NextToken(Top1):
    """Judges a sample incorrect if the most likely next token (last position) changed.

    Severity: fall of its probability. Output: [n, time, vocabulary].
    """

    DIMENSIONS = 3

    def rows(self, output: Tensor) -> Tensor:
        return output[:, -1]


@dataclass(frozen=True)
class ExactSequence(DecisionJudge):
    """Judges a sample incorrect if any token differs.

    Severity: share of positions that differ. Output: token ids [n, time], or logits [n, time, vocabulary].

    Lengths may differ (generation that stops early): the missing part counts as different.
    """

    DIMENSIONS = 2

    def __call__(self, golden: Any, faulty: Any, batch: Any) -> JudgeVerdict:
        g, f = (self.decision_rows(x) for x in (golden, faulty))
        if g.shape[0] != f.shape[0]:
            raise UsageError(
                f"{self!r}: the golden output has {g.shape[0]} sequences, the faulty one {f.shape[0]}; "
                "the batch size must not change"
            )
        return self.compare(host_rows(g), host_rows(f))

    def rows(self, output: Tensor) -> Tensor:
        scores = output.dtype.is_floating_point
        if scores and output.ndim < 3:
            raise UsageError(
                f"{self!r} needs logits [n, time, vocabulary] or token ids, but the output has shape {tuple(output.shape)}; "
                "try top1"
            )
        return (float8_as_float32(output).argmax(-1) if scores else output).long()

    def compare(self, golden: NDArray[Any], faulty: NDArray[Any]) -> JudgeVerdict:
        longest, common = max(golden.shape[1], faulty.shape[1]), min(golden.shape[1], faulty.shape[1])
        differing = (golden[:, :common] != faulty[:, :common]).sum(1) + float(longest - common)
        return make_verdict(differing > 0, differing / max(longest, 1))


@dataclass(frozen=True)
class Segmentation(DecisionJudge):
    """Judges a sample incorrect if its map of pixel labels changed too much.

    Severity: 1 - intersection over union of the golden and the faulty map.

    Output: class scores [n, classes, height, width], or whole-number labels [n, height, width]. A map is the set of its
    pairs (pixel, label), without the pairs whose label is ``background``. An answer is incorrect if the intersection
    over union of the two sets is below ``iou``. With ``iou=1`` a single pixel makes it incorrect.
    """

    iou: float = 0.95
    background: int | None = None
    DIMENSIONS = 3

    def __post_init__(self) -> None:
        if not 0 < self.iou <= 1:
            raise UsageError(f"segmentation: iou is {self.iou}; expected a value above 0, at most 1")

    def rows(self, output: Tensor) -> Tensor:
        scores = output.dtype.is_floating_point
        if output.ndim != (4 if scores else 3):
            raise UsageError(
                f"{self!r} does not fit an output {output.dtype} of shape {tuple(output.shape)}; it needs class scores "
                "[n, classes, height, width] or whole-number labels [n, height, width]"
            )
        return rows_of(float8_as_float32(output).max(1).indices if scores else output).long()

    def compare(self, golden: NDArray[Any], faulty: NDArray[Any]) -> JudgeVerdict:
        counted = [np.ones_like(m, bool) if self.background is None else m != self.background for m in (golden, faulty)]
        both = ((golden == faulty) & counted[0]).sum(1, dtype=np.float64)
        either = sum(c.sum(1, dtype=np.float64) for c in counted) - both
        overlap = np.where(either > 0, both / np.maximum(either, 1), 1.0)
        return make_verdict(overlap < self.iou, 1 - overlap)


def right_answers(judge: Judge, output: Any, labels: Any, samples: int) -> NDArray[np.bool_] | None:
    """Mask of the samples whose decision agrees with the label, bool[samples].

    None if there are no labels, or if the judge makes no decision that can be compared with a label. Raises
    ``UsageError`` if the labels are not one whole number per sample.
    """
    if labels is None or not isinstance(judge, DecisionJudge):
        return None
    rows = host_rows(judge.decision_rows(output))
    if judge.is_right(rows[:0], np.zeros(0, np.int64)) is None:
        return None
    return judge.is_right(rows, label_array(labels, samples))


def label_array(labels: Any, samples: int) -> NDArray[np.int64]:
    """The labels of a batch as int64[samples]; raises ``UsageError``."""
    array = array_of(labels)
    if array.shape != (samples,) or array.dtype.kind not in "biuf" or not np.array_equal(array, np.round(array)):
        raise UsageError(
            f"the labels of a batch are {array.dtype}{list(array.shape)}; expected a whole number for each of its "
            f"{samples} inputs"
        )
    return array.astype(np.int64)
